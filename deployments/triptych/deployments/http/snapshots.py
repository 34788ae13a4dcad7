"""Answers of other processes that are reused for a short time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Snapshot(Generic[T]):
    """The last answer of ``source``, fetched again when it is older than ``max_age_s``.

    However many callers there are, ``source`` is called by one at a time, so probes and viewers
    of an open port cannot load the processes behind it. A failed call is not kept.
    """

    def __init__(
        self,
        source: Callable[[], Awaitable[T]],
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._max_age_s, self._clock = source, max_age_s, clock
        self._asking = asyncio.Lock()
        self._answer: tuple[float, T] | None = None
        """When it was fetched, and the answer."""

    async def get(self) -> T:
        """Raises: what ``source`` raises"""
        async with self._asking:
            if self._answer is None or self._clock() - self._answer[0] > self._max_age_s:
                answer = await self._source()
                self._answer = (self._clock(), answer)
            return self._answer[1]
