# grpcio and protocol buffers have no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The methods of ``triptych.v1.Triptych``, each equivalent to an HTTP route."""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from triptych.core.errors import Cancelled, DeadlineExceeded
from triptych.deployments.grpc import triptych_pb2 as pb
from triptych.deployments.grpc.bodies import body_of, fill_message, parse
from triptych.deployments.http.errors import MAX_MESSAGE_CHARS, ApiError, report
from triptych.deployments.http.keys import Client
from triptych.deployments.http.limits import OPAQUE_ID
from triptych.deployments.http.openai.protocol import MAX_SLO_MS
from triptych.deployments.http.openai.responses import ResponseBuilder
from triptych.deployments.http.serving import OpenAIServing, with_header_fields
from triptych.deployments.http.stream import collect, deadline

T = TypeVar("T")

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]
    Behavior = Callable[[bytes, Context], Coroutine[Any, Any, T]]

SERVICE = pb.DESCRIPTOR.services_by_name["Triptych"].full_name
LARGE_BYTES = 64 << 10
"""Larger requests are converted in a thread, so that other streams go on meanwhile."""

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC status of each HTTP status of the error tree; all others are INTERNAL."""

Begin = Callable[[Mapping[str, object], Client, str], Awaitable[ResponseBuilder]]


@dataclass(frozen=True)
class Method:
    """A generating method: its message types, and the method of ``OpenAIServing`` behind it."""

    request: type[Message]
    response: type[Message]
    begin: Begin


class Service:
    """The methods over one ``OpenAIServing``.

    Requests are handled as bytes, so that a message that cannot be parsed is an error of Triptych,
    with a code and a parameter, and not one of gRPC.
    """

    def __init__(self, serving: OpenAIServing) -> None:
        self._serving = serving

    def handlers(self) -> "dict[str, Handler]":
        """Handlers by the names of the methods."""
        plain = Method(pb.CompletionRequest, pb.CompletionResponse, self._serving.completion)
        chat = Method(pb.ChatCompletionRequest, pb.ChatCompletionResponse, self._serving.chat)
        return {
            "ListModels": _unary(self._list_models),
            "Completion": _unary(lambda body, call: self._whole(plain, body, call)),
            "ChatCompletion": _unary(lambda body, call: self._whole(chat, body, call)),
            "StreamCompletion": _stream(lambda body, call: self._stream(plain, body, call)),
            "StreamChatCompletion": _stream(lambda body, call: self._stream(chat, body, call)),
        }

    async def _list_models(self, body: bytes, context: "Context") -> bytes:
        async with _answering(context):
            self._client(context)
            parse(pb.ListModelsRequest, body)
            await self._serving.check_ready()
            models = [fill_message(pb.Model(), card) for card in self._serving.cards()]
            return pb.ListModelsResponse(data=models).SerializeToString()

    async def _whole(self, method: Method, body: bytes, context: "Context") -> bytes:
        async with _answering(context):
            client, answer = await self._begin(method, body, context, {})
            items = self._serving.run(client, answer)
            await collect(items, self._serving.config.request_timeout_s)

            def response() -> bytes:
                return fill_message(method.response(), answer.whole()).SerializeToString()

            return await asyncio.to_thread(response) if answer.is_long else response()

    async def _stream(self, method: Method, body: bytes, context: "Context") -> None:
        # Not a generator, so that a cancellation while a slow client is awaited is raised in here.
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with _answering(context):
            client, answer = await self._begin(method, body, context, options)
            items = self._serving.run(client, answer)
            async with deadline(self._serving.config.request_timeout_s), aclosing(items):
                async for choice, item in items:
                    for chunk in answer.chunks(choice, item):
                        await self._write(context, fill_message(method.response(), chunk))
                last = fill_message(method.response(), answer.usage_chunk())
                await self._write(context, last)

    async def _write(self, context: "Context", message: Message) -> None:
        """Raises: Cancelled if the client does not take it"""
        seconds = self._serving.config.write_timeout_s
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                await context.write(message.SerializeToString())
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise Cancelled(f"the client took nothing for {seconds:.0f} s") from error

    async def _begin(
        self, method: Method, data: bytes, context: "Context", options: Mapping[str, object]
    ) -> tuple[Client, ResponseBuilder]:
        client = self._client(context)

        def body() -> dict[str, object]:
            return {**options, **body_of(parse(method.request, data))}

        given = await asyncio.to_thread(body) if len(data) > LARGE_BYTES else body()
        metadata = _metadata(context)
        given = dict(with_header_fields(metadata, given))
        given |= _deadline_of(context.time_remaining(), given.get("deadline_ms"))
        return client, await method.begin(given, client, metadata.get("traceparent", ""))

    def _client(self, context: "Context") -> Client:
        return self._serving.keys.client(_metadata(context).get("authorization", ""))


def _unary(handle: "Callable[[bytes, Context], Awaitable[bytes]]") -> "Handler":
    return grpc.unary_unary_rpc_method_handler(_coroutine(handle))


def _stream(handle: "Callable[[bytes, Context], Awaitable[None]]") -> "Handler":
    return grpc.unary_stream_rpc_method_handler(_coroutine(handle))


def _coroutine(handle: "Callable[[bytes, Context], Awaitable[T]]") -> "Behavior[T]":
    """Wrap in an ``async def``: gRPC inspects the function to see whether it is a coroutine."""

    async def call(body: bytes, context: "Context") -> T:
        return await handle(body, context)

    return call


def _deadline_of(remaining_s: float | None, asked_ms: object) -> dict[str, object]:
    """``deadline_ms`` from the deadline of the call and the request's own; the earlier one counts.

    Raises: DeadlineExceeded
    """
    if remaining_s is None:
        return {}
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline of the call has passed")
    asked = asked_ms if isinstance(asked_ms, float) else math.inf
    soonest = min(remaining_s * 1e3, asked)
    return {"deadline_ms": soonest} if soonest <= MAX_SLO_MS else {}


def _metadata(context: "Context") -> dict[str, str]:
    given = context.invocation_metadata() or ()
    return {key: value for key, value in given if isinstance(value, str)}


@asynccontextmanager
async def _answering(context: "Context") -> AsyncGenerator[None, None]:
    """Give a call its request id, and end it with a status if an exception is raised."""
    given = _metadata(context).get("x-request-id", "")
    name = given if OPAQUE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
    context.set_trailing_metadata((("x-request-id", name),))
    try:
        yield
    except Exception as error:
        await _abort(context, report(error, name), name)
        raise  # never reached: the line above does


async def _abort(context: "Context", error: ApiError, name: str) -> NoReturn:
    code = CODES.get(error.status, grpc.StatusCode.INTERNAL)
    facts = {
        "x-request-id": name,
        "x-error-type": error.kind,
        "x-error-code": error.code,
        "x-error-param": error.param,
    }
    trailers = [(key, _ascii(value)) for key, value in facts.items() if value]
    if error.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1e3))))
    await context.abort(code, error.message[:MAX_MESSAGE_CHARS], tuple(trailers))


def _ascii(text: str) -> str:
    """Escape a text to printable ASCII, which is all that metadata can carry."""
    return "".join(c if " " <= c <= "~" else f"\\u{ord(c):04x}" for c in text).strip()
