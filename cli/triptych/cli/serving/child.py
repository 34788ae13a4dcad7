"""Run a program that ends in good order when it is interrupted, however it is told to end."""

import ctypes
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

PR_SET_PDEATHSIG = 1


def run_interruptible(command: Sequence[str]) -> int:
    """Run ``command`` to its end and return its exit status; 128 + n if signal n killed it.

    SIGINT and SIGTERM both reach it as SIGINT, once each: it has a session of its own, so that
    ctrl-c in a terminal does not reach it a second time. If this process is killed, the
    program is interrupted too (Linux).
    """
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_begin)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        child.send_signal(signal.SIGINT)

    # What comes before ends this process, and the child with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _begin() -> None:
    """Heed interrupts, which a shell's background jobs ignore, and get one when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGINT)
