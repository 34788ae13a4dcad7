"""The FastAPI app: OpenAI's routes, and routes for operators."""

import asyncio
import logging
from collections.abc import Mapping
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from triptych.core.errors import (
    Overloaded,
    RequestError,
    RequestNotFound,
    TriptychError,
    Unsupported,
)
from triptych.deployments.http.dashboard import Dashboard, DashboardSource, no_dashboard
from triptych.deployments.http.errors import RETRY_AFTER_S, ApiError, RequestFailed, report
from triptych.deployments.http.interfaces import (
    DecisionSource,
    NoDecisions,
    ProfileSource,
    no_profile,
)
from triptych.deployments.http.json_frames import JsonResponse, read_json
from triptych.deployments.http.keys import Client
from triptych.deployments.http.limits import LimitsMiddleware, RequestIdMiddleware, request_id
from triptych.deployments.http.metrics import Gauges
from triptych.deployments.http.openai.chat_images import image_sources
from triptych.deployments.http.openai.protocol import (
    DetokenizeBody,
    ProfileBody,
    TokenizeBody,
    validate,
)
from triptych.deployments.http.openai.responses import ResponseBuilder
from triptych.deployments.http.openapi import document
from triptych.deployments.http.serving import PROBE_TIMEOUT_S, OpenAIServing, with_header_fields
from triptych.deployments.http.snapshots import Snapshot
from triptych.deployments.http.stream import (
    KEEP_ALIVE_S,
    EventStream,
    collect,
    frames,
    unless_disconnected,
)
from triptych.deployments.http.vllm_metrics import aliases
from triptych.deployments.transport.event_relay import OFFER, EventRelay

logger = logging.getLogger(__name__)

DECISION_TIMEOUT_S = 0.5
"""Seconds that a finished response waits for its decision header."""


async def no_gauges() -> Mapping[str, float]:
    """The default of ``create_app``: only the ingress's own metrics."""
    return {}


