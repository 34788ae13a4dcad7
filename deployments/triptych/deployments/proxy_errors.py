"""Middleware for Ray Serve's HTTP proxy: errors of OpenAI's shape, freed bodies, relayed events.

A proxy answers with plain text when it has no replica or loses one, and cuts the stream of a
replica that ends. While a request runs, it keeps the last message of its body. Each event of a
stream costs it a Ray object, unless ``proxy_relay`` gets it from the ingress. Ray Serve adds the
middleware where ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names ``middlewares``; ``triptych
serve`` and the container image set that.
"""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.deployments.http.errors import RETRY_AFTER_S, ApiError
from triptych.deployments.http.json_frames import DONE, event
from triptych.deployments.proxy_relay import EventRelayMiddleware

LOST = ApiError(
    status=503,
    message="the server lost the process that had this request: send it again",
    kind="service_unavailable",
    code="worker_lost",
    retry_after_s=RETRY_AFTER_S,
)
REPLACED = (408, 429, 500, 503)
"""Statuses that the proxy gives itself, as plain text."""


def middlewares() -> list[Middleware]:
    """The middleware of Ray Serve's HTTP proxies, the innermost first.

    Ray Serve calls this when a proxy starts.
    """
    kinds = EventRelayMiddleware, ProxyErrorMiddleware, EmptyEndMiddleware
    return [Middleware(kind) for kind in kinds]


class ProxyErrorMiddleware:
    """Gives responses of the proxy OpenAI's error shape, and streams that are cut an error event.

    Responses of the application are passed on as they are: their errors are JSON.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _Response(send)
        await self._app(scope, receive, response.send)
        if response.is_replaced or not response.has_started:
            await LOST.response()(scope, receive, send)
        elif response.is_cut_stream:
            await send({"type": "http.response.body", "body": event(LOST.body) + DONE})


class _Response:
    """Forwards one response, and records how far it came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = self.is_replaced = False
        self._is_stream = self._is_complete = False

    @property
    def is_cut_stream(self) -> bool:
        return self._is_stream and not self._is_complete

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", ())).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            self.is_replaced = message["status"] in REPLACED and kind.startswith("text/plain")
            self.has_started = True
        if self.is_replaced:
            return
        if message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        await self._send(message)


class EmptyEndMiddleware:
    """Gives each body an empty last message, so that the proxy keeps no part of the body.

    A local variable of ``HTTPProxy.proxy_asgi_receive`` (Ray 2.60) holds the last message, up to
    256 KiB, until the client disconnects.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        await self._app(scope, _with_empty_end(receive) if is_http else receive, send)


def _with_empty_end(receive: Receive) -> Receive:
    at_end = False

    async def receive_next() -> Message:
        nonlocal at_end
        if at_end:
            at_end = False
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            at_end = bool(message.get("body"))
            message["more_body"] = at_end
        return message

    return receive_next
