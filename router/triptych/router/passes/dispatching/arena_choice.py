"""Arenas of a request: where its raw pages, their compression and its final pages lie."""

from dataclasses import dataclass, field

from triptych.core.handles import can_access, is_apart, pool_of
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.passes.growth import Growth
from triptych.router.state.byte_ledger import (
    Lines,
    are_peers,
    lines_after_encoding,
    lines_before_encoding,
)
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry

ENCODER_GRACE_S = 30.0
"""Time for which prompts with layer-wise prefill, and those whose raw pages no other GPU can read,
wait for a compressor after one died."""


@dataclass
class ArenaChoice:
    """Chooses arenas in which a request's bytes can be booked."""

    cluster: ClusterState
    growth: Growth
    _finals: dict[tuple[str, str], str | None] = field(
        default_factory=dict[tuple[str, str], str | None]
    )
    """What ``final_arena`` has found, by request and arena, since a request was last looked at."""

    def forget(self) -> None:
        """Forget what was found for the last request: bookings may have changed."""
        self._finals.clear()

    def raw_arena(self, home: str) -> str:
        """The arena where a prefill worker of an arena stores raw pages: its own, if possible.

        In host memory if no other GPU can read its arena, and no compressor is there.
        """
        if is_apart(home) and not self.cluster.load_index.has_compressor(home):
            return pool_of(home)
        return home

    def work_arena(self, raw_arena: str) -> str:
        """The arena in which raw pages will be compressed: their own, if it has a compressor.

        Raw pages are the most expensive to transfer.
        """
        load_index = self.cluster.load_index
        if load_index.has_compressor(raw_arena):
            return raw_arena
        address = load_index.compressor("")
        return raw_arena if address is None else load_index.arena_of(address)

    def final_arena(self, entry: Entry, raw_arena: str, now: float) -> str | None:
        """Arena in which the pages for decode are booked before a decode worker is chosen."""
        key = entry.id, raw_arena
        if key not in self._finals:
            self._finals[key] = self._find_final_arena(entry, raw_arena, now)
        return self._finals[key]

    def _find_final_arena(self, entry: Entry, raw_arena: str, now: float) -> str | None:
        work_arena, sizes = self.work_arena(raw_arena), entry.whole or entry.sizes
        if self.goes_in_parts(entry, raw_arena, now):
            sizes = entry.sizes
            if self.cluster.load_index.compressor("", raw_arena) is None:
                return None

        def fits(arena: str) -> bool:
            if not can_write(work_arena, arena):
                return False
            lines = lines_before_encoding(sizes, raw_arena, work_arena, arena)
            return self.cluster.ledger.fits(entry.id, lines) and self.growth.may_start(entry, arena)

        return self.cluster.load_index.final_arena({raw_arena, work_arena}, fits)

    def goes_in_parts(self, entry: Entry, arena: str, now: float) -> bool:
        """Whether a request uses layer-wise prefill, if it is prefilled in an arena.

        The router waits for a replacement of a dead compressor: prefill without layers gives
        slightly different output, and a death must not change output.
        """
        if entry.whole is None:
            return False
        absent = self.cluster.membership.absent_since("compress", arena)
        return absent is None or now - absent < ENCODER_GRACE_S

    def lacks_encoder(self, entry: Entry, now: float) -> bool:
        """Whether a request waits for a compressor in every arena where it could be prefilled."""
        load_index = self.cluster.load_index
        return all(
            self.goes_in_parts(entry, arena, now) and load_index.compressor("", arena) is None
            for arena in load_index.prefill_arenas or [""]  # an arena without a name is not counted
        )

    def decode_worker(self, entry: Entry) -> str | None:
        """The best decode worker in an arena where the final pages can be booked."""

        def fits(arena: str) -> bool:
            writes = can_write(entry.placement.work_arena, arena)
            return writes and self.cluster.ledger.fits(entry.id, self.lines(entry, final=arena))

        own = {entry.placement.raw_arena, entry.placement.work_arena, entry.placement.final_arena}
        return self.cluster.load_index.decode(own, fits)

    def decode_worker_elsewhere(self, entry: Entry) -> str | None:
        """Choose a decode worker in another arena and book the final pages there.

        Only for pages that must be fetched in any case. Pages in the arena of a dead decode worker
        are not fetched from there: its pool may be dead as well.
        """
        if entry.placement.work_arena == entry.placement.final_arena:
            return None
        ledger, load_index = self.cluster.ledger, self.cluster.load_index

        def lines(arena: str) -> Lines:
            return lines_after_encoding(entry.sizes, entry.placement.work_arena, arena)

        own = {entry.placement.work_arena, entry.placement.final_arena}
        address = load_index.decode(own, lambda arena: ledger.fits(entry.id, lines(arena)))
        if address is not None:
            entry.placement.final_arena = load_index.arena_of(address)
            ledger.book(entry.id, lines(entry.placement.final_arena))
        return address

    def lines(self, entry: Entry, *, final: str) -> Lines:
        """Bytes that a request books if it is decoded in the arena ``final``."""
        return lines_before_encoding(
            entry.sizes, entry.placement.raw_arena, entry.placement.work_arena, final
        )

    def could_fit(self, sizes: RequestBytes, first: str) -> bool:
        """Whether any arena has room for the raw pages and any for the final ones.

        ``first``: the arena to look at first. Only if it has no room are all arenas ordered.
        """
        load_index, ledger = self.cluster.load_index, self.cluster.ledger
        final = load_index.most_free_decode_arena()
        if final is None or sizes.grown > ledger.free(final):
            return False
        if sizes.raw <= ledger.free(first):
            return True
        raw = load_index.most_free_arena()
        return raw is not None and sizes.raw <= ledger.free(raw)

    def can_encode(self, entry: Entry, arena: str) -> bool:
        """Whether a request has no images, or an encode worker stores in an arena."""
        return not entry.request.images or bool(self.cluster.image_encoders.workers(arena))


def can_write(work_arena: str, final_arena: str) -> bool:
    """Whether encoded pages can come from a compressor to an arena, or be fetched from there."""
    return not are_peers(work_arena, final_arena) or can_access(work_arena, final_arena)
