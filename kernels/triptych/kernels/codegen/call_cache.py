"""What a call of a kernel found out is remembered for the next one with the same tensors."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class CallCache:
    """Checks, addresses and strides of an owner's tensors, which do not move: found once.

    A step asks each layer's tables again, and finding out takes longer than reading a few pages.
    Tensors and tables are told apart by identity. What is remembered keeps alive what it is about,
    so that must not be the owner: a ring of the two would hold an arena until it is collected.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, compute: Callable[[], T], *key: Hashable) -> T:
        """What ``find`` returns, or returned when last asked about the same."""
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]
