"""What collections leave alone once a process serves, what they still find, and free memory."""

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


FRAGMENTED = """
from triptych.deployments.replicas.memory_tuning import tune_memory
import time

def resident_mb():
    with open("/proc/self/status") as lines:
        return next(int(one.split()[1]) for one in lines if one.startswith("RssAnon")) / 1024

kept = [bytes(1500) for _ in range(80_000)][::40]
print(resident_mb())
tune_memory(look_every_s=0.05)
until = time.monotonic() + 20
before = resident_mb()
while resident_mb() > before - 50 and time.monotonic() < until:
    time.sleep(0.05)
print(resident_mb())
"""
"""Between blocks that are kept, a hundred MB are free."""


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_free_memory_between_used_blocks_is_given_back() -> None:
    told = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, check=True)
    before, after = map(float, told.stdout.split())
    assert after < before - 50
