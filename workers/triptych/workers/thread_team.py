"""Thread team: the number of OpenMP threads of a step, by the cores that steps really get.

The threads of a team wait for each other after every operation. If another program runs on one of
their cores, all of them wait for the thread there, and the others spin meanwhile: a step of two
threads takes ten times as long as a step of one (docs/log.md). So a team is as large as the number
of cores that its threads are given, and is enlarged when cores are idle.
"""

import os
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

WINDOW_S = 0.25
"""Time of steps after which a team is judged. Processes of the server itself, such as the ingress,
take a core for tens of milliseconds when requests arrive."""
LENIENCE = 0.5
"""Part of a core by which a team may miss its size. A calm machine gives two threads 1.9 cores, one
with 16 clients 1.6, and one with a busy program at most 1.5."""
SWITCHES_PER_S = 20
"""Threads that are preempted less often miss their time for another reason, such as a disk."""
FIRST_REST_S, MAX_REST_S = 0.5, 30.0
"""Least and most time for which a team that was reduced is not enlarged. It is also as long as the
steps that were judged, since a first step is slow for other reasons, and doubles if the enlarged
team is reduced again soon."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Wall time, CPU time and preemptions of a process: since its start, or in a step."""

    wall_s: float
    cpu_s: float
    switches: int
    """How often one of its threads was preempted."""

    @classmethod
    def now(cls) -> "Usage":
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime
        return cls(wall_s=time.monotonic(), cpu_s=cpu_s, switches=used.ru_nivcsw)

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(
            wall_s=self.wall_s - other.wall_s,
            cpu_s=self.cpu_s - other.cpu_s,
            switches=self.switches - other.switches,
        )

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            wall_s=self.wall_s + other.wall_s,
            cpu_s=self.cpu_s + other.cpu_s,
            switches=self.switches + other.switches,
        )


NOTHING = Usage(wall_s=0.0, cpu_s=0.0, switches=0)


@dataclass(frozen=True, kw_only=True)
class ThreadTeam:
    """Number of threads of the next step, and what the last steps used."""

    threads: int
    window: Usage = NOTHING
    """What the steps used since the team was last judged."""
    enlarge_at_s: float = 0.0
    """Time (monotonic clock) before which the team is not enlarged."""
    rest_s: float = 0.0
    """Length of the last rest, less the time for which a team was large enough since."""

    def after(self, step: Usage, now_s: float) -> "ThreadTeam":
        """Judge the team if its window is full, and reduce it to the cores that it was given."""
        window = self.window + step
        if window.wall_s < WINDOW_S:
            return replace(self, window=window)
        given = max(1, int(window.cpu_s / window.wall_s + LENIENCE))
        was_preempted = window.switches >= SWITCHES_PER_S * window.wall_s
        if given >= self.threads or not was_preempted:
            calm_s = window.wall_s if self.threads > 1 else 0.0
            return replace(self, window=NOTHING, rest_s=max(0.0, self.rest_s - calm_s))
        rest_s = min(MAX_REST_S, max(FIRST_REST_S, window.wall_s, 2 * self.rest_s))
        return ThreadTeam(threads=given, enlarge_at_s=now_s + rest_s, rest_s=rest_s)

    def enlarged(self, most: int, idle: int, now_s: float) -> "ThreadTeam":
        """The team after its rest, with idle cores added, at most ``most`` threads.

        One thread is added after ``MAX_REST_S`` more even if no core seems idle: in a container
        the count may be that of other cores.
        """
        if now_s < self.enlarge_at_s:
            return self
        added = max(idle, int(now_s >= self.enlarge_at_s + MAX_REST_S))
        threads = min(most, self.threads + added)
        if threads <= self.threads:
            return self
        return ThreadTeam(threads=threads, enlarge_at_s=now_s, rest_s=self.rest_s)


def idle_cores(lent: int = 0, loadavg: Path = Path("/proc/loadavg")) -> int:
    """Cores of the machine on which nothing runs but the caller; all but one if unknown.

    ``lent``: threads that may run, but let a step have their cores.
    """
    cores = os.cpu_count() or 1
    try:
        running = int(loadavg.read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        running = 1
    return max(0, cores - max(1, running - lent))
