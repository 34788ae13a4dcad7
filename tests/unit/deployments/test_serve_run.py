"""An interrupted server: the first signal drains, the second one does not wait."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ray._private.node import Node

from triptych.deployments.serve_run import UNUSED, Interrupts, drain_all, without_unused_processes


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, previous)


def test_the_first_interrupt_drains_and_then_ends_the_server() -> None:
    drained = threading.Event()
    signal.signal(signal.SIGINT, Interrupts(drained.set))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert drained.is_set()


def test_the_second_interrupt_ends_the_wait() -> None:
    def drain() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    began = time.monotonic()
    signal.signal(signal.SIGINT, Interrupts(drain))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert time.monotonic() - began < 10


def test_before_ray_is_there_nothing_is_waited_for() -> None:
    began = time.monotonic()
    drain_all(60.0)
    assert time.monotonic() - began < 10


def test_ray_leaves_out_what_a_server_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNUSED:  # fails if this version of Ray has other methods; and puts them back
        monkeypatch.setattr(Node, name, getattr(Node, name))
    without_unused_processes()
    node = object.__new__(Node)  # the methods of Ray fail on it
    assert [getattr(node, name)() for name in UNUSED] == [None] * len(UNUSED)


def interrupt(process: subprocess.Popen[str]) -> str:
    """Interrupt a process until it ends, as a user would; what it wrote to stderr."""
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=30)[1]
    process.kill()
    return process.communicate()[1]


@pytest.mark.parametrize("after_s", [0.3, 2.0])
def test_an_interrupt_during_the_start_is_no_error(tmp_path: Path, after_s: float) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: [{name: a, import_path: 'time:sleep'}]")
    command = [sys.executable, "-m", "triptych.deployments.serve_run", str(config), "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    errors = interrupt(process)
    # Python prints and drops an interrupt that arrives in a destructor or a callback.
    assert "Traceback" not in errors or "Exception ignored in" in errors
    # CPython ends by the signal if it arrives while a module runs `exec`, although it was caught:
    # `run_interruptible`, which waits for this process, takes that for 0.
    assert process.returncode in (0, -signal.SIGINT), errors
