"""What every door of the server shares, so that none of them is laxer than another."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path

from triptych.core.config import IngressConfig
from triptych.core.messages import Tokens
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.deployments.http.interfaces import Engine, Health, ModelCard
from triptych.deployments.http.keys import Client, KeyRing
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.http.openai.protocol import (
    B,
    ChatBody,
    CompletionBody,
    check_known,
    validate,
)
from triptych.deployments.http.openai.request_builder import Job, Planner
from triptych.deployments.http.openai.responses import Answer, ChatAnswer, Choice, CompletionAnswer
from triptych.deployments.http.stream import follow
from triptych.deployments.http.tokenizer import TextCodec, Tokenizer
from triptych.deployments.monitoring.tracing import valid_parent

PROBE_TIMEOUT_S = 3.0
"""Seconds that ``/health`` and ``/metrics`` wait for other parts."""


class OpenAIServing:
    """Keys and their limits, the checks of a request, the way to the engine, and what is counted.

    HTTP and gRPC have one of it together: a key's limits are its limits over both.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        model: ModelCard,
        config: IngressConfig,
        metrics: IngressMetrics | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.config = config
        self.codec = TextCodec(tokenizer, model.context_tokens)
        self.planner = Planner(engine=engine, codec=self.codec, model=model, config=config)
        self.metrics = metrics or IngressMetrics()
        path = Path(config.api_keys) if config.api_keys else None
        self.keys = KeyRing(path, refused=self.metrics.refuse)

    async def chat(
        self, given: Mapping[str, object], client: Client, traceparent: str = ""
    ) -> Answer:
        """Check the body of a chat completion, and begin its answer.

        Raises: RequestError naming the field that is wrong or cannot be served
        """
        body = self._checked(ChatBody, given)
        job = await self.planner.chat(body, client.tenant, client.weight)
        return ChatAnswer(_traced(job, traceparent), self.codec)

    async def completion(
        self, given: Mapping[str, object], client: Client, traceparent: str = ""
    ) -> Answer:
        """The same for a plain completion."""
        body = self._checked(CompletionBody, given)
        job = await self.planner.completion(body, client.tenant, client.weight)
        return CompletionAnswer(_traced(job, traceparent), self.codec)

    def _checked(self, kind: type[B], given: Mapping[str, object]) -> B:
        if self.config.strict_params:
            check_known(kind, given)
        return validate(kind, given)

    def run(self, client: Client, answer: Answer) -> AsyncGenerator[tuple[Choice, Tokens], None]:
        """Have the engine answer. Closing the generator cancels what still runs.

        Raises: TooManyRequests; what the engine raises
        """
        return client.run(follow(self.engine, answer.job, answer, self.metrics))

    async def health(self) -> Health:
        """Whether a request sent now would be served."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self.engine.health()
        except TimeoutError:
            return Health(ok=False, reason="the engine does not answer")

    def card(self) -> dict[str, object]:
        """The model, as OpenAI lists it."""
        model = self.model
        told: dict[str, object] = {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "triptych",
            "root": model.root or model.name,
            "parent": None,
            "max_model_len": model.context_tokens,
            "permission": [],
        }
        plugins = {offer.plugin: _shown(offer) for offer in model.plugins}
        return told | {"plugins": plugins} if plugins else told


def _shown(offer: OverridablePlugin) -> dict[str, object]:
    """What clients may change of a plug-in: whether they have it, and options from and to."""
    options = {
        name: {"default": bound.default, "minimum": bound.least, "maximum": bound.most}
        for name, bound in offer.bounds.items()
    }
    return {"enabled": offer.on, "options": options}


def _traced(job: Job, traceparent: str) -> Job:
    """Make the requests part of the trace that the client says they belong to."""
    parent = valid_parent(traceparent)
    parts = (replace(one, traceparent=parent) for one in job.requests) if parent else job.requests
    return replace(job, requests=tuple(parts))
