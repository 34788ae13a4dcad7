"""OpenTelemetry traces: a span for each request, with a child span for each state it was in.

The router's history has the time of each state of its latest requests, so traces need no
measurements of their own, and a request has one trace over all its workers. Traces are exported
with OTLP over HTTP, as JSON, and contain neither prompts nor answers.

Source: OTLP 1.x (JSON encoding over HTTP); W3C Trace Context, level 1 (traceparent)
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from triptych.router import RequestTrace

logger = logging.getLogger(__name__)

POST_TIMEOUT_S = 2.0
PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SERVER, _INTERNAL, _ERROR = 2, 1, 2

Json = dict[str, object]


def valid_parent(header: str) -> str:
    """The client's ``traceparent`` if it is valid, else "": then the request gets a new trace."""
    return header if PARENT.fullmatch(header) else ""


def is_wanted(trace: RequestTrace) -> bool:
    """Whether the client asks for sampling, or sent no ``traceparent``."""
    found = PARENT.fullmatch(trace.traceparent)
    return found is None or bool(int(found[3], 16) & 1)


def spans_of(trace: RequestTrace, epoch_s: float) -> list[Json]:
    """The spans of a request that has ended, that of the request first.

    Without a ``traceparent`` of the client, the trace id is the one in the response's ``id``.
    ``epoch_s``: Unix time at which the router's clock was 0.
    """
    parent = PARENT.fullmatch(trace.traceparent)
    named = re.search(r"[0-9a-f]{32}", trace.request)
    outer = parent[2] if parent else ""
    trace_id = parent[1] if parent else named[0] if named else _digest(trace.request, 32)
    began, report = trace.steps[0][1], trace.report
    own: dict[str, str | int] = {
        "triptych.request": trace.request,
        "triptych.attempt": trace.attempt,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.tokens,
        "triptych.end": trace.end,
    }
    if trace.code:
        own["error.type"] = trace.code
    if report is not None:
        own["triptych.compression.policy"] = report.policy
        own["triptych.raw_bytes"] = report.raw_bytes
        own["triptych.stored_bytes"] = report.stored_bytes

    def span(
        name: str, part: str, start: float, end: float, values: Mapping[str, str | int]
    ) -> Json:
        return {
            "traceId": trace_id,
            "spanId": _digest(f"{trace.request}/{part}", 16),
            "parentSpanId": _digest(f"{trace.request}/", 16) if part else outer,
            "name": name,
            "kind": _INTERNAL if part else _SERVER,
            "startTimeUnixNano": str(int((epoch_s + start) * 1e9)),
            "endTimeUnixNano": str(int((epoch_s + max(start, end)) * 1e9)),
            "attributes": _attributes(values),
            "status": {"code": _ERROR} if trace.end == "failed" and not part else {},
        }

    ends = [*(since for _, since in trace.steps[1:]), trace.ended]
    spans = [span("request", "", began, trace.ended, own)]
    for place, ((state, since), until) in enumerate(zip(trace.steps, ends, strict=True)):
        spans.append(span(state, str(place), since, until, _state_attributes(state, trace)))
    return spans


def _state_attributes(state: str, trace: RequestTrace) -> dict[str, str | int]:
    """Attributes of a state: the tokens or bytes that it worked on."""
    if state == "prefilling":
        return {"triptych.tokens": trace.prompt_tokens}
    if trace.report is None:
        return {}
    match state:
        case "prefilled" | "compressing":
            return {"triptych.bytes": trace.report.raw_bytes}
        case "encoding" | "compressed" | "decoding":
            return {"triptych.bytes": trace.report.stored_bytes}
        case _:
            return {}


def _attributes(values: Mapping[str, str | int]) -> list[Json]:
    return [
        {
            "key": key,
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in values.items()
    ]


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def payload(spans: Sequence[Json]) -> Json:
    """The body of an OTLP export request with these spans."""
    service = {"attributes": _attributes({"service.name": "triptych"})}
    scoped = {"scope": {"name": "triptych.router"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": service, "scopeSpans": [scoped]}]}


@dataclass
class Tracer:
    """Exports the traces of requests that ended since the last call.

    Traces that cannot be delivered are dropped, so that no request waits for them.
    """

    url: str
    _posted: frozenset[int] = frozenset()
    """Numbers of the requests in the history that were exported."""
    _is_lost: bool = field(default=False, init=False)

    def fresh(self, traces: Iterable[RequestTrace]) -> list[RequestTrace]:
        """Traces that have ended and were not returned by an earlier call."""
        ended = [trace for trace in traces if trace.end]
        before, self._posted = self._posted, frozenset(trace.number for trace in ended)
        return [trace for trace in ended if trace.number not in before and is_wanted(trace)]

    async def post(self, traces: Iterable[RequestTrace], epoch_s: float) -> None:
        """Export what is new among the traces of the history."""
        spans = [span for trace in self.fresh(traces) for span in spans_of(trace, epoch_s)]
        if not spans:
            return
        try:
            async with httpx.AsyncClient(timeout=POST_TIMEOUT_S) as client:
                (await client.post(self.url, json=payload(spans))).raise_for_status()
        except httpx.HTTPError as error:
            if not self._is_lost:  # logged once per outage, not every second
                logger.warning(
                    "router.otlp_traces_endpoint=%s takes no traces: %r", self.url, error
                )
            self._is_lost = True
        else:
            self._is_lost = False
