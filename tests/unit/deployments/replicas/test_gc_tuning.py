"""What collections leave alone once a process serves, and what they still find."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from triptych.deployments.replicas.gc_tuning import freeze_heap


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
