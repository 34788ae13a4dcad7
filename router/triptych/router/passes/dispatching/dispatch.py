"""Dispatch: sends each request that can continue to a worker of its next stage."""

from dataclasses import dataclass, field

from triptych.core.config import RouterConfig
from triptych.core.handles import is_apart
from triptych.core.messages import CompressItem, EncodeImages, Join, Prefix, Resume, pack_tokens
from triptych.router.passes.dispatching.arena_choice import ENCODER_GRACE_S, ArenaChoice
from triptych.router.passes.growth import Growth
from triptych.router.passes.placement_view import Placer
from triptych.router.policies.batch_gates import Schedule
from triptych.router.policies.placement import Choice
from triptych.router.snapshot import Budget, HeldBy
from triptych.router.state.byte_ledger import lines_after_encoding, lines_before_encoding
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.decision_log import DecisionLog
from triptych.router.state.request_table import Entry, PromptWait, State
from triptych.router.state.shared_prompts import SharedPrompts

MOVABLE = (State.ORPHANED, State.COMPRESSED, State.PLANNED, State.PREFILLED, State.WAITING)
"""States in which a request waits for the router, in the order in which they are dispatched."""

ROUND_REQUESTS = 4
"""Requests that the batch policy chooses at a time. Unused choices are lost if workers are full."""


