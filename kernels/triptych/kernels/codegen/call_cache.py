"""What a call of a kernel found out is remembered for the next one with the same tensors."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Known:
    """Checks, addresses and strides of an owner's tensors, which do not move: found once.

    A step asks each layer's tables again, and finding out takes longer than reading a few pages.
    Tensors and tables are told apart by identity. What is remembered keeps alive what it is about,
    so that must not be the owner: a ring of the two would hold an arena until it is collected.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def __call__(self, find: Callable[[], T], *about: Hashable) -> T:
        """What ``find`` returns, or returned when last asked about the same."""
        if about not in self._found:
            self._found[about] = find()
        return self._found[about]
