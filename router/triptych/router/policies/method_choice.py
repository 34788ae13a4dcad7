"""Chooses the compression method of a request by load: pure functions of rungs and of the load.

The methods of a frontier are rungs of a ladder: each takes more bytes than the one below it and has
a smaller KL. The choice is the highest rung that the memory allows and that costs hardly any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from triptych.core.messages import ChoiceReason

SLACK = 0.02
"""Share of the shortest job time by which a rung may take longer than those below it."""
NEGLIGIBLE_S = 0.01
"""The same in seconds: so little delays nobody."""
ROOM = 4
"""Requests like this one for which there must be room: those that run will grow."""
RISE = 1.25
"""Times ``ROOM`` for which there must be room before the ladder is climbed."""
HOLD_S = 5.0
"""Seconds after a change of rung in which the ladder is not climbed."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A method, and what one request would take with it."""

    method: str
    kl: float
    stored_bytes: int
    compress_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Time that depends on the method."""
        return self.compress_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Load:
    """Free memory, and the time that a request takes with any method."""

    free_bytes: int
    """Bytes of pages, an equal part for each request that waits."""
    base_s: float = 0.0
    """Predicted time of the request that does not depend on the method."""


@dataclass(frozen=True, slots=True)
class Position:
    """The rung that the load asked for last."""

    method: str = ""
    kl: float = 0.0
    changed: float = -inf
    """When it was another one before."""


class Choice(NamedTuple):
    rung: Rung
    reason: ChoiceReason
    position: Position


def ladder(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """The rungs by bytes, without those that have as many bytes as another and no smaller KL.

    >>> rungs = [Rung("a", 0.2, 10), Rung("b", 0.3, 20), Rung("c", 0.1, 30)]
    >>> [rung.method for rung in ladder(rungs)]
    ['a', 'c']
    """
    found = list[Rung]()
    for rung in sorted(rungs, key=lambda one: (one.stored_bytes, one.kl, one.seconds)):
        if not found or rung.kl < found[-1].kl:
            found.append(rung)
    return tuple(found)


def choose(
    rungs: Sequence[Rung], load: Load, position: Position, now: float, max_kl: float = inf
) -> Choice:
    """The method of a request, and the rung that the load asks for.

    ``rungs``: a ladder. If no rung has a KL of at most ``max_kl``, the highest is chosen.

    Promise: the KL is at most ``max_kl`` if that of any rung is. With more free bytes the rung is
        never lower. The ladder is climbed once in ``HOLD_S`` at most.
    Source: KVServe (a Pareto set, and a latency model of compression and link that picks from it);
        the ladder, its order in free bytes and the floors are ours
    """
    wanted = _wanted(rungs, load, position, now)
    lowest = next((at for at, one in enumerate(rungs) if one.kl <= max_kl), len(rungs) - 1)
    chosen, rung = max(wanted, lowest), rungs[wanted]
    if rung.method != position.method:
        position = Position(rung.method, rung.kl, now)
    reason = "floor" if lowest > wanted else _limit(rungs, load, wanted)
    return Choice(rungs[chosen], reason, position)


def _wanted(rungs: Sequence[Rung], load: Load, position: Position, now: float) -> int:
    """Index of the rung that the load asks for: lower at once, higher with a margin and a pause."""
    most = _highest(rungs, load, ROOM, 1.0)
    if not position.method:
        return most
    before = _index(rungs, position)
    if most <= before:
        return most
    sure = _highest(rungs, load, ROOM * RISE, 0.5) if now - position.changed >= HOLD_S else 0
    return max(before, sure)


def _highest(rungs: Sequence[Rung], load: Load, room: float, patience: float) -> int:
    """Index of the highest rung that fits and is quick enough; the lowest if none is."""
    return max(
        (
            at
            for at, rung in enumerate(rungs)
            if rung.stored_bytes * room <= load.free_bytes and _is_quick(rungs, at, load, patience)
        ),
        default=0,
    )


def _is_quick(rungs: Sequence[Rung], at: int, load: Load, patience: float = 1.0) -> bool:
    """Whether a rung takes hardly longer than the quickest up to it.

    Rungs above do not count, so what is quick does not depend on the memory.
    """
    best_s = load.base_s + min(one.seconds for one in rungs[: at + 1])
    slack_s = patience * (SLACK * best_s + NEGLIGIBLE_S)
    return load.base_s + rungs[at].seconds <= best_s + slack_s


def _index(rungs: Sequence[Rung], position: Position) -> int:
    """Index of the rung of a position; at another length its method may be none."""
    methods = [one.method for one in rungs]
    if position.method in methods:
        return methods.index(position.method)
    return max((at for at, one in enumerate(rungs) if one.kl >= position.kl), default=0)


def _limit(rungs: Sequence[Rung], load: Load, wanted: int) -> ChoiceReason:
    """Why it is no higher rung: what keeps the next one that is quick, or the next at all."""
    above = range(wanted + 1, len(rungs))
    if not above:
        return "quality"
    at = next((one for one in above if _is_quick(rungs, one, load)), None)
    if at is None:
        more, less = rungs[above[0]], rungs[wanted]
        is_link = more.transfer_s - less.transfer_s >= more.compress_s - less.compress_s
        return "link" if is_link else "stages"
    return "memory" if rungs[at].stored_bytes * ROOM > load.free_bytes else "held"
