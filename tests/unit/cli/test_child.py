"""Real processes, told to end in each of the ways that there are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CHILD = """
import os, sys, time
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], "a").write("interrupted")
    sys.exit(7)
"""
PARENT = """
import sys
import time
from triptych.cli.serving.child import run_interruptible
sys.exit(run_interruptible(sys.argv[1:]))
"""


def start(note: Path, *, in_background: bool = False) -> tuple["subprocess.Popen[str]", int]:
    command = [sys.executable, "-c", PARENT, sys.executable, "-c", CHILD, str(note)]
    parent = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=ignore_interrupts if in_background else None,
    )
    assert parent.stdout is not None
    with parent.stdout:
        return parent, int(parent.stdout.readline())


def ignore_interrupts() -> None:
    """As a shell without a terminal does for what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("in_background", [False, True])
def test_it_is_interrupted_once_and_ends_in_its_own_way(
    tmp_path: Path, number: signal.Signals, in_background: bool
) -> None:
    parent, _ = start(tmp_path / "note", in_background=in_background)
    parent.send_signal(number)
    assert parent.wait(timeout=20) == 7
    assert (tmp_path / "note").read_text() == "interrupted"


def test_it_does_not_outlive_whoever_waits_for_it(tmp_path: Path) -> None:
    parent, child = start(tmp_path / "note")
    left = psutil.Process(child)
    parent.kill()
    parent.wait(timeout=20)
    psutil.wait_procs([left], timeout=20)
    assert (tmp_path / "note").read_text() == "interrupted"


def test_the_status_tells_what_killed_it(tmp_path: Path) -> None:
    parent, child = start(tmp_path / "note")
    os.kill(child, signal.SIGKILL)
    assert parent.wait(timeout=20) == 128 + signal.SIGKILL


HELPED = """
import os, sys
from triptych.cli.serving.child import start_child, wait_for
child = start_child(sys.argv[1:])
wait_for(child)
print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_helper_ends_with_its_parent_and_leaves_nothing(is_killed: bool) -> None:
    seconds = "60" if is_killed else "0"
    command = [sys.executable, "-c", HELPED, "/bin/sleep", seconds]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        helper = int(parent.stdout.readline())
        if is_killed:
            parent.kill()
        for _ in range(200):
            if not psutil.pid_exists(helper):
                break
            time.sleep(0.1)
        assert not psutil.pid_exists(helper)
    parent.wait(timeout=20)
