"""Streams the engine's tokens to one client until the end, a timeout or a disconnect."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from triptych.core.errors import Cancelled, DeadlineExceeded, StageLost
from triptych.core.messages import Failed, Tokens
from triptych.deployments.http.errors import RequestFailed, report
from triptych.deployments.http.interfaces import Engine
from triptych.deployments.http.json_frames import DONE, KEEP_ALIVE, event
from triptych.deployments.http.limits import request_id
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.http.openai.request_builder import Job
from triptych.deployments.http.openai.responses import Choice, ResponseBuilder
from triptych.deployments.transport.event_relay import OFFER, RELAYED, EventRelay, Outlet

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
"""Interval of comments in a silent stream, so that proxies do not close it."""

MAX_UNSENT_BYTES = 1 << 20
"""Events that wait for a slow client; with more, its tokens stay in the engine's queue."""

T = TypeVar("T")


async def follow(
    engine: Engine, job: Job, answer: ResponseBuilder, metrics: IngressMetrics
) -> AsyncGenerator[tuple[Choice, Tokens], None]:
    """Run the requests, and yield each batch of tokens with the choice that it was added to.

    Closing this closes the engine's generator, which cancels what still runs.

    Raises: RequestFailed if one of the choices failed; what the engine raises
    """
    choices = dict(zip((r.id for r in job.requests), answer.choices, strict=True))
    with metrics.track(job.requests) as timer:
        async with aclosing(engine.generate(job.requests, job.images)) as items:
            async for item in items:
                if isinstance(item, Failed):
                    raise RequestFailed(item)
                if job.is_prompt_alone:
                    item = _prompt_alone(item)
                timer.add(item)
                choice = choices[item.request]
                choice.add(item)
                yield choice, item
        if not all(choice.finish for choice in answer.choices):
            raise StageLost("decode")


def _prompt_alone(item: Tokens) -> Tokens:
    """The item without its output token, for requests that only score their prompt."""
    finish = item.finish and "length"
    return replace(item, tokens=(), text="", logprobs=(), finish=finish, stop=None)


async def collect(items: AsyncGenerator[object, None], timeout_s: float) -> None:
    """Consume all items.

    Raises: DeadlineExceeded
    """
    async with deadline(timeout_s), aclosing(items):
        async for _ in items:
            pass


async def frames(
    items: AsyncGenerator[tuple[Choice, Tokens], None], job: Job, answer: ResponseBuilder
) -> AsyncGenerator[bytes, None]:
    """Encode tokens as server-sent events."""
    async with aclosing(items):
        async for choice, item in items:
            yield b"".join(map(event, answer.chunks(choice, item)))
    if job.include_usage:
        yield event(answer.usage_chunk())


