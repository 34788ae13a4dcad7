"""What a call of a kernel found out is remembered for the next one with the same tensors."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
About = TypeVarTuple("About")


class Known:
    """Checks, addresses and strides of tensors, which do not move: found once.

    A step asks each layer's tables again, and finding out takes longer than reading a few pages.
    Tensors and tables are told apart by identity; what is remembered keeps them alive.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def __call__(self, find: Callable[[*About], T], *about: *About) -> T:
        """``find(*about)``, or what it returned before."""
        key = (find, *about)
        if key not in self._found:
            self._found[key] = find(*about)
        return self._found[key]
