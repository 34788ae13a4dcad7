"""What collections leave alone once a process serves, what they still find, and heaps of malloc."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from triptych.deployments.replicas.memory_tuning import freeze_heap


class Node:
    """Keeps itself alive."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_was_there_is_left_alone_and_what_comes_later_is_collected() -> None:
    kept, garbage = Node(), weakref.ref(Node())
    freeze_heap()
    assert garbage() is None, "what was garbage before is not kept for good"
    assert not any(one is kept for one in gc.get_objects())
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None


HEAPS = """
import ctypes, sys, threading
from triptych.deployments.replicas.memory_tuning import limit_arenas
assert sys.argv[1] == "all" or limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fdopen.restype = ctypes.c_void_p
together = threading.Barrier(6)
def work():
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
[one.start() for one in threads]
[one.join() for one in threads]
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc has heaps for threads")
@pytest.mark.parametrize(("heaps", "most"), [("all", 64), ("two", 2)])
def test_threads_share_two_heaps(heaps: str, most: int) -> None:
    told = subprocess.run([sys.executable, "-c", HEAPS, heaps], capture_output=True, check=True)
    found = told.stdout.count(b"<heap nr=")
    assert 2 <= found <= most
    assert (heaps == "all") == (found > 2)
