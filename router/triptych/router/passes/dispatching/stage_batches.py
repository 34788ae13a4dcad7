"""Dispatch in batches of given sizes: FastCache's static baselines and dynamic schedule."""

from collections import Counter
from dataclasses import dataclass, field, replace

from triptych.router.passes.dispatching.dispatch import Dispatch
from triptych.router.policies.batch_gates import (
    LARGEST_BATCH,
    BatchSizes,
    Gate,
    StageLoad,
    batch_sizes,
)
from triptych.router.policies.placement import Choice
from triptych.router.snapshot import HeldBy
from triptych.router.state.request_table import Entry, State


@dataclass
class StaticBatchDispatch(Dispatch):
    """Dispatch for a schedule with batch sizes (``Schedule.has_batch_sizes``).

    A batch goes to one worker that is idle. A decode batch runs to its end before the next one
    joins. A stage whose gate has no ``most`` is dispatched continuously.

    Source: FastCache, Algorithm 1 and the baselines of section 4.2
    """

    _batch_worker: str = field(default="", init=False)
    """Prefill worker of the batch that is being started; empty before its first request."""

    @property
    def is_layerwise(self) -> bool:
        return self.schedule.compress.most is None

    # ---------------------------------------------------------------- orphaned -> decoding

    def _resume_all(self, now: float) -> None:
        orphans = self.cluster.requests.in_state(State.ORPHANED)
        running = self._running() if orphans else Counter[str]()
        for entry in orphans:
            address = self.cluster.load_index.decode_in(entry.placement.final_arena)
            if address is not None and self.schedule.decode.has_room(running[address]):
                running[address] += 1
                self._resume(entry, address, now)

    def _running(self) -> Counter[str]:
        """Requests that were sent to each decode worker."""
        return Counter(
            entry.placement.decode_worker
            for entry in self.cluster.requests.in_state(State.DECODING)
        )

    # ---------------------------------------------------------------- compressed -> decoding

    def _ready_to_join(self, now: float) -> list[Entry]:
        """Whole batches for decode workers that have finished theirs."""
        ready, gate = super()._ready_to_join(now), self.schedule.decode
        if gate.most is None or not ready:
            return ready
        at = dict[str, list[Entry]]()
        for entry in ready:
            at.setdefault(entry.placement.decode_worker, []).append(entry)
        busy = self._running()
        return [
            entry
            for address, batch in at.items()
            if address not in busy and gate.opens(len(batch), now - batch[0].since)
            for entry in batch[: gate.most]
        ]

    # ---------------------------------------------------------------- prefilled -> compressing

    def _compress_all(self, now: float) -> None:
        """Send whole batches of each arena to idle compressors."""
        gate = self.schedule.compress
        if gate.most is None:
            super()._compress_all(now)
            return
        if self.cluster.load_index.compressor("") is None:
            return
        of_arena = dict[str, list[Entry]]()
        for entry in self.cluster.requests.in_state(State.PREFILLED):
            of_arena.setdefault(entry.placement.work_arena, []).append(entry)
        for rest in of_arena.values():
            while rest and gate.opens(len(rest), now - rest[0].since):
                address = self._compressor(rest[0])
                if address is None:
                    break
                for entry in rest[: gate.most]:
                    if self._book_work(entry, address):
                        self._compress(entry, address, now)
                del rest[: gate.most]

    def _choose_compressor(self, holder: str, arena: str | None) -> str | None:
        if self.schedule.compress.most is None:
            return super()._choose_compressor(holder, arena)
        return self.cluster.load_index.idle_compressor(holder, arena)

    # ---------------------------------------------------------------- waiting -> prefilling

    @property
    def _prefill_limit_tokens(self) -> int:
        is_continuous = self.schedule.prefill.most is None
        return super()._prefill_limit_tokens if is_continuous else 0

    def _admit(self, now: float) -> HeldBy:
        """Start batches as long as one is full or has waited long enough."""
        queue, gate = self.cluster.requests.queue, self.schedule.prefill
        if gate.most is None:
            return super()._admit(now)
        while (oldest := queue.oldest_arrival()) is not None:
            if not gate.opens(len(queue), now - oldest):
                return "gathering"
            if blocked_reason := self._blocked_by_workers():
                return blocked_reason
            wanted = min(self._unpromised_slots, gate.most)
            self._batch_worker = ""
            started, blocked_reason = self._start_all(self._batch(wanted, now), now)
            if started == 0:
                return blocked_reason or "no_bytes"
        return ""

    def _place(self, entry: Entry, now: float) -> tuple[Choice | None, HeldBy]:
        """The worker of the batch; for its first request, the choice of the placement policy."""
        if self.schedule.prefill.most is None:
            return super()._place(entry, now)
        if not self._batch_worker:
            choice, blocked_reason = super()._place(entry, now)
            self._batch_worker = choice.worker if choice is not None else ""
            return choice, blocked_reason
        if self.arenas.lacks_encoder(entry, now):
            return None, "no_compressor"
        arena = self.cluster.load_index.arena_of(self._batch_worker)
        if self.arenas.final_arena(entry, self.arenas.raw_arena(arena), now) is None:
            return None, "no_bytes"
        return Choice(self._batch_worker, "its_batch"), ""


@dataclass
class AdaptiveBatchDispatch(StaticBatchDispatch):
    """Dispatch in batches whose sizes follow forecasts (``Schedule.is_adaptive``).

    Decode is continuous; its batch size limits how many requests start.

    Source: FastCache, section 3.3 (dynamic multi-stage batching)
    """

    sizes: BatchSizes = field(default=BatchSizes(1, 1, 1), init=False)

    def run(self, now: float) -> None:
        requests = self.cluster.requests
        if requests.has_any((State.WAITING, State.PREFILLED)):
            self.sizes = batch_sizes(self._load(now))
            self.schedule = replace(
                self.schedule,
                prefill=Gate(most=self.sizes.prefill),
                compress=Gate(most=self.sizes.compress),
            )
        super().run(now)

    def _load(self, now: float) -> StageLoad:
        requests, load_index = self.cluster.requests, self.cluster.load_index
        first = next(requests.queue.at(now).smallest_first(), None)
        arena = load_index.most_free_arena()
        waiting, startable = requests.count(State.WAITING), 0
        if first is not None and arena is not None:
            most = min(waiting, LARGEST_BATCH)
            startable = self.growth.startable(requests[first.id], arena, most)
        return StageLoad(
            waiting=waiting,
            startable=startable,
            prefilled=requests.count(State.PREFILLED),
            started=requests.in_work,
            prefill_workers=load_index.workers_of("prefill"),
            compressors=load_index.workers_of("compress"),
        )

    def _blocked_by_workers(self) -> HeldBy:
        if blocked_reason := super()._blocked_by_workers():
            return blocked_reason
        return "" if self.cluster.requests.in_work < self.sizes.decode else "no_bytes"