def create_app(
    serving: OpenAIServing,
    *,
    gauges: Gauges = no_gauges,
    dashboard: DashboardSource = no_dashboard,
    decisions: DecisionSource | None = None,
    profile: ProfileSource = no_profile,
    keep_alive_s: float = KEEP_ALIVE_S,
    send_request_id: bool = True,
    relay: EventRelay | None = None,
) -> FastAPI:
    """Build the app in front of ``serving``.

    ``gauges`` adds metrics of other processes to ``/metrics``, ``dashboard`` their state to the
    dashboard. ``decisions`` is behind ``/router/explain``, ``profile`` behind ``/profile``. Turn
    ``send_request_id`` off where a proxy in front sends ``X-Request-Id`` itself, as Ray Serve's
    does. With a ``relay`` that proxy may read the events of streams there.
    """
    routes = RouteHandlers(
        serving,
        gauges=gauges,
        dashboard=Dashboard(dashboard, serving.metrics, serving.model),
        decisions=decisions or NoDecisions(),
        profile=profile,
        keep_alive_s=keep_alive_s,
        relay=relay,
    )
    app = FastAPI(title="Triptych", openapi_url=None, redirect_slashes=False)
    routes.mount(app)
    for kind in (TriptychError, RequestFailed, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(
        LimitsMiddleware,
        max_body_bytes=serving.config.max_body_bytes,
        max_open_requests=serving.config.max_open_requests,
    )
    app.add_middleware(RequestIdMiddleware, send_request_id=send_request_id)
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """The response to an exception, as OpenAI's JSON error."""
    return report(error, request_id(request.scope)).response()


async def _whole(answer: ResponseBuilder, more: Mapping[str, str]) -> Response:
    def response() -> Response:
        return JsonResponse(answer.whole(), headers={**answer.headers(), **more})

    # In a thread, so that other streams go on meanwhile.
    return await asyncio.to_thread(response) if answer.is_long else response()


class RouteHandlers:
    """The route handlers of one app."""

    def __init__(
        self,
        serving: OpenAIServing,
        *,
        gauges: Gauges,
        dashboard: Dashboard,
        decisions: DecisionSource,
        profile: ProfileSource,
        keep_alive_s: float,
        relay: EventRelay | None,
    ) -> None:
        self._serving = serving
        self._codec = serving.codec
        self._request_builder = serving.request_builder
        self._config = serving.config
        self._gauges = Snapshot(gauges, serving.probe_age_s)
        self._dashboard = dashboard
        self._decisions = decisions
        self._profile = profile
        self._keep_alive_s = keep_alive_s
        self._relay = relay

    def mount(self, app: FastAPI) -> None:
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}/ready", self.model_ready, methods=["GET"])
        app.add_api_route("/v1/models/{name:path}", self.one_model, methods=["GET"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.health, methods=["GET"])
        app.add_api_route("/live", self.live, methods=["GET"])
        app.add_api_route("/ping", self.health, methods=["GET", "POST"])
        app.add_api_route("/load", self.load, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/version", self.version, methods=["GET"])
        app.add_api_route("/openapi.json", self.openapi, methods=["GET"])
        app.add_api_route("/router/explain/{name}", self.explain, methods=["GET"])
        app.add_api_route("/profile", self.profile, methods=["POST"])
        app.add_api_route("/dashboard", self.dashboard, methods=["GET"])
        app.add_api_route("/dashboard/state", self.dashboard_state, methods=["GET"])

    async def chat(self, request: Request) -> Response:
        client, parent = self._client(request), request.headers.get("traceparent", "")
        answer = await self._serving.chat(await self._given(request), client, parent)
        return await self._answer(request, client, answer)

    async def completions(self, request: Request) -> Response:
        client, parent = self._client(request), request.headers.get("traceparent", "")
        answer = await self._serving.completion(await self._given(request), client, parent)
        return await self._answer(request, client, answer)

    async def _given(self, request: Request) -> Mapping[str, object]:
        """The fields of a completion. Callers do not name them, so that they are freed at once."""
        return with_header_fields(request.headers, await self._read(request))

    async def _read(self, request: Request) -> dict[str, object]:
        return await read_json(request, self._config.limits)

    def _client(self, request: Request) -> Client:
        return self._serving.keys.client(request.headers.get("authorization", ""))

    async def _answer(self, request: Request, client: Client, answer: ResponseBuilder) -> Response:
        items, job = self._serving.run(client, answer), answer.job
        timeout_s = self._config.request_timeout_s
        if job.stream:
            events = frames(items, job, answer)
            return EventStream(
                events,
                timeout_s=timeout_s,
                write_timeout_s=self._config.write_timeout_s,
                keep_alive_s=self._keep_alive_s,
                headers=answer.first_headers(),
                relay=self._relay if OFFER in request.headers else None,
            )
        await unless_disconnected(request.receive, collect(items, timeout_s))
        decision = await self._decision(job.id) if self._config.decision_header else None
        return await _whole(answer, {} if decision is None else {"x-triptych-decision": decision})

    async def _decision(self, name: str) -> str:
        """The router's decisions in one line; empty if they take longer than the timeout."""
        try:
            async with asyncio.timeout(DECISION_TIMEOUT_S):
                return await self._decisions.decision(name)
        except TimeoutError:
            return ""

    async def models(self, request: Request) -> Response:
        """The model, once it is served: clients take this route for a readiness probe."""
        self._client(request)
        await self._serving.check_ready()
        return JsonResponse({"object": "list", "data": self._serving.cards()})

    async def one_model(self, request: Request, name: str) -> Response:
        self._client(request)
        self._request_builder.check_model(name)
        await self._serving.check_ready()
        return JsonResponse(self._serving.card(name))

    async def model_ready(self, request: Request, name: str) -> Response:
        """Whether a model has a worker for each stage, on the route that Dynamo has for it."""
        self._client(request)
        self._request_builder.check_model(name)
        return await self.health()

    async def tokenize(self, request: Request) -> Response:
        self._client(request)
        body = await self._serving.checked(TokenizeBody, await self._read(request))
        self._request_builder.check_model(body.model)
        tokens = await self._tokens(body)
        answer: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": self._serving.model.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = self._codec.pieces(tokens)
        return JsonResponse(answer)

    async def _tokens(self, body: TokenizeBody) -> list[int]:
        most = self._config.limits.max_json_values
        match body:
            case TokenizeBody(prompt=str(prompt), messages=None):
                self._codec.check_length(len(prompt), "prompt")
                return await self._codec.encode(
                    prompt, add_special_tokens=body.add_special_tokens, max_tokens=most
                )
            case TokenizeBody(prompt=None, messages=list(messages)):
                if sources := image_sources(messages):
                    text = "images: /tokenize reads text; usage.prompt_tokens of a chat counts them"
                    raise Unsupported(text, sources[0].param)
                return await self._request_builder.encode_messages(
                    messages, body, body.tools, max_tokens=most
                )
            case _:
                raise RequestError("give either prompt or messages", "prompt")

    async def detokenize(self, request: Request) -> Response:
        self._client(request)
        body = await self._serving.checked(DetokenizeBody, await self._read(request))
        self._request_builder.check_model(body.model)
        self._request_builder.check_token_ids(body.tokens, "tokens")
        return JsonResponse({"prompt": await self._codec.decode(body.tokens)})

    async def live(self) -> Response:
        """``/live``: 200 as long as this process answers; other processes do not matter."""
        return Response()

    async def health(self) -> Response:
        """Whether requests can be served, that is, each stage has a worker."""
        state = await self._serving.health()
        if state.ok:
            return Response()
        kind, code = "service_unavailable", "overloaded"
        return ApiError(
            status=503, message=state.reason, kind=kind, code=code, retry_after_s=RETRY_AFTER_S
        ).response()

    async def load(self) -> Response:
        """Responses in progress, in vLLM's format."""
        return JsonResponse({"server_load": self._serving.metrics.load})

    async def metrics(self, request: Request) -> Response:
        if self._config.private_metrics:
            self._admin(request)
        gauges: Mapping[str, float] = {}
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                gauges = await self._gauges.get()
        except (TimeoutError, TriptychError) as error:
            logger.warning("metrics of other parts are missing: %s", error)
        text = self._serving.metrics.exposition(gauges)
        if self._config.vllm_metrics:
            lines = aliases(text.decode(), self._serving.model.name)
            text += "".join(f"{line}\n" for line in lines).encode()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def explain(self, request: Request, name: str) -> Response:
        """The router's decisions about one request: bytes, queue, alternatives."""
        self._admin(request)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                found = await self._decisions.explain(name)
        except TimeoutError as error:
            raise Overloaded("the router does not answer") from error
        if not found:
            raise RequestNotFound(
                f"no request {name[:128]!r} is in the history: give the id of a response, such as "
                "chatcmpl-..., while it is one of the latest"
            )
        data: dict[str, object] = {"id": name, "object": "router.explanation", "requests": [*found]}
        return JsonResponse(data, headers={"cache-control": "no-store"})

    async def profile(self, request: Request) -> Response:
        """Profile the next steps of the workers."""
        self._admin(request)
        body = validate(ProfileBody, await self._read(request))
        reports = await self._profile(body.steps, body.seconds, trace=body.trace)
        return JsonResponse({"object": "profile", "workers": [*reports]})

    def _admin(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        self._serving.keys.admin(given, everybody=self._config.open_admin)

    async def version(self) -> Response:
        return JsonResponse({"version": version("triptych")})

    async def openapi(self) -> Response:
        return JsonResponse(document())

    async def dashboard(self) -> Response:
        return self._dashboard.page()

    async def dashboard_state(self, request: Request) -> Response:
        # The page polls every second, which must not use up the rate limit of its key.
        given = request.headers.get("authorization", "")
        client = self._serving.keys.client(given, counts=False)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self._dashboard.state(client.seen_tenant)
        except TimeoutError as error:
            raise Overloaded("the router does not answer") from error
