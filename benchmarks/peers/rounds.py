"""Order of the rounds, which of them count, and which are still to be measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MOST_OTHER_CORES = 0.15
MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """One server in one round of one workload; repeated while it is disturbed."""

    workload: str
    round: int
    server: str
    attempt: int = 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A turn and what was measured in it."""

    workload: str
    round: int
    server: str
    attempt: int
    figures: Mapping[str, float]
    """Names of ``bench serve``, and ``other_cores`` without the busy loop."""
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    date: str = ""
    commit: str = ""

    @property
    def turn(self) -> Turn:
        return Turn(self.workload, self.round, self.server, self.attempt)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Workloads, servers and rounds of a run, and when a turn is repeated."""

    workloads: Sequence[str]
    servers: Sequence[str]
    """In the order of their turns in each round."""
    rounds: int
    most_other_cores: float = MOST_OTHER_CORES
    most_attempts: int = MOST_ATTEMPTS
    skipped: Sequence[tuple[str, str]] = ()
    """Workload and server, where the server does not start or fails the warm-up."""

    def counts(self, row: Measured) -> bool:
        """Whether a turn is used: all requests answered, and no other process in the way."""
        return not row.errors and not self.is_disturbed(row)

    def is_disturbed(self, row: Measured) -> bool:
        return row.figures["other_cores"] > self.most_other_cores

    def next_turn(self, rows: Iterable[Measured]) -> Turn | None:
        """The first turn that is missing; None: all are there.

        In a round each server has its turn; then those that were disturbed have another one, up
        to ``most_attempts``.
        """
        seen = _attempts(rows, self)
        for workload in self.workloads:
            for number in range(1, self.rounds + 1):
                if turn := self._missing(workload, number, seen):
                    return turn
        return None

    def settled(self, rows: Iterable[Measured], workload: str) -> int:
        """Number of a workload's turns that are done, repeats included in them."""
        seen = _attempts(rows, self)
        return sum(self._is_settled(place, seen) for place in self._places(workload))

    def _missing(self, workload: str, number: int, seen: "Attempts") -> Turn | None:
        for attempt in range(1, self.most_attempts + 1):
            for server in self.servers:
                place = (workload, number, server)
                made, _ = seen.get(place, (0, False))
                if made == attempt - 1 and not self._is_settled(place, seen):
                    return Turn(*place, attempt)
        return None

    def _is_settled(self, place: "Place", seen: "Attempts") -> bool:
        workload, _, server = place
        made, is_good = seen.get(place, (0, False))
        return is_good or made >= self.most_attempts or (workload, server) in self.skipped

    def _places(self, workload: str) -> Iterator["Place"]:
        for number in range(1, self.rounds + 1):
            yield from ((workload, number, server) for server in self.servers)


Place = tuple[str, int, str]
"""Workload, round and server."""
Attempts = dict[Place, tuple[int, bool]]
"""How many attempts there were, and whether one counts."""


def _attempts(rows: Iterable[Measured], plan: Plan) -> Attempts:
    found: Attempts = {}
    for row in rows:
        place = (row.workload, row.round, row.server)
        made, is_good = found.get(place, (0, False))
        found[place] = (max(made, row.attempt), is_good or plan.counts(row))
    return found


def used(plan: Plan, rows: Iterable[Measured]) -> dict[Place, Measured]:
    """The last attempt of each turn that counts."""
    return {(row.workload, row.round, row.server): row for row in rows if plan.counts(row)}
