"""All requests of the router, by id and by state."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from triptych.core.handles import KVHandle
from triptych.core.messages import CompressionReport, Request, Stage
from triptych.router.estimate import RequestBytes


class State(StrEnum):
    """Where a request stands; docs/architecture.md has the diagram."""

    WAITING = "waiting"
    """In the line; nothing booked, nobody told."""
    PREFILLING = "prefilling"
    """Sent to a prefill worker."""
    PREFILLED = "prefilled"
    """The prefill worker holds its raw pages; no compressor was told."""
    COMPRESSING = "compressing"
    """Sent to a compressor, which may or may not have attached the raw pages yet."""
    PLANNED = "planned"
    """The compressor holds the raw pages and waits to hear where to encode."""
    ENCODING = "encoding"
    """The compressor was told."""
    COMPRESSED = "compressed"
    """The compressor holds the finished pages; no decode worker was told."""
    DECODING = "decoding"
    """Sent to a decode worker, which may or may not have attached the pages yet."""
    ORPHANED = "orphaned"
    """Its decode worker died, and its pages wait in the pool for another one."""
    LEAVING = "leaving"
    """Over for the client, but some worker may still hold pages of it."""


@dataclass(eq=False, slots=True)
class Entry:
    """One request and what the router knows of it. Addresses are empty where there is none."""

    request: Request
    sizes: RequestBytes
    arrived: float
    since: float
    """When it entered its state."""
    state: State = State.WAITING
    worker: str = ""
    """The last worker that was told of it."""
    stage: Stage = "prefill"
    """The stage of that worker."""
    giver: str = ""
    """The worker before, while it may still hold the lease that ``worker`` is to attach."""
    decode: str = ""
    """The decode worker with a slot for it."""
    former: str = ""
    """Name of the dead worker that left its pages, until another one has taken them over."""
    raw_arena: str = ""
    final_arena: str = ""
    first_token: int = 0
    token_s: float = 0.0
    """Seconds that a token of the prompt took to compute."""
    handle: KVHandle | None = None
    """The pages that the next stage will attach."""
    report: CompressionReport | None = None
    owed: dict[str, float] = field(default_factory=dict[str, float])
    """While it is leaving: workers that have not said that they hold nothing of it, and until
    when that is waited for."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prefill reads."""
        return len(self.request.known)

    @property
    def holders(self) -> list[str]:
        """Workers that may hold pages of it."""
        return list(dict.fromkeys(address for address in (self.worker, self.giver) if address))


@dataclass
class Requests:
    """The table: each entry is in one state, and each state keeps the order of entering."""

    _by_id: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _by_state: dict[State, dict[str, Entry]] = field(
        default_factory=lambda: {state: dict[str, Entry]() for state in State}
    )

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def __contains__(self, request: str) -> bool:
        return request in self._by_id

    def get(self, request: str) -> Entry | None:
        return self._by_id.get(request)

    def add(self, entry: Entry) -> None:
        """Put an entry at the end of its state; one that was in work before goes to the front."""
        self._by_id[entry.id] = entry
        others = self._by_state[entry.state]
        if entry.request.attempt:
            self._by_state[entry.state] = {entry.id: entry, **others}
        else:
            others[entry.id] = entry

    def move(self, entry: Entry, state: State, now: float) -> None:
        """Put an entry at the end of another state."""
        del self._by_state[entry.state][entry.id]
        entry.state, entry.since = state, now
        self._by_state[state][entry.id] = entry

    def remove(self, entry: Entry) -> None:
        del self._by_id[entry.id]
        del self._by_state[entry.state][entry.id]

    def in_state(self, state: State) -> list[Entry]:
        """Entries of a state, first to enter first."""
        return list(self._by_state[state].values())

    def count(self, state: State) -> int:
        return len(self._by_state[state])
