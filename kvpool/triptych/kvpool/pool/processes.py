"""Identity of a process, and whether it still runs: a pid alone is reused by later processes."""

import os
import select
import signal
from contextlib import suppress
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


ELSEWHERE = ProcessKey(0, 0, "elsewhere")
"""Any process of another node. It maps no memory of this one, so nothing has to be fenced."""


def this_process() -> ProcessKey:
    """The key of the calling process."""
    _, started = _state_and_start("self")
    return ProcessKey(os.getpid(), started, _space())


def is_here(process: ProcessKey) -> bool:
    """Whether this process can see whether that one lives, and end it."""
    return process.space == _space()


def is_alive(process: ProcessKey) -> bool:
    """Whether the process runs or sleeps; a zombie that nobody has waited for is dead.

    A process of another machine or pid namespace cannot be seen from here and counts as
    alive: the time-out of its lease decides about it.
    """
    if not is_here(process):
        return True
    try:
        state, started = _state_and_start(str(process.pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return started == process.started and state not in "ZX"


def end(process: ProcessKey, timeout_s: float = 5.0) -> bool:
    """Kill a process and wait until it is gone, so that it writes nothing any more.

    This is the fence around memory that changes hands: a process that is only frozen, or slow,
    would wake up and write into pages that are somebody else's by then.

    Returns: False if it cannot be reached from here, or is the calling process itself
    """
    if not is_here(process) or process.pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # Checked only now: the handle keeps the pid from being reused.
        if not is_alive(process):
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return bool(select.select([handle], [], [], timeout_s)[0])
    except PermissionError:
        return False
    finally:
        os.close(handle)


def _state_and_start(pid: str) -> tuple[str, int]:
    stat = Path("/proc", pid, "stat").read_text()
    # The name in parentheses may itself hold spaces and parentheses: read behind the last one.
    behind_name = stat.rpartition(")")[2].split()
    return behind_name[0], int(behind_name[19])


def _space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
