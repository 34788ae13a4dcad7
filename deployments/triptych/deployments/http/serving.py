"""``OpenAIServing``: keys, limits, validation and metrics that HTTP and gRPC share."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from triptych.core.config import IngressConfig
from triptych.core.errors import Overloaded, TriptychError
from triptych.core.messages import Tokens
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.deployments.http.interfaces import Engine, Health, ModelCard
from triptych.deployments.http.keys import Client, KeyRing, OwnUsage, UsageTable
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.http.openai.body_limits import (
    check_counts,
    check_json_size,
    embedded_json,
)
from triptych.deployments.http.openai.guided_decoding import end_warning
from triptych.deployments.http.openai.protocol import (
    B,
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_known,
    check_supported,
    validate,
    warnings_of,
)
from triptych.deployments.http.openai.request_builder import Job, RequestBuilder
from triptych.deployments.http.openai.responses import (
    ChatResponseBuilder,
    Choice,
    CompletionResponseBuilder,
    ResponseBuilder,
)
from triptych.deployments.http.snapshots import Snapshot
from triptych.deployments.http.stream import follow
from triptych.deployments.http.tokenizer import TextCodec, Tokenizer
from triptych.deployments.monitoring.tracing import valid_parent

PROBE_TIMEOUT_S = 3.0
"""Seconds that ``/health`` and ``/metrics`` wait for other parts."""
PROBE_AGE_S = 1.0
"""Age up to which the result of a probe is reused; each costs a call to the router."""


class OpenAIServing:
    """Authenticates and validates requests, runs them on the engine and counts them.

    HTTP and gRPC share one instance, so the limits of a key hold over both.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        model: ModelCard,
        config: IngressConfig,
        metrics: IngressMetrics | None = None,
        probe_age_s: float = PROBE_AGE_S,
        usage: UsageTable | None = None,
    ) -> None:
        """``usage``: where the use of keys is counted; default: here."""
        self.engine = engine
        self.model = model
        self.config = config
        self.codec = TextCodec(tokenizer, model.max_model_len)
        self.request_builder = RequestBuilder(
            engine=engine, codec=self.codec, model=model, config=config
        )
        self.metrics = metrics or IngressMetrics(model.methods)
        self.probe_age_s = probe_age_s
        self._health = Snapshot(self._probe, probe_age_s)
        path = Path(config.api_keys) if config.api_keys else None
        self.keys = KeyRing(path, refused=self.metrics.refuse, usage=usage or OwnUsage())

    async def chat(
        self, given: Mapping[str, object], client: Client, traceparent: str = ""
    ) -> ResponseBuilder:
        """Validate the body of a chat completion, and build its requests.

        Raises: RequestError naming the field that is wrong or cannot be served
        """
        body, warning = await self._known(ChatBody, given)
        job = await self.request_builder.chat(body, client)
        warning = _with_warnings(warning, body, job)
        return ChatResponseBuilder(_traced(job, traceparent), self.codec, warning)

    async def completion(
        self, given: Mapping[str, object], client: Client, traceparent: str = ""
    ) -> ResponseBuilder:
        """Validate the body of a completion, and build its requests.

        Raises: RequestError naming the field that is wrong or cannot be served
        """
        body, warning = await self._known(CompletionBody, given)
        job = await self.request_builder.completion(body, client)
        warning = _with_warnings(warning, body, job)
        return CompletionResponseBuilder(_traced(job, traceparent), self.codec, warning)

    async def _known(self, kind: type[B], given: Mapping[str, object]) -> tuple[B, str]:
        """A valid body, and a warning about its unknown fields, which may be errors."""
        if self.config.strict_params:
            check_known(kind, given)
        check_supported(kind, given)
        return await self.checked(kind, given), warnings_of(kind, given)

    async def checked(self, kind: type[B], given: Mapping[str, object]) -> B:
        """Validate a body, if it is within ``ingress.limits``.

        Raises: RequestError naming the field that is wrong, or the limit
        """
        check_counts(given, self.config.limits)
        await check_json_size(embedded_json(given), self.config.limits)
        return validate(kind, given)

    def run(
        self, client: Client, answer: ResponseBuilder
    ) -> AsyncGenerator[tuple[Choice, Tokens], None]:
        """Run the requests on the engine. Closing the generator cancels what still runs.

        Raises: TooManyRequests; what the engine raises
        """
        items = follow(self.engine, answer.job, answer, self.metrics)
        return client.run(items, len(answer.job.requests))

    async def health(self) -> Health:
        """Whether a request would be served, as of the last ``PROBE_AGE_S``."""
        return await self._health.get()

    async def _probe(self) -> Health:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self.engine.health()
        except TimeoutError:
            return Health(ok=False, reason="the engine does not answer")
        except TriptychError as error:
            return Health(ok=False, reason=str(error))

    async def check_ready(self) -> None:
        """Raises: Overloaded if a request sent now would not be served"""
        state = await self.health()
        if not state.ok:
            raise Overloaded(state.reason)

    def cards(self) -> list[dict[str, object]]:
        """OpenAI's model list: an entry for each name of the model."""
        return [self.card(name) for name in self.model.names]

    def card(self, name: str) -> dict[str, object]:
        """The model under one of its names, in the form of OpenAI's model list."""
        model = self.model
        card: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "triptych",
            "root": model.root or model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }
        if model.methods:
            card["compression_methods"] = list(model.offered)
        plugins = {offer.plugin: _shown(offer) for offer in model.plugins}
        return card | {"plugins": plugins} if plugins else card


def with_header_fields(
    headers: Mapping[str, str], body: Mapping[str, object]
) -> Mapping[str, object]:
    """The body with the fields that clients may send as headers, unless it has them itself.

    ``X-Session-Id`` is ``session_id``, and ``X-Compression-Method`` is ``compression.method``.
    """
    session, method = headers.get("x-session-id"), headers.get("x-compression-method")
    if session is not None:
        body = {"session_id": session, **body}
    options = body.get("compression", {})
    if method is not None and isinstance(options, Mapping):
        given = cast("Mapping[str, object]", options)
        body = {**body, "compression": {"method": method, **given}}
    return body


def _shown(offer: OverridablePlugin) -> dict[str, object]:
    """A plug-in's options that requests may set, with their bounds."""
    options = {
        name: {"default": bound.default, "minimum": bound.least, "maximum": bound.most}
        for name, bound in offer.bounds.items()
    }
    return {"enabled": offer.on, "options": options}


def _traced(job: Job, traceparent: str) -> Job:
    """Set the client's trace context in the requests, if it is valid."""
    parent = valid_parent(traceparent)
    parts = (replace(one, traceparent=parent) for one in job.requests) if parent else job.requests
    return replace(job, requests=tuple(parts))


def _with_warnings(warning: str, body: GenerationBody, job: Job) -> str:
    """The warning, and one about fields that have no effect on these requests."""
    more = end_warning(body, job.requests[0].sampling.grammar)
    return "; ".join(text for text in (warning, more) if text)
