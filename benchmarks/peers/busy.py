"""A process that takes a core, as a neighbour on the machine does."""

import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import psutil

LOOP = "while True: pass"
SETTLE_S = 0.5


@contextmanager
def busy_core(wanted: bool) -> Generator[Callable[[], float]]:
    """Keep a core busy if wanted; the function returns the CPU seconds that this has taken."""
    if not wanted:
        yield lambda: 0.0
        return
    with subprocess.Popen([sys.executable, "-c", LOOP]) as loop:
        try:
            time.sleep(SETTLE_S)
            process = psutil.Process(loop.pid)
            yield lambda: sum(process.cpu_times()[:2])
        finally:
            loop.kill()
