"""Core scheduling: how the stages of one machine share its CPU cores.

Prefill and decode of a small machine run on the same cores. With all cores for both at once, their
threads would wait for each other's time slices. With half the cores each, decode would take many
steps of small batches beside prefill, each as expensive as a full one. So the stages alternate: a
step has all cores, and the stage that has waited longest takes the next step. Where other programs
run on these cores, a step has fewer threads (``thread_team``).
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path

import torch

from triptych.core.config.machine import usable_cores
from triptych.workers.thread_team import ThreadTeam, Usage, idle_cores

POLL_S = 0.004
"""Interval at which a stage that yields checks whether it still has to."""


class DedicatedCores:
    """Every step uses the same number of threads, without waiting for other stages."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @contextmanager
    def step(self, _is_urgent: Callable[[], bool], *, leaves_core: bool = False) -> Generator[None]:
        yield

    def set_prefilling(self, has_more: bool) -> None:
        """Do nothing: no stage yields to this one."""


class SharedCores:
    """Steps of all workers that share a directory run one after another, on all cores.

    Two file locks order the steps: the holder of ``next`` gets ``turn`` next, so a worker that has
    just ended a step cannot take the next one before a worker that waits. The kernel releases
    the locks of a process that dies. The file of ``turn`` holds the thread team that the workers
    share; only the holder reads and writes it.
    """

    def __init__(self, directory: Path, cores: int | None = None) -> None:
        """``cores``: most threads of a step; None: the cores that this process can use."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._next, self._turn, self._prefilling = (
            os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("next", "turn", "prefilling")
        )
        self._cores = cores or usable_cores()
        torch.set_num_threads(self._cores)

    def set_prefilling(self, has_more: bool) -> None:
        """Set whether this worker has prompts to prefill: decode yields to it while it has."""
        fcntl.flock(self._prefilling, fcntl.LOCK_SH if has_more else fcntl.LOCK_UN)

    def _others_prefill(self) -> bool:
        try:
            fcntl.flock(self._prefilling, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._prefilling, fcntl.LOCK_UN)
        return False

    @contextmanager
    def step(self, is_urgent: Callable[[], bool], *, leaves_core: bool = False) -> Generator[None]:
        """Wait for the turn and hold it during a step.

        A step that is not urgent waits until it is, or until no worker has prompts to prefill.
        ``leaves_core``: the step leaves a core to other processes.
        """
        while not is_urgent() and self._others_prefill():
            time.sleep(POLL_S)
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            if leaves_core and self._cores > 1:
                torch.set_num_threads(self._cores - 1)
                yield
            else:
                with self._team() if self._cores > 1 else nullcontext():
                    yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    @contextmanager
    def _team(self) -> Generator[None]:
        """Run a step with the shared thread team, and judge the team by what the step used."""
        team, before = self._read_team(), Usage.now()
        if team.threads < self._cores:
            team = team.enlarged(self._cores, idle_cores(), before.wall_s)
        if team.threads != torch.get_num_threads():
            torch.set_num_threads(team.threads)
        yield
        after = Usage.now()
        team = team.after(after - before, after.wall_s)
        numbers = team.threads, team.enlarge_at_s, team.rest_s, *astuple(team.window)
        os.pwrite(self._turn, _TEAM.pack(*numbers), 0)

    def _read_team(self) -> ThreadTeam:
        """The team as the last step left it; all cores at the first step."""
        written = os.pread(self._turn, _TEAM.size, 0)
        if len(written) < _TEAM.size:
            return ThreadTeam(threads=self._cores)
        threads, enlarge_at_s, rest_s, wall_s, cpu_s, switches = _TEAM.unpack(written)
        return ThreadTeam(
            threads=min(threads, self._cores),
            window=Usage(wall_s=wall_s, cpu_s=cpu_s, switches=switches),
            enlarge_at_s=enlarge_at_s,
            rest_s=rest_s,
        )


_TEAM = struct.Struct("=iddddq")
"""Threads, time of the next enlargement, rest, and the window."""


Cores = DedicatedCores | SharedCores
