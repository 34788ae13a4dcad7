"""ASGI middleware: request ids, a handler for uncaught errors, bounds on requests."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.errors import (
    BodyTooLarge,
    HeadersTooLarge,
    Overloaded,
    RequestError,
    TriptychError,
)
from triptych.deployments.http.errors import describe, report

logger = logging.getLogger(__name__)

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 << 10
MAX_URL_BYTES = 8 << 10


OPAQUE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def request_id(scope: Scope) -> str:
    """The id of this HTTP request in ``X-Request-Id``, in the log and in errors.

    It is never used inside: the requests that the engine gets have ids of their own.
    """
    return scope["state"]["request_id"]


class RequestIdMiddleware:
    """Gives each request an id, and answers uncaught errors with a 500 without details.

    A valid ``X-Request-Id`` of the client, or of a proxy in front, is kept.
    """

    def __init__(self, app: ASGIApp, send_request_id: bool = True) -> None:
        self._app = app
        self._send_request_id = send_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if OPAQUE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = name
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._send_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self._app(scope, _until_disconnected(receive, name), send_named)
        except Exception as error:
            response = report(error, name).response()
            if started:
                raise
            await response(scope, receive, send_named)


def _until_disconnected(receive: Receive, name: str) -> Receive:
    """``receive`` that turns a failed transport into a disconnect.

    When a client leaves while Ray Serve's proxy forwards its request, Serve raises an error of Ray
    from here, such as TaskCancelledError.
    """

    async def receive_message() -> Message:
        try:
            return await receive()
        except Exception as error:  # noqa: BLE001 - any error of the transport ends the request
            logger.debug("request %s: no more of it arrives: %r", name, error)
            return {"type": "http.disconnect"}

    return receive_message


class LimitsMiddleware:
    """Rejects requests that are too many, or whose URL, headers or body are too large.

    Ray Serve's proxy bounds none of these. The body is counted as it arrives, so the limit also
    holds with a false or missing Content-Length.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_open_requests: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_open_requests = max_open_requests
        self._open_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] != "POST":
            return await self._within_limits(scope, receive, send)
        self._open_requests += 1
        try:
            await self._within_limits(scope, receive, send)
        finally:
            self._open_requests -= 1

    async def _within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            # The rest of the request stays unread, so this connection cannot be used again.
            response = describe(refusal, request_id(scope)).response()
            response.headers["connection"] = "close"
            return await response(scope, receive, send)
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._body_too_large()
            return message

        async def send_closing(message: Message) -> None:
            if seen > self._max_body_bytes and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        return await self._app(scope, receive_counted, send_closing)

    def _refusal(self, scope: Scope) -> TriptychError | None:
        if self._open_requests > self._max_open_requests:
            most = self._max_open_requests
            return Overloaded(f"{most} requests are open already (ingress.max_open_requests)")
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        header_bytes = sum(len(name) + len(value) for name, value in headers)
        url_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if url_bytes > MAX_URL_BYTES:
            return HeadersTooLarge(f"the URL has {url_bytes} bytes: the limit is {MAX_URL_BYTES}")
        if len(headers) > MAX_HEADERS or header_bytes > MAX_HEADER_BYTES:
            return HeadersTooLarge(
                f"{len(headers)} headers of {header_bytes} bytes: "
                f"the limits are {MAX_HEADERS} and {MAX_HEADER_BYTES}"
            )
        return self._length_refusal(Headers(scope=scope).get("content-length"))

    def _length_refusal(self, declared: str | None) -> RequestError | None:
        if declared is None:
            return None
        if not (declared.isascii() and declared.isdigit()):
            return RequestError("Content-Length is not a number")
        # Leading zeros do not make a number large, and a long one need not be converted.
        digits = declared.lstrip("0")
        too_long = len(digits) > 18 or int(digits or "0") > self._max_body_bytes
        return self._body_too_large() if too_long else None

    def _body_too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self._max_body_bytes} bytes (ingress.max_body_bytes): send "
            "less, or raise the setting"
        )
