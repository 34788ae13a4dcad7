"""What every stage engine is: messages in, one step of work at a time, messages out."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from triptych.core.errors import TriptychError
from triptych.core.messages import ROUTER, Finished, Message, Send, Stage, failed


class Engine(Protocol):
    """One stage. All calls come from one thread, so an engine needs no locks."""

    stage: Stage

    def accept(self, message: Message) -> Iterable[Send] | None:
        """Take a message; None if it is not for this stage."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        ...

    def wait_s(self) -> float | None:
        """Seconds after which there may be something to do though no message came; None: never."""
        ...

    def step(self) -> Iterable[Send]:
        """Do one unit of compute, short enough that other stages may wait for it."""
        ...

    def is_late(self) -> bool:
        """Whether it is behind what was promised, so that it may step again in the same turn."""
        ...

    def requests(self) -> list[str]:
        """Ids of the requests that this stage holds."""
        ...

    def cancel(self, requests: Sequence[str]) -> None:
        """Forget these requests and free what they hold; unknown ids are ignored."""
        ...

    def abandon(self) -> None:
        """Forget every request, and free also what was handed over and nobody has taken yet.

        For when the router died: nobody else knows of those pages.
        """
        ...


def refuse(request: str, error: TriptychError, tokens: int = 0) -> Send:
    """Tell the router that a request ends here with an error."""
    return Send(ROUTER, Finished(request=request, tokens=tokens, error=failed(request, error)))


def finished(request: str, tokens: int) -> Send:
    """Tell the router that a request is done and holds nothing any more."""
    return Send(ROUTER, Finished(request=request, tokens=tokens))
