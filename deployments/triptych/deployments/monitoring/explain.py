"""What the router decided about a client's request, and why, as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from triptych.router import Decision, Explanation, RequestTrace

Json = dict[str, object]


def explained(lives: Sequence[RequestTrace], now: dict[str, Explanation], at: float) -> list[Json]:
    """One entry for each choice and attempt, first come first; ``now`` is of those under way.

    Times are seconds since the request came, so that they mean something to whoever reads them.
    """
    return [_life(life, now.get(life.request), at) for life in lives]


def summary(lives: Sequence[RequestTrace]) -> str:
    """The decisions about the first choice in one line, without the name of any worker.

    >>> summary([])
    ''
    """
    if not lives:
        return ""
    life, came = lives[0], lives[0].steps[0][1]
    return "; ".join(_short(one, one.at - came) for one in life.decisions)


def _short(decision: Decision, after_s: float) -> str:
    words = [f"{decision.step}={decision.reason}", f"after={after_s:.3f}s"]
    if decision.waiting:
        words.append(f"older={decision.older} of {decision.waiting}")
    if decision.booked_bytes:
        words.append(f"booked={decision.booked_bytes}")
    return " ".join(words)


def _life(life: RequestTrace, now: Explanation | None, at: float) -> Json:
    came = life.steps[0][1]
    steps = [(state, since - came) for state, since in life.steps]
    until = (life.ended if life.end else at) - came
    return {
        "request": life.request,
        "attempt": life.attempt,
        "came_s_ago": at - came,
        "prompt_tokens": life.prompt_tokens,
        "max_tokens": life.max_tokens,
        "cached_tokens": life.cached_tokens,
        "end": life.end or None,
        "code": life.code or None,
        "tokens": life.tokens if life.end == "finished" else None,
        "compression": asdict(life.report) if life.report else None,
        "steps": [
            {"state": state, "at_s": since, "took_s": after - since}
            for (state, since), (_, after) in pairwise([*steps, ("", until)])
        ],
        "now": asdict(now) if now else None,
        "decisions": [asdict(one) | {"at": one.at - came} for one in life.decisions],
    }
