"""The protocol of stage engines: messages in, one step of work at a time, messages out."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from triptych.core.errors import TriptychError
from triptych.core.messages import (
    ROUTER,
    Cancel,
    Compress,
    Encode,
    EncodeImages,
    Evict,
    Expect,
    Finished,
    ImageData,
    ImagesEncoded,
    ImagesRead,
    Join,
    Layers,
    LayersEncoded,
    Message,
    Preempt,
    Prefill,
    Resume,
    Send,
    Stage,
    failed,
)
from triptych.workers.core_scheduler import CoreUse


class Engine(Protocol):
    """One stage. All calls come from one thread, so an engine needs no locks."""

    stage: Stage

    def accept(self, message: Message) -> Iterable[Send] | None:
        """Handle a message; None if it is not for this stage."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        ...

    def wait_s(self) -> float | None:
        """Seconds after which there can be work without a message; None: never."""
        ...

    def step(self) -> Iterable[Send]:
        """Do one unit of compute, short enough for other stages to wait for it."""
        ...

    def is_late(self) -> bool:
        """Whether the engine has missed a deadline, so that it can step again in the same turn."""
        ...

    def core_use(self) -> CoreUse:
        """How the threads of the next step use its cores."""
        ...

    def requests(self) -> list[str]:
        """Ids of the requests that this stage holds."""
        ...

    def cancel(self, requests: Sequence[str]) -> None:
        """Drop these requests and free their pages; unknown ids are ignored."""
        ...

    def abandon(self) -> None:
        """Drop every request, and free handed-off pages that no worker has attached yet.

        Used when the router has died: only the router knew of those pages.
        """
        ...


def refuse(request: str, error: TriptychError, tokens: int = 0) -> Send:
    """The message that tells the router that a request ended with an error."""
    return Send(ROUTER, Finished(request=request, tokens=tokens, error=failed(request, error)))


def finished(request: str, tokens: int) -> Send:
    """The message that tells the router that a request is done and holds no pages."""
    return Send(ROUTER, Finished(request=request, tokens=tokens))


def requests_of(message: Message) -> list[str]:
    """Ids of the requests that a message asks a stage to work on, or to cancel."""
    match message:
        case Prefill(requests=requests):
            return [request.id for request in requests]
        case Compress(items=items):
            return [item.request for item in items]
        case (
            Encode(requests=names)
            | Preempt(requests=names)
            | Expect(requests=names)
            | Cancel(requests=names)
        ):
            return list(names)
        case Layers(request=name) | LayersEncoded(request=name) | Evict(request=name):
            return [name]
        case (
            EncodeImages(request=name)
            | ImageData(request=name)
            | ImagesEncoded(request=name)
            | ImagesRead(request=name)
        ):
            return [name]
        case Join(request=request) | Resume(join=Join(request=request)):
            return [request.id]
        case _:
            return []
