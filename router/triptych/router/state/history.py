"""Traces of the latest requests: times of their states, and decisions with their reasons."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from triptych.core.messages import CompressionReport, Request

KEPT = 4096
"""Traces that are kept: of the newest requests, ended or not."""
MAX_STEPS = 32
"""States that are kept of one request; repeatedly orphaned requests have more."""

MAX_DECISIONS = 8
"""Decisions that are kept of one request: the newest ones."""

End = Literal["", "finished", "failed", "cancelled"]
"""How a request ended for its client; empty: it has not ended."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A worker that was considered or chosen."""

    worker: str
    free_bytes: int
    """Of its arena, before the choice."""
    load: int
    """Tokens before it, or, of a decode worker, its free slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision about one request, with its inputs."""

    step: Literal[
        "refuse", "method", "wait", "encode", "prefill", "compress", "decode", "resume", "lower"
    ]
    at: float
    reason: str
    chosen: str = ""
    """Address of the worker; of a method, its name; of a wait, the id of the request that computes
    the prompt."""
    raw_bytes: int = 0
    """Pages of the prompt while it is read and compressed."""
    grown_bytes: int = 0
    """Pages at the end of the longest answer."""
    booked_bytes: int = 0
    """Bytes that it had booked after the decision, in all arenas."""
    waiting: int = 0
    """Waiting requests when it left the queue, this one included."""
    older: int = 0
    """Waiting requests that had arrived before it: those that it overtook."""
    placement: str = ""
    """Why the placement policy chose that prefill worker."""
    alternatives: tuple[Alternative, ...] = ()
    """The best workers, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Trace of one attempt at a request: sizes and times, without text or tokens."""

    request: str
    number: int
    """Sequence number since the router started: an anonymous name."""
    attempt: int
    """Number of earlier attempts that were lost."""
    prompt_tokens: int
    max_tokens: int
    steps: tuple[tuple[str, float], ...]
    """States, and when it entered them."""
    tenant: str = ""
    """The tenant of its client; empty: none."""
    traceparent: str = ""
    """The trace that its client wants it to be part of."""
    end: End = ""
    code: str = ""
    """Of the error, if it failed."""
    ended: float = 0.0
    tokens: int = 0
    """Output tokens, once it is finished."""
    report: CompressionReport | None = None
    """Compression report, once it was compressed."""
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache, once it was prefilled."""
    decisions: tuple[Decision, ...] = ()
    """Decisions of the router about it."""


@dataclass(slots=True)
class _Record:
    """A ``RequestTrace`` under construction; copying that at each step would cost more."""

    request: str
    number: int
    attempt: int
    prompt_tokens: int
    max_tokens: int
    steps: list[tuple[str, float]]
    tenant: str = ""
    traceparent: str = ""
    end: End = ""
    code: str = ""
    ended: float = 0.0
    tokens: int = 0
    report: CompressionReport | None = None
    cached_tokens: int | None = None
    decisions: deque[Callable[[], Decision]] = field(
        default_factory=lambda: deque(maxlen=MAX_DECISIONS)
    )

    def trace(self) -> RequestTrace:
        return RequestTrace(
            request=self.request,
            number=self.number,
            attempt=self.attempt,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            steps=tuple(self.steps),
            tenant=self.tenant,
            traceparent=self.traceparent,
            end=self.end,
            code=self.code,
            ended=self.ended,
            tokens=self.tokens,
            report=self.report,
            cached_tokens=self.cached_tokens,
            decisions=tuple(decision() for decision in self.decisions),
        )


@dataclass
class History:
    """Traces of the newest ``limit`` requests, in order of arrival."""

    limit: int = KEPT
    _records: dict[str, _Record] = field(default_factory=dict[str, _Record])
    _count: int = 0

    def __iter__(self) -> Iterator[RequestTrace]:
        return (record.trace() for record in self._records.values())

    def latest(self, count: int) -> list[RequestTrace]:
        """The newest ``count``, in order of arrival."""
        skipped = max(0, len(self._records) - count)
        return [record.trace() for record in islice(self._records.values(), skipped, None)]

    def of(self, client_id: str) -> list[RequestTrace]:
        """Traces of a client's request: of all its choices and attempts.

        A choice is ``<id>-<index>``, and another attempt at it ``<id>-<index>~<attempt>``.
        """
        parts = (f"{client_id}-", f"{client_id}~")
        return [
            record.trace()
            for name, record in self._records.items()
            if name == client_id or name.startswith(parts)
        ]

    def number(self, request: str) -> int:
        """The number of a request; 0 if its trace is not kept any more."""
        record = self._records.get(request)
        return record.number if record else 0

    def begin(self, request: Request, state: str, now: float) -> None:
        """Start the trace of a request that arrived."""
        self._count += 1
        self._records.pop(request.id, None)
        self._records[request.id] = _Record(
            request=request.id,
            number=self._count,
            attempt=request.attempt,
            prompt_tokens=request.known_tokens,
            max_tokens=request.sampling.max_tokens,
            steps=[(state, now)],
            tenant=request.tenant,
            traceparent=request.traceparent,
        )
        while len(self._records) > self.limit:
            del self._records[next(iter(self._records))]

    def note(self, request: str, state: str, report: CompressionReport | None, now: float) -> None:
        """Record that a request entered a state."""
        record = self._records.get(request)
        if record is not None and len(record.steps) < MAX_STEPS:
            record.steps.append((state, now))
            record.report = report

    def reported(self, request: str, report: CompressionReport | None) -> None:
        """Record another compression report of a running request."""
        record = self._records.get(request)
        if record is not None:
            record.report = report

    def decided(self, request: str, decision: Callable[[], Decision]) -> None:
        """Record a decision about a request, which is made when somebody reads the trace."""
        record = self._records.get(request)
        if record is not None:
            record.decisions.append(decision)

    def cached(self, request: str, tokens: int) -> None:
        """Record the prompt tokens from the prefix cache."""
        record = self._records.get(request)
        if record is not None:
            record.cached_tokens = tokens

    def end(self, request: str, end: End, now: float, *, code: str = "", tokens: int = 0) -> None:
        """Record how a request ended; only the first call counts."""
        record = self._records.get(request)
        if record is not None and not record.end:
            record.end, record.ended, record.code, record.tokens = end, now, code, tokens
