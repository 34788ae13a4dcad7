"""What this machine has: memory for ``pool.kv_cache_memory_bytes: auto``, and cores."""

import os
from contextlib import suppress
from pathlib import Path

from triptych.core.config.values import MIB

STEP_BYTES = 64 * MIB
PART = 4
"""One part in so many of the memory that is free is for pages: weights, activations and the
replicas of all stages need some too."""
CGROUP = Path("/sys/fs/cgroup")


def pool_bytes(arena_path: str = "") -> int:
    """Memory for pages on this machine: a quarter of what is free, and at most what fits into
    ``/dev/shm``; with an ``arena_path``, half of the free disk.

    Units:   bytes, a multiple of 64 MiB and at least that
    """
    if arena_path:
        free = _free_disk(Path(arena_path)) // 2
    else:
        free = min(_free_memory() // PART, _free_disk(Path("/dev/shm")) * 9 // 10)
    return max(free // STEP_BYTES, 1) * STEP_BYTES


def _free_memory() -> int:
    """Memory that is free, or would be once caches are dropped, within the limit of a container."""
    free = 4096 * MIB
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        line = next(line for line in text.splitlines() if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        free = min(free, max(limit - used, 0))
    return free


def _free_disk(directory: Path) -> int:
    """Free bytes of the file system that holds a directory, or its nearest parent."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process can use: its CPU affinity, limited by the container's CPU quota.

    A container sees all cores of its machine. With more threads than its quota, the kernel stops
    all of them for most of every period.
    """
    quota = _quota(cgroup)
    affinity = len(os.sched_getaffinity(0))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _quota(cgroup: Path) -> float | None:
    """CPU quota of this container in cores, by cgroup v2 or v1; None: no limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.strip().isdigit() and int(period) > 0 else None
