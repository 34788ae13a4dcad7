"""Which process is meant, and whether it still lives: a pid alone is used again by the next one."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process of this machine, told apart from a later one with the same pid."""

    pid: int
    """Process id, as its own pid namespace counts."""

    started: int
    """Start time, in clock ticks since boot."""

    space: str
    """Boot id and pid namespace, outside of which the other two mean nothing."""


def this_process() -> ProcessKey:
    """The key of the calling process."""
    _, started = _state_and_start("self")
    return ProcessKey(os.getpid(), started, _space())


def is_alive(process: ProcessKey) -> bool:
    """Whether the process runs or sleeps; a zombie that nobody has waited for is dead.

    A process of another machine or pid namespace cannot be seen from here and counts as
    alive: the time-out of its lease decides about it.
    """
    if process.space != _space():
        return True
    try:
        state, started = _state_and_start(str(process.pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return started == process.started and state not in "ZX"


def _state_and_start(pid: str) -> tuple[str, int]:
    stat = Path("/proc", pid, "stat").read_text()
    # The name in parentheses may itself hold spaces and parentheses: read behind the last one.
    behind_name = stat.rpartition(")")[2].split()
    return behind_name[0], int(behind_name[19])


def _space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
