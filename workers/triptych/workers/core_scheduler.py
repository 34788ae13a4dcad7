"""How the stages of one machine share its cores.

Prefill and decode of a small machine run on the same cores. If both used all of them at the
same time, their threads would wait for each other's time slices; if each had half, decode
would take many steps of small batches beside the prefill, each as dear as a full one. So
they take turns: a step has all cores, and whoever waited longest has the next step.
"""

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
POLL_S = 0.004
"""Time after which who can wait looks again whether it still has to."""


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: those it may run on, or what its container has time for.

    A container sees all cores of its machine. With a thread on each and the time of eight, the
    kernel stops all of them for most of every period.
    """
    quota = _quota(cgroup)
    affinity = len(os.sched_getaffinity(0))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of CPU time of this container, by cgroup v2 or v1; None: no limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.strip().isdigit() and int(period) > 0 else None


class DedicatedCores:
    """Every step takes the same number of threads, whatever others do."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @contextmanager
    def step(self, _is_urgent: Callable[[], bool]) -> Generator[None]:
        yield

    def set_prefilling(self, has_more: bool) -> None:
        """Nobody waits for what is read here."""


class SharedCores:
    """Steps of all workers that share a directory run one after another, on all cores.

    Two file locks make the turns: whoever holds ``next`` gets ``turn`` next, so a worker
    that has just ended a step cannot snatch the following one from a worker that waits. The
    kernel opens the locks of a process that dies.
    """

    def __init__(self, directory: Path, cores: int | None = None) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._next, self._turn, self._reading = (
            os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("next", "turn", "reading")
        )
        torch.set_num_threads(cores or usable_cores())

    def set_prefilling(self, has_more: bool) -> None:
        """Say whether there are prompts to be read here: whoever can wait then does."""
        fcntl.flock(self._reading, fcntl.LOCK_SH if has_more else fcntl.LOCK_UN)

    def _others_prefill(self) -> bool:
        try:
            fcntl.flock(self._reading, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._reading, fcntl.LOCK_UN)
        return False

    @contextmanager
    def step(self, is_urgent: Callable[[], bool]) -> Generator[None]:
        """Wait for the turn, and keep it for the length of a step.

        Whoever is not urgent waits until it is, or until no prompt is to be read.
        """
        while not is_urgent() and self._others_prefill():
            time.sleep(POLL_S)
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)


Cores = DedicatedCores | SharedCores
