"""One trace for each request: a span for it, and one for each state that it went through.

The router remembers of its latest requests when each entered which state, so nothing is measured
for traces, and a request that passes through no matter how many workers has one trace. They go out
in OpenTelemetry's protocol over HTTP, in its JSON form, and say nothing of what was said.

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
    """A client's ``traceparent`` as it is, or "" if it is none: then the trace is our own."""
    return header if PARENT.fullmatch(header) else ""


def is_wanted(life: RequestTrace) -> bool:
    """Whether its client wants a trace, or says nothing about it."""
    found = PARENT.fullmatch(life.traceparent)
    return found is None or bool(int(found[3], 16) & 1)


def spans_of(life: RequestTrace, epoch_s: float) -> list[Json]:
    """The spans of a request that has ended, its own first.

    Without a trace of the client's, the id of the trace is the one in the answer's ``id``.
    ``epoch_s``: Unix time at which the router's clock was 0.
    """
    parent = PARENT.fullmatch(life.traceparent)
    named = re.search(r"[0-9a-f]{32}", life.request)
    outer = parent[2] if parent else ""
    trace = parent[1] if parent else named[0] if named else _digest(life.request, 32)
    began, report = life.steps[0][1], life.report
    own: dict[str, str | int] = {
        "triptych.request": life.request,
        "triptych.attempt": life.attempt,
        "gen_ai.usage.input_tokens": life.prompt_tokens,
        "gen_ai.usage.output_tokens": life.tokens,
        "triptych.end": life.end,
    }
    if life.code:
        own["error.type"] = life.code
    if report is not None:
        own["triptych.compression.policy"] = report.policy
        own["triptych.raw_bytes"] = report.raw_bytes
        own["triptych.stored_bytes"] = report.stored_bytes

    def span(name: str, part: str, start: float, end: float, told: Mapping[str, str | int]) -> Json:
        return {
            "traceId": trace,
            "spanId": _digest(f"{life.request}/{part}", 16),
            "parentSpanId": _digest(f"{life.request}/", 16) if part else outer,
            "name": name,
            "kind": _INTERNAL if part else _SERVER,
            "startTimeUnixNano": str(int((epoch_s + start) * 1e9)),
            "endTimeUnixNano": str(int((epoch_s + max(start, end)) * 1e9)),
            "attributes": _attributes(told),
            "status": {"code": _ERROR} if life.end == "failed" and not part else {},
        }

    ends = [*(since for _, since in life.steps[1:]), life.ended]
    spans = [span("request", "", began, life.ended, own)]
    for place, ((state, since), until) in enumerate(zip(life.steps, ends, strict=True)):
        spans.append(span(state, str(place), since, until, _told(state, life)))
    return spans


def _told(state: str, life: RequestTrace) -> dict[str, str | int]:
    """What a stage had to do with how much."""
    if state == "prefilling":
        return {"triptych.tokens": life.prompt_tokens}
    if life.report is None:
        return {}
    match state:
        case "prefilled" | "compressing":
            return {"triptych.bytes": life.report.raw_bytes}
        case "encoding" | "compressed" | "decoding":
            return {"triptych.bytes": life.report.stored_bytes}
        case _:
            return {}


def _attributes(told: Mapping[str, str | int]) -> list[Json]:
    return [
        {
            "key": key,
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in told.items()
    ]


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def payload(spans: Sequence[Json]) -> Json:
    """What OTLP posts: spans of one service."""
    service = {"attributes": _attributes({"service.name": "triptych"})}
    scoped = {"scope": {"name": "triptych.router"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": service, "scopeSpans": [scoped]}]}


@dataclass
class Tracer:
    """Posts the traces of requests that ended since it last looked; those that do not get through
    are lost, as no request may wait for them."""

    url: str
    _posted: frozenset[int] = frozenset()
    """Numbers of the remembered requests that are done with."""
    _is_lost: bool = field(default=False, init=False)

    def fresh(self, lives: Iterable[RequestTrace]) -> list[RequestTrace]:
        """Those that ended and were not seen so before."""
        ended = [life for life in lives if life.end]
        before, self._posted = self._posted, frozenset(life.number for life in ended)
        return [life for life in ended if life.number not in before and is_wanted(life)]

    async def post(self, lives: Iterable[RequestTrace], epoch_s: float) -> None:
        """Look at the latest requests and post what is new."""
        spans = [span for life in self.fresh(lives) for span in spans_of(life, epoch_s)]
        if not spans:
            return
        try:
            async with httpx.AsyncClient(timeout=POST_TIMEOUT_S) as client:
                (await client.post(self.url, json=payload(spans))).raise_for_status()
        except httpx.HTTPError as error:
            if not self._is_lost:  # said once, not for every second of an outage
                logger.warning(
                    "router.otlp_traces_endpoint=%s takes no traces: %r", self.url, error
                )
            self._is_lost = True
        else:
            self._is_lost = False
