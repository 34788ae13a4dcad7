"""How the stages of one machine share its cores.

Prefill and decode of a small machine run on the same cores. If both used all of them at the
same time, their threads would wait for each other's time slices; if each had half, decode
would take many steps of small batches beside the prefill, each as dear as a full one. So
they take turns: a step has all cores, and whoever waited longest has the next step.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


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


class OwnCores:
    """Every step takes the same number of threads, whatever others do."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @contextmanager
    def step(self) -> Generator[None]:
        yield


class Turns:
    """Steps of all workers that share a directory run one after another, on all cores.

    Two file locks make the turns: whoever holds ``next`` gets ``turn`` next, so a worker
    that has just ended a step cannot snatch the following one from a worker that waits. The
    kernel opens the locks of a process that dies.
    """

    def __init__(self, directory: Path, cores: int | None = None) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._next, self._turn = (
            os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("next", "turn")
        )
        torch.set_num_threads(cores or usable_cores())

    @contextmanager
    def step(self) -> Generator[None]:
        """Wait for the turn, and keep it for the length of a step."""
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)


Cores = OwnCores | Turns
