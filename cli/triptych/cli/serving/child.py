"""Child processes, to which SIGINT and SIGTERM are passed on as SIGINT."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from threading import Thread
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def run_interruptible(command: Sequence[str]) -> int:
    """Run ``command`` to its end and return its exit status; 128 + n if signal n killed it.

    0 if it was interrupted before it could handle that.

    SIGINT and SIGTERM are passed on as SIGINT. The child runs in its own session, so Ctrl-C in a
    terminal does not reach it twice. If this process is killed, the child gets SIGINT (Linux).
    """
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_begin)

    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        child.send_signal(signal.SIGINT)

    # A signal before this point ends this process and the child.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    status = child.wait()
    if interrupted and status == -signal.SIGINT:
        return 0
    return status if status >= 0 else 128 - status


def start_child(command: Sequence[str]) -> int:
    """Start a process that gets SIGINT when this one ends; its id, of which ``wait_for`` is due."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=_begin).pid


def wait_for(child: int) -> None:
    """Wait in a thread until a child of this process has ended, so that nothing is left of it."""
    Thread(target=os.waitpid, args=(child, 0), daemon=True).start()


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process, and with it all that it has in memory."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def _begin() -> None:
    """In the child: restore SIGINT, and have it sent when the parent dies (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGINT)