@asynccontextmanager
async def deadline(seconds: float) -> AsyncGenerator[None, None]:
    """Raises: DeadlineExceeded if the block takes longer"""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"not finished within {seconds:.0f} s") from error


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, and cancel it when the client disconnects.

    Call this after the request's body was read: the next message is the disconnect.

    Raises: Cancelled if the client disconnected; what ``work`` raises
    """
    task = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client went away")
    finally:
        task.cancel()
        hangup.cancel()
        await asyncio.gather(task, hangup, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientStalled(Cancelled):
    """The client does not read its stream any more."""


class EventStream(Response):
    """Server-sent events; the HTTP status is sent with the first event.

    An error before the first event becomes an HTTP status, a later one an ``error`` event. Events
    that queue up for a slow client are sent in one write. If there is no event for a while, the
    response starts with a comment, and later errors are events. A client that does not take a
    write within ``write_timeout_s`` counts as gone.

    With a ``relay`` Ray Serve's proxy is offered to read the events there; once it does, the
    response's own path has only the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        timeout_s: float,
        write_timeout_s: float,
        keep_alive_s: float = KEEP_ALIVE_S,
        headers: Mapping[str, str] = MappingProxyType({}),
        relay: EventRelay | None = None,
    ) -> None:
        # Not Response.__init__, which would declare a length of zero.
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._relay = relay
        self._outlet: Outlet | None = None
        self._started = self._is_writing = False
        self._position = 0
        """Bytes of the body that were written."""
        self._written_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._relay.outlet() if self._relay else nullcontext() as self._outlet:
                await unless_disconnected(receive, self._run(request_id(scope), send))
        except Cancelled as gone:
            if not self._started:
                raise
            logger.info("request %s: %s", request_id(scope), gone)

    async def _run(self, name: str, send: Send) -> None:
        try:
            await self._forward(send)
        except ClientStalled:  # nothing can be written any more
            raise
        except Exception as error:
            if not self._started:
                raise
            await self._write(send, event(report(error, name).body) + DONE, last=True)

    async def _forward(self, send: Send) -> None:
        ready = Unsent()
        wake = ready.filled
        now = asyncio.get_running_loop().time
        self._written_at = now()
        producer = asyncio.ensure_future(self._produce(ready))
        producer.add_done_callback(lambda _: wake.set())
        try:
            while not producer.done():
                await _wait(wake, self._written_at + self._keep_alive_s - now())
                wake.clear()
                if ready and not producer.done():
                    await self._write(send, ready.take())
                elif now() >= self._written_at + self._keep_alive_s and not producer.done():
                    await self._write(send, KEEP_ALIVE)
            if ready and producer.exception():
                await self._write(send, ready.take())
            await producer
            await self._write(send, ready.take() + DONE, last=True)
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def _produce(self, ready: "Unsent") -> None:
        async with deadline(self._timeout_s), aclosing(self._events) as events:
            async for frame in events:
                outlet = self._outlet
                if outlet and outlet.has_room and not ready and not self._is_writing:
                    self._put(outlet, frame)  # no other task has to wake up
                else:
                    await ready.put(frame)

    async def _write(self, send: Send, data: bytes, *, last: bool = False) -> None:
        scope = asyncio.timeout(self._write_timeout_s)
        self._is_writing = True
        try:
            async with scope:
                await self._write_part(send, data, last=last)
        except TimeoutError as error:
            if not scope.expired():
                raise
            text = f"the client took nothing for {self._write_timeout_s:.0f} s"
            raise ClientStalled(text) from error
        finally:
            self._is_writing = False

    async def _write_part(self, send: Send, data: bytes, *, last: bool) -> None:
        if self._outlet and self._outlet.is_open:
            await self._outlet.wait_for_room()
            self._put(self._outlet, data)
            if last:
                body: Message = {"type": "http.response.body", "body": b"", "more_body": False}
                await send({**body, RELAYED: self._position})
            return
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        self._wrote(data)
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        if self._outlet is None:
            return self.raw_headers
        return [*self.raw_headers, (OFFER.encode(), self._outlet.name.encode())]

    def _put(self, outlet: Outlet, data: bytes) -> None:
        """Raises: ClientStalled if the proxy is gone"""
        try:
            outlet.put(self._position, data)
        except ConnectionResetError as error:
            raise ClientStalled(str(error)) from error
        self._wrote(data)

    def _wrote(self, data: bytes) -> None:
        self._position += len(data)
        self._written_at = asyncio.get_running_loop().time()


class Unsent:
    """Events that wait to be written, up to ``MAX_UNSENT_BYTES``."""

    def __init__(self) -> None:
        self._frames = list[bytes]()
        self._bytes = 0
        self.filled = asyncio.Event()
        """Set when there is an event."""
        self._emptied = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._frames)

    async def put(self, frame: bytes) -> None:
        """Add an event, and wait while there are too many."""
        self._frames.append(frame)
        self._bytes += len(frame)
        self.filled.set()
        while self._bytes > MAX_UNSENT_BYTES:
            self._emptied.clear()
            await self._emptied.wait()

    def take(self) -> bytes:
        """All events that wait."""
        data = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        self._emptied.set()
        return data


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
