"""The router's decisions about a client's request, as JSON and as one line."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from triptych.router import Decision, Explanation, RequestTrace

Json = dict[str, object]


def explanations(
    traces: Sequence[RequestTrace], now: dict[str, Explanation], at: float
) -> list[Json]:
    """One entry per choice and attempt, in order of arrival; ``now`` explains running ones.

    Times are seconds since the arrival of the request.
    """
    return [_trace(trace, now.get(trace.request), at) for trace in traces]


def summary(traces: Sequence[RequestTrace]) -> str:
    """The decisions about the first choice in one line, without names of workers.

    >>> summary([])
    ''
    """
    if not traces:
        return ""
    trace, came = traces[0], traces[0].steps[0][1]
    return "; ".join(_short(one, one.at - came) for one in trace.decisions)


def _short(decision: Decision, after_s: float) -> str:
    words = [f"{decision.step}={decision.reason}", f"after={after_s:.3f}s"]
    if decision.waiting:
        words.append(f"older={decision.older} of {decision.waiting}")
    if decision.booked_bytes:
        words.append(f"booked={decision.booked_bytes}")
    return " ".join(words)


def _trace(trace: RequestTrace, now: Explanation | None, at: float) -> Json:
    came = trace.steps[0][1]
    steps = [(state, since - came) for state, since in trace.steps]
    until = (trace.ended if trace.end else at) - came
    return {
        "request": trace.request,
        "attempt": trace.attempt,
        "came_s_ago": at - came,
        "prompt_tokens": trace.prompt_tokens,
        "max_tokens": trace.max_tokens,
        "cached_tokens": trace.cached_tokens,
        "end": trace.end or None,
        "code": trace.code or None,
        "tokens": trace.tokens if trace.end == "finished" else None,
        "compression": asdict(trace.report) if trace.report else None,
        "steps": [
            {"state": state, "at_s": since, "took_s": after - since}
            for (state, since), (_, after) in pairwise([*steps, ("", until)])
        ],
        "now": asdict(now) if now else None,
        "decisions": [asdict(one) | {"at": one.at - came} for one in trace.decisions],
    }
