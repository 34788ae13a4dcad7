"""A cache of checks and addresses for repeated calls of a kernel with the same tensors."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class CallCache:
    """Checked addresses and strides of the tensors of its owner, a section or page lists.

    Each decode step calls kernels with the same tables of each layer, and checking them takes
    longer than reading a few pages. Tensors and tables in keys are compared by identity. A key
    keeps its objects alive, so it must not contain the owner: the reference cycle would keep an
    arena until garbage collection.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, compute: Callable[[], T], *key: Hashable) -> T:
        """The cached value for ``key``, or that of ``compute``; an error is not cached."""
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]
