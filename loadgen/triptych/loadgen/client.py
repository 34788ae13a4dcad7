"""A streaming client with little CPU cost of its own: it only times and counts chunks."""

import json
from time import perf_counter
from typing import Any

import httpx

from triptych.loadgen.report.sample import Chunk, Sample
from triptych.loadgen.sse import DONE, EventSplitter
from triptych.loadgen.workload.openai_requests import Endpoint

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def open_client(
    base_url: str, connections: int, timeout_s: float = 600.0, api_key: str | None = None
) -> httpx.AsyncClient:
    """A client for one server; ``base_url`` with or without ``/v1``."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
    )


async def send(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    body: dict[str, object],
    due_s: float | None = None,
) -> Sample:
    """Send one request and read its stream to the end.

    Errors of the request are part of the result and do not end the run.
    ``due_s``: when the request was due in an open loop; waiting for a connection counts.
    """
    answer = Answer(perf_counter() if due_s is None else due_s)
    try:
        async with client.stream("POST", PATHS[endpoint], json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return answer.failed(f"HTTP {response.status_code}: {response.text[:200]}")
            splitter = EventSplitter()
            async for piece in response.aiter_bytes():
                now = perf_counter()
                for data in splitter.feed(piece):
                    answer.take(data, now)
    except (httpx.HTTPError, ValueError) as error:
        return answer.failed(f"{type(error).__name__}: {error}")
    return answer.sample()


class Answer:
    """Collects one stream."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._chunks = list[Chunk]()
        self._text = list[str]()
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._error: str | None = None
        self._done = False

    def take(self, data: bytes, now_s: float) -> None:
        """Process one event.

        Raises: ValueError if it is not JSON
        """
        if data == DONE:
            self._done = True
            return
        event: dict[str, Any] = json.loads(data)
        if event.get("error"):
            self._error = f"error event: {str(event['error'])[:200]}"
        usage = event.get("usage")
        if usage:
            self._prompt_tokens = usage["prompt_tokens"]
            self._output_tokens = usage["completion_tokens"]
        if event.get("choices"):
            self._take_choice(event["choices"][0], usage, now_s)

    def sample(self) -> Sample:
        """The result, after the end of the stream."""
        if self._error:
            return self.failed(self._error)
        if not self._chunks:
            return self.failed("the stream had no token")
        if not self._done:
            return self.failed("the stream broke off before [DONE]")
        return self._result(None)

    def failed(self, reason: str) -> Sample:
        """The result of a failed request, with the chunks received so far."""
        return self._result(reason)

    def _result(self, error: str | None) -> Sample:
        return Sample(
            started_s=self._started_s,
            ended_s=perf_counter(),
            chunks=tuple(self._chunks),
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens or len(self._chunks),
            error=error,
            text="".join(self._text),
        )

    def _take_choice(
        self, choice: dict[str, Any], usage: dict[str, Any] | None, now_s: float
    ) -> None:
        """Count a chunk if it has tokens, unlike a chat preamble or a bare finish reason."""
        delta: dict[str, Any] = choice.get("delta") or {}
        text: str = choice.get("text") or delta.get("content") or ""
        is_preamble = "role" in delta and not text
        if text or not (is_preamble or choice.get("finish_reason")):
            self._text.append(text)
            self._chunks.append(Chunk(now_s, usage["completion_tokens"] if usage else None))
