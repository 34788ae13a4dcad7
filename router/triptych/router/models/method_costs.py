"""Seconds that depend on the compression method of a request: to compress, and on the link."""

from dataclasses import dataclass, field

LEAST_TOKENS = 256
"""Prompts with fewer tokens tell little about the speed of compression."""
MOST_FACTOR = 100.0
"""Most times that compression is taken to be slower than calibration measured it."""
RISE = 1.05
"""Times that a factor rises at most with a measurement: messages and queues only add to it."""
TRAVEL_WEIGHT = 0.1
"""Weight of the newest request in the share of those whose pages travel."""


@dataclass
class MethodCosts:
    """Learns how long compression takes, as the router sees it, and the speed of links.

    Compression is measured relative to calibration, which knows the time of each method on an idle
    machine. What the router sees contains messages and queues, so the shortest times count. For a
    method that nobody has used, the factor of the others holds.
    """

    travel_share: float = 1.0
    """Share of the latest requests whose compressed pages went to another node."""
    _factors: dict[str, float] = field(default_factory=dict[str, float])
    """Times that compression is slower than measured, by method; empty: of all."""
    _speeds: dict[str, float] = field(default_factory=dict[str, float])
    """Bytes per second that each worker has measured, by address."""
    _travelling: set[str] = field(default_factory=set[str])

    # ---------------------------------------------------------------- measurements

    def compressed(self, method: str, compress_us: float, tokens: int, seconds: float) -> None:
        """A prompt was compressed; ``compress_us`` for each token is what calibration measured."""
        if tokens >= LEAST_TOKENS and compress_us:
            factor = min(MOST_FACTOR, 1e6 * seconds / (compress_us * tokens))
            for name in ("", method):
                self._factors[name] = min(factor, RISE * self._factors.get(name, factor))

    def sent(self, request: str, *, travels: bool) -> None:
        """The pages of a request are complete; ``travels``: in another arena than they will be."""
        self.travel_share += TRAVEL_WEIGHT * (travels - self.travel_share)
        if travels:
            self._travelling.add(request)

    def arrived(self, request: str) -> None:
        """The pages of a request are where they belong, or it has ended."""
        self._travelling.discard(request)

    def reported(self, worker: str, link_bytes_s: float) -> None:
        """A worker has measured a link; 0: it has fetched nothing."""
        if link_bytes_s > 0:
            self._speeds[worker] = link_bytes_s

    def left(self, worker: str) -> None:
        self._speeds.pop(worker, None)

    # ---------------------------------------------------------------- predictions

    def compress_s(self, method: str, compress_us: float, tokens: int) -> float:
        """Seconds to compress a prompt."""
        factor = self._factors.get(method, self._factors.get("", 1.0))
        return factor * compress_us * tokens / 1e6

    @property
    def link_bytes_s(self) -> float:
        """Mean speed of the links between nodes; 0: none is known."""
        return sum(self._speeds.values()) / len(self._speeds) if self._speeds else 0.0

    def transfer_s(self, count: int) -> float:
        """Seconds that pages of ``count`` bytes probably are on their way to another node.

        Those that are on their way go first; they are taken to have as many bytes.
        """
        if not self._speeds:
            return 0.0
        each = max(1, len(self._speeds))
        return self.travel_share * (1 + len(self._travelling) / each) * count / self.link_bytes_s