@dataclass
class Dispatch:
    """Continuous dispatch: a request goes to a worker as soon as that has room.

    The requests nearest to their end are dispatched first.
    """

    cluster: ClusterState
    schedule: Schedule
    config: RouterConfig
    placer: Placer
    growth: Growth
    shared: SharedPrompts
    """Prompts that requests in work compute for others."""
    keeps_prefixes: bool = False
    """Whether the pool has a prefix cache."""
    blocked_reason: HeldBy = ""
    """Why the first waiting request did not start in the last pass."""
    reasons: DecisionLog = field(init=False)
    arenas: ArenaChoice = field(init=False)
    _short_at: tuple[int, int] | None = None
    """Changes of the queue and openings of arenas when bytes were last short; None: they are not,
    or time has passed since."""
    _busy_at: int | None = None
    """Changes of the queue when no prefill worker had room for the first request in it. More bytes
    do not make another one the first."""
    _busy_for: int = 0
    """Room that this request takes, in tokens."""
    _successors: dict[str, Entry] = field(default_factory=dict[str, Entry])
    """Requests in prefill whose images are still to be sent to an encode worker."""

    def __post_init__(self) -> None:
        self.reasons = DecisionLog(self.cluster)
        self.arenas = ArenaChoice(self.cluster, self.growth)
        self.cluster.requests.on_end.append(self._ended)

    def expire(self) -> None:
        """Time has passed: requests may have lost their patience, so the queue has another
        order."""
        self._short_at = self._busy_at = None

    def run(self, now: float) -> None:
        """Dispatch every request that can continue, last stage first."""
        self.blocked_reason = ""
        self._encode_images_of_successors(now)
        if not self.cluster.requests.has_any(MOVABLE):
            return
        self.cluster.load_index.refresh(now)
        self.shared.forget_arenas_except(self.cluster.load_index.arenas)
        count = self.cluster.requests.count
        if count(State.ORPHANED):
            self._resume_all(now)
        if count(State.COMPRESSED):
            self._join_all(now)
        if count(State.PLANNED):
            self._encode_all(now)
        if count(State.PREFILLED):
            self._compress_all(now)
        self._restore_all(now)
        self.blocked_reason = self._admit(now)

    # ---------------------------------------------------------------- orphaned -> decoding

    def _resume_all(self, now: float) -> None:
        for entry in self.cluster.requests.in_state(State.ORPHANED):
            address = self.cluster.load_index.decode_in(entry.placement.final_arena)
            if address is not None:
                self._resume(entry, address, now)

    def _resume(self, entry: Entry, address: str, now: float) -> None:
        entry.worker, entry.placement.decode_worker, entry.stage = address, address, "decode"
        self.growth.limit(entry, address)
        self.cluster.outbox.post(
            address,
            Resume(previous_worker=entry.transfer.previous_worker, join=join_of(entry, now)),
        )
        self.reasons.chosen(entry, "resume", "worker_lost", address, now)
        self.cluster.requests.move(entry, State.DECODING, now)

    # ---------------------------------------------------------------- compressed -> decoding

    def _join_all(self, now: float) -> None:
        for entry in self._ready_to_join(now):
            self._join(entry, now)

    def _ready_to_join(self, now: float) -> list[Entry]:
        """Compressed requests with a decode worker; one whose worker died gets another."""
        ready = list[Entry]()
        for entry in self.cluster.requests.in_state(State.COMPRESSED):
            if not entry.placement.decode_worker:  # the chosen worker died
                entry.placement.decode_worker = (
                    self.cluster.load_index.decode_in(entry.placement.final_arena)
                    or self.arenas.decode_worker_elsewhere(entry)
                    or ""
                )
                self.cluster.requests.touch(entry)
            if entry.placement.decode_worker:
                ready.append(entry)
        return ready

    def _join(self, entry: Entry, now: float) -> None:
        entry.transfer.source_worker, entry.worker, entry.stage = (
            entry.worker,
            entry.placement.decode_worker,
            "decode",
        )
        self.growth.limit(entry, entry.worker)
        join = join_of(entry, now, entry.transfer.previous_worker)
        self.cluster.outbox.post(entry.worker, join)
        self.cluster.requests.move(entry, State.DECODING, now)

    # ---------------------------------------------------------------- planned -> encoding

    def _encode_all(self, now: float) -> None:
        """Choose decode workers in the order of planning, without overtaking."""
        while (entry := self.cluster.requests.first(State.PLANNED)) is not None:
            address = self.arenas.decode_worker(entry)
            if address is None:
                return
            arena = self.cluster.load_index.arena_of(address)
            reason = "most_free" if arena == entry.placement.final_arena else "another_arena"
            self.reasons.chosen(entry, "decode", reason, address, now)
            if arena != entry.placement.final_arena:
                self.cluster.ledger.book(entry.id, self.arenas.lines(entry, final=arena))
                entry.placement.final_arena = arena
            entry.placement.decode_worker = address
            self._encode(entry, arena, now)

    def _encode(self, entry: Entry, arena: str, now: float) -> None:
        assert entry.transfer.handle is not None
        self.cluster.outbox.encode(
            entry.worker, arena or entry.transfer.handle.lease_ref.arena, entry.id
        )
        self.cluster.requests.move(entry, State.ENCODING, now)

    # ---------------------------------------------------------------- prefilled -> compressing

    def _compress_all(self, now: float) -> None:
        if self.cluster.load_index.compressor("") is None:
            return
        for entry in self.cluster.requests.in_state(State.PREFILLED):
            address = None if self._waits_for_compressor(entry, now) else self._compressor(entry)
            if address is not None and self._book_work(entry, address):
                self._compress(entry, address, now)

    def _compress(self, entry: Entry, address: str, now: float) -> None:
        assert entry.transfer.handle is not None
        reason = "at_its_worker" if address == entry.worker else "fewest_tokens"
        if entry.placement.encoder:
            reason = "has_its_layers"
        self.reasons.chosen(entry, "compress", reason, address, now)
        entry.transfer.source_worker, entry.worker, entry.stage = entry.worker, address, "compress"
        entry.placement.encoder = ""
        item = CompressItem(
            request=entry.id,
            handle=entry.transfer.handle,
            prefix=self._prefix(entry),
            floor=entry.request.floor,
            method=entry.request.method,
            segments=entry.request.segments,
        )
        self.cluster.outbox.compress(address, item)
        self.cluster.requests.move(entry, State.COMPRESSING, now)

    def _waits_for_compressor(self, entry: Entry, now: float) -> bool:
        """Whether no compressor can read the raw pages, and one that could has died just now.

        Later any compressor gets them. It refuses the request, which is then computed again.
        """
        arena = entry.placement.raw_arena
        if not is_apart(arena):
            return False
        absent = self.cluster.membership.absent_since("compress", arena)
        return absent is not None and now - absent < ENCODER_GRACE_S

    def _compressor(self, entry: Entry) -> str | None:
        """A compressor in the arena that the request booked; in any arena if that one has none."""
        if entry.placement.encoder:
            return entry.placement.encoder
        has_own = self.cluster.load_index.has_compressor(entry.placement.work_arena)
        return self._choose_compressor(
            entry.worker, entry.placement.work_arena if has_own else None
        )

    def _choose_compressor(self, holder: str, arena: str | None) -> str | None:
        return self.cluster.load_index.compressor(holder, arena)

    def _book_work(self, entry: Entry, address: str) -> bool:
        """Book what compressing at ``address`` takes; False, and nothing changes, if it cannot."""
        arena = self.cluster.load_index.arena_of(address)
        if arena != entry.placement.work_arena:
            lines = lines_before_encoding(
                entry.sizes, entry.placement.raw_arena, arena, entry.placement.final_arena
            )
            if not self.cluster.ledger.book(entry.id, lines):
                return False
            entry.placement.work_arena = arena
        return True

    def _prefix(self, entry: Entry) -> Prefix | None:
        """The prompt that the compressor may add to the prefix cache; None without a cache."""
        request = entry.request
        if not self.keeps_prefixes or request.is_scored:
            return None
        return Prefix(
            tokens=pack_tokens(request.known_keys),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            token_s=entry.transfer.token_s,
            session=request.session,
            prompt_tokens=request.known_prompt_tokens,
            cached_tokens=entry.transfer.hit_tokens,
        )

    # ---------------------------------------------------------------- waiting -> prefilling

    def _admit(self, now: float) -> HeldBy:
        """Start as many waiting requests as bytes, decode slots and prefill workers allow.

        While bytes or prefill workers are short, most messages change nothing about that, and
        nothing is tried again after them.
        """
        if self._short_at == self._moment():
            return "no_bytes"
        if self._busy_at == self.cluster.requests.queue.changes and not self._has_room(
            self._busy_for
        ):
            return "prefill_busy"
        self._busy_at = None
        blocked_reason = self._start_waiting(now)
        self._short_at = self._moment() if blocked_reason == "no_bytes" else None
        return blocked_reason

    def _moment(self) -> tuple[int, int]:
        return self.cluster.requests.queue.changes, self.cluster.load_index.openings

    def _start_waiting(self, now: float) -> HeldBy:
        queue = self.cluster.requests.queue
        while len(queue):
            if blocked_reason := self._blocked_by_workers():
                if blocked_reason == "prefill_busy" and self._join_first(now):
                    continue
                return blocked_reason
            wanted = min(self._unpromised_slots, ROUND_REQUESTS)
            started, blocked_reason = self._start_all(self._batch(wanted, now), now)
            if blocked_reason:
                return blocked_reason
            if started < wanted:
                return "no_bytes" if len(queue) else ""
        return ""

    def _blocked_by_workers(self) -> HeldBy:
        """The shortage of workers that keeps every request waiting; empty if there is none.

        A request starts only if a decode slot will be free for it. Otherwise finished prompts
        would pile up in raw pages, which take more bytes than any later form.
        """
        if not self._has_room(1):
            is_there = self.cluster.load_index.has_stage("prefill")
            return "prefill_busy" if is_there else "no_prefill_worker"
        return "" if self._unpromised_slots > 0 else "no_decode_slot"

    def _has_room(self, tokens: int) -> bool:
        """Whether any prefill worker takes a prompt of ``tokens`` tokens, bytes aside."""
        return self.cluster.load_index.prefill_has_room(tokens, self._prefill_limit_tokens)

    @property
    def _unpromised_slots(self) -> int:
        """Free decode slots, less one for each started request without a decode worker."""
        return self.cluster.load_index.open_slots - self.cluster.load_index.needs_slot

    @property
    def _prefill_limit_tokens(self) -> int:
        """Tokens that a prefill worker takes at a time; 0: one request, and only if it is idle."""
        return self.config.prefill_batch_tokens

    @property
    def is_layerwise(self) -> bool:
        """Whether layers of a prompt may be compressed while later layers are prefilled."""
        return True

    def _batch(self, wanted: int, now: float) -> list[Entry]:
        """Requests that the policy chooses. It sees all arenas as one; ``_place`` checks each."""
        requests, load_index = self.cluster.requests, self.cluster.load_index
        free = len(load_index.arenas) * self.cluster.ledger.capacity_bytes - load_index.used_bytes
        budget = Budget(free_bytes=free, max_requests=wanted)
        chosen = self.schedule.choose(requests.queue.at(now), budget)
        return [requests[one.id] for one in chosen]

    def _start_all(self, batch: list[Entry], now: float) -> tuple[int, HeldBy]:
        """Start requests up to the first that cannot start: their number, and the reason."""
        for started, entry in enumerate(batch):
            if blocked_reason := self._start_one(entry, now):
                return started, blocked_reason
        return len(batch), ""

    def _start_one(self, entry: Entry, now: float) -> HeldBy:
        self.arenas.forget()
        if entry.is_preempted:
            return "" if self._go_on(entry, now) else "no_bytes"
        if self._join_equal(entry, now):
            return ""
        encoders = self.cluster.image_encoders
        if entry.request.images and not encoders.workers():
            encoders.without[entry.id] = entry
            self.cluster.requests.queue.defer(entry.id)
            return ""
        choice, blocked_reason = self._place(entry, now)
        if choice is None:
            return blocked_reason
        wait = self._wait_for_blocks(entry, choice.worker, now)
        if wait is None:
            self._start(entry, choice, now)
        else:
            self._defer(entry, wait, now)
        return ""

    # ---------------------------------------------------------------- shared prompts

    def _join_first(self, now: float) -> bool:
        """Let the next request join one with an equal prompt, although prefill workers are busy."""
        if not self.shared.is_any_computed or self._unpromised_slots <= 0:
            return False
        self.arenas.forget()
        return any(
            not entry.is_preempted and self._join_equal(entry, now) for entry in self._batch(1, now)
        )

    def _join_equal(self, entry: Entry, now: float) -> bool:
        """Send a request to the worker that computes an equal prompt; False if none does."""
        equal, load_index = self.shared.computing(entry), self.cluster.load_index
        if equal is None or entry.whole is not None or not load_index.is_fresh(equal.worker):
            return False
        if self.arenas.final_arena(entry, equal.placement.raw_arena, now) is None:
            return False
        entry.placement.prompt = entry.placement.prompt or self.placer.prompt(entry.request)
        self._start(entry, Choice(equal.worker, "equal_prompt"), now, equal)
        return True

    def _wait_for_blocks(self, entry: Entry, worker: str, now: float) -> PromptWait | None:
        """The wait of a request for blocks of its prompt that another request computes."""
        load_index = self.cluster.load_index
        return self.shared.wait_for(
            entry,
            self.arenas.work_arena(self.arenas.raw_arena(load_index.arena_of(worker))),
            load_index.queue_tokens(worker),
            self.cluster.latency.prefill_token_s.at(now),
            now,
        )

    def _defer(self, entry: Entry, wait: PromptWait, now: float) -> None:
        self.shared.wait(entry, wait)
        self.cluster.requests.queue.defer(entry.id)
        self.reasons.waits(entry, wait, now)

    def _restore_all(self, now: float) -> None:
        """Put requests back into the queue whose blocks are published, or will not be in time."""
        for entry, outcome in self.shared.released(now):
            self.cluster.requests.queue.restore(entry.id)
            self.cluster.counters[f"shared_prompt:{outcome}"] += 1
        encoders = self.cluster.image_encoders
        if encoders.without and encoders.workers():
            for name in encoders.without:
                self.cluster.requests.queue.restore(name)
            encoders.without.clear()

    def _ended(self, entry: Entry) -> None:
        successor = self.shared.ended(entry)
        self._successors.pop(entry.id, None)
        if successor is not None:
            self.cluster.requests.touch(successor)
            if successor.request.images:
                self._successors[successor.id] = successor

    # ---------------------------------------------------------------- images

    def _encode_images_of_successors(self, now: float) -> None:
        """Encode the images of requests whose prompt another one computed until it ended."""
        for entry in list(self._successors.values()):
            if entry.state is not State.PREFILLING or self._encode_images(entry, now):
                del self._successors[entry.id]

    def _encode_images(self, entry: Entry, now: float) -> bool:
        """Have the images of a request encoded for its prefill worker; False if nobody can."""
        images, encoders = entry.request.images, self.cluster.image_encoders
        chosen = encoders.choose(images[0].digest, entry.placement.raw_arena)
        if chosen is None:
            return False
        address, reason = chosen
        entry.placement.image_encoder, entry.placement.is_encoding = address, True
        self.cluster.requests.touch(entry)
        encoders.started(entry, address)
        self.cluster.outbox.post(
            address,
            EncodeImages(
                request=entry.id,
                images=images,
                cache_salt=entry.request.cache_salt,
                tenant=entry.request.tenant,
                source=entry.request.reply_to,
                reader=entry.worker,
            ),
        )
        self.reasons.sent_images(entry, reason, address, now)
        return True

    # ---------------------------------------------------------------- start

    def _go_on(self, entry: Entry, now: float) -> bool:
        """Let a preempted request join a decode worker again; False if none has room."""
        address = self.cluster.load_index.decode_in(entry.placement.final_arena)
        lines = lines_after_encoding(
            entry.sizes, entry.placement.final_arena, entry.placement.final_arena
        )
        if address is None or not self.growth.may_start(entry, entry.placement.final_arena):
            return False
        if not self.cluster.ledger.book(entry.id, lines):
            return False
        entry.placement.decode_worker, entry.is_preempted = address, False
        self.growth.resumed(entry)
        self.cluster.requests.move(entry, State.COMPRESSED, now)
        self._join(entry, now)
        return True

    def _place(self, entry: Entry, now: float) -> tuple[Choice | None, HeldBy]:
        """The prefill worker that the placement policy chooses, or the reason why there is none."""
        if self.arenas.lacks_encoder(entry, now):
            return None, "no_compressor"
        entry.placement.prompt = entry.placement.prompt or self.placer.prompt(entry.request)
        snapshot = self.placer.snapshot(
            entry.placement.prompt,
            self._prefill_limit_tokens,
            lambda arena: (
                self.arenas.final_arena(entry, self.arenas.raw_arena(arena), now) is not None
                and self.arenas.can_encode(entry, arena)
            ),
            now,
        )
        if not len(snapshot):
            if self.shared.computing(entry) is None:  # else it may join that request later
                self._busy_at = self.cluster.requests.queue.changes
                self._busy_for = snapshot.needed
            return None, "prefill_busy"
        if not self.arenas.could_fit(entry.sizes, snapshot.arena(snapshot[0])):
            return None, "no_bytes"
        choice = self.placer.choose(snapshot)
        if choice is not None:
            return choice, ""
        waits_by_choice = any(snapshot.takes(worker) for worker in snapshot)
        return None, "prefill_busy" if waits_by_choice else "no_bytes"

    def _start(self, entry: Entry, choice: Choice, now: float, equal: Entry | None = None) -> None:
        """Book a request and send it to a prefill worker.

        ``equal``: the request there that computes its prompt.
        """
        address = choice.worker
        arena, queue = self.cluster.load_index.arena_of(address), self.cluster.requests.queue
        raw_arena = equal.placement.raw_arena if equal else self.arenas.raw_arena(arena)
        reason, place = self._reason(entry, now), (len(queue), queue.older(entry.id))
        seen = self.reasons.looked_at("prefill")
        entry.placement.raw_arena, entry.worker, entry.stage = raw_arena, address, "prefill"
        entry.placement.work_arena = self.arenas.work_arena(raw_arena)
        entry.placement.final_arena = self.arenas.final_arena(entry, raw_arena, now) or ""
        if self.arenas.goes_in_parts(entry, arena, now):
            entry.placement.encoder = self.cluster.load_index.compressor(address, arena) or ""
        else:
            entry.sizes = entry.whole or entry.sizes
        self.cluster.ledger.book(
            entry.id, self.arenas.lines(entry, final=entry.placement.final_arena)
        )
        self.growth.started(entry)
        if entry.placement.prompt is not None:
            entry.placement.cached_tokens = self.placer.sent(entry.placement.prompt, arena)
        if equal is not None:
            entry.placement.cached_tokens = entry.placement.shared_tokens = entry.prompt_tokens
        elsewhere = "" if raw_arena == arena else raw_arena
        self.cluster.outbox.prefill(address, entry.request, entry.placement.encoder, elsewhere)
        self.cluster.requests.move(entry, State.PREFILLING, now)
        if entry.request.images and equal is None:
            self._encode_images(entry, now)
        self.reasons.started(entry, reason, choice.reason, place, seen)
        entry.placement.ahead_tokens = self._ahead_tokens(entry)
        self.shared.started(entry, entry.placement.work_arena, equal)
        self.cluster.latency.record_start(len(queue), now)
        self.cluster.drain.note(now)
        self.cluster.counters["admitted"] += 1

    def _ahead_tokens(self, entry: Entry) -> int:
        """Prompt tokens that are prefilled before its first output token, its own included."""
        load_index, tokens = self.cluster.load_index, entry.uncached_tokens
        return load_index.queue_tokens(entry.worker) + max(0, tokens - load_index.long_tokens)

    @staticmethod
    def _reason(entry: Entry, now: float) -> str:
        """Why the request was next."""
        if entry.request.attempt or entry.was_evicted:
            return "began_before"
        return "lost_patience" if entry.slo.due < now else "turn"


def join_of(entry: Entry, now: float, previous_worker: str = "") -> Join:
    """The message that lets a decode worker continue a request whose pages are complete.

    ``previous_worker``: the living one that was preempted of it, if any.
    """
    assert entry.transfer.handle is not None
    assert entry.transfer.report is not None
    return Join(
        request=entry.request,
        output_tokens=entry.transfer.output_tokens,
        handle=entry.transfer.handle,
        report=entry.transfer.report,
        token_s=entry.transfer.token_s,
        age_s=max(0.0, now - entry.transfer.first_token_at),
        memory=entry.transfer.plugin_memory,
        logprobs=entry.transfer.logprobs,
        previous_worker=previous_worker,
    )
