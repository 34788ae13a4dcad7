"""Compiles the grammars of arriving requests outside of the loop that computes."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from triptych.core.messages import Message, Prefill, requests_in
from triptych.workers.sampling.grammar import GrammarMatcherFactory
from triptych.workers.stage import requests_of

logger = logging.getLogger(__name__)

STACK_BYTES = 16 << 20
"""More than the ingress's compile processes have, so that what compiles there compiles here."""


@dataclass(eq=False)
class GrammarPreparation:
    """Hands messages on in order; a request with a new grammar waits until that is compiled.

    Only messages about a waiting request wait with it, so no other request is delayed. ``compile``
    runs in one thread, which exists from the first grammar on.
    """

    forward: Callable[[Message], None]
    factory: GrammarMatcherFactory
    _held: deque[list[Message]] = field(default_factory=deque[list[Message]], init=False)
    """Each a message that waits, and what came for its request since."""
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _is_over: bool = field(default=False, init=False)

    def post(self, message: Message) -> None:
        """Take a message for the loop; any thread."""
        with self._changed:
            for part in _parts(message):
                held = self._held_with(requests_of(part))
                if held is not None:
                    held.append(part)
                elif self._is_ready(part):
                    self.forward(part)
                else:
                    self._hold(part)

    def drop(self) -> None:
        """Forget the messages that wait; any thread."""
        with self._changed:
            self._held.clear()

    def close(self) -> None:
        """Forget the messages that wait, and end the thread."""
        with self._changed:
            self._held.clear()
            self._is_over = True
            self._changed.notify()

    def _is_ready(self, message: Message) -> bool:
        return all(map(self.factory.is_ready, _grammars(message)))

    def _held_with(self, names: list[str]) -> list[Message] | None:
        for held in self._held:
            if any(request.id in names for request in requests_in(held[0])):
                return held
        return None

    def _hold(self, message: Message) -> None:
        self._held.append([message])
        self._changed.notify()
        if self._thread is None:
            before = threading.stack_size(STACK_BYTES)
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._is_over)
                if self._is_over:
                    return
                first = self._held[0][0]
            for grammar in _grammars(first):
                try:
                    self.factory.compile(grammar)
                except Exception:  # the request fails when it starts, and no other one does
                    logger.exception("a grammar cannot be compiled")
            with self._changed:
                if self._held and self._held[0][0] is first:  # else they were dropped
                    for message in self._held.popleft():
                        self.forward(message)


def _grammars(message: Message) -> Iterator[str]:
    return (one.sampling.grammar for one in requests_in(message) if one.sampling.grammar)


def _parts(message: Message) -> list[Message]:
    """A batch of prompts with grammars as a message for each prompt."""
    match message:
        case Prefill(requests=requests, encoders=encoders, arenas=arenas) if len(requests) > 1:
            if not any(_grammars(message)):
                return [message]
            return [
                replace(
                    message,
                    requests=(one,),
                    encoders=encoders[i : i + 1],
                    arenas=arenas[i : i + 1],
                )
                for i, one in enumerate(requests)
            ]
        case _:
            return [message]
