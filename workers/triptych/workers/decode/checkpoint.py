# numpy's comparisons lack types.
# pyright: reportUnknownVariableType=false
"""The checkpoint of a decode worker in shared memory, from which another worker takes over.

The pool holds the keys and values of a request and outlives its workers. The checkpoint holds the
rest of a decode worker's state: page tables, token counts, output tokens, and the retirement that
is under way. Attention reads these same tables, so nothing is written twice.

A worker can be killed between any two stores. One store of a small integer commits its work:
``num_output_tokens`` commits a step, ``phase`` a part of a retirement or a lowering. Everything
before that store can be repeated with the same result.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import MessageError, StaleHandle
from triptych.core.handles import LeaseId
from triptych.core.messages import TokenLogprob
from triptych.core.pages import PagePlan
from triptych.core.table_layouts import TableLayouts
from triptych.kernels import Retirement
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.handle_codec import Run, pool_pages, small_pages
from triptych.workers.kv.method_tables import MethodTables, WorkerTables

Ids = NDArray[np.int32]

VERSION = 11
ID_BYTES = 128
"""Longest request id in a checkpoint; a request with a longer id restarts if its worker dies."""
MAX_PLUGIN_MEMORY = 16
"""Numbers that all step plug-ins together can store for one request."""
MAX_TOP_LOGPROBS = 20
"""Most alternatives of a token with log probabilities, as many as a request can ask for."""
LOGPROB_TOKENS = 64
"""The newest output tokens that have log probabilities here: those that can be lost on the way. A
worker whose event loop gets no processor time samples some before the first one is sent."""
_ALIGN = 64

Fields = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each array of a checkpoint, by name."""


FINISHED = -1
"""In place of a lease: the output of the request is complete, and its lease is released."""
PREEMPTED = -2
"""In place of a lease: the request is preempted, and the pool knows which lease it has."""


def checkpoint_bytes(plan: PagePlan, slots: int, context_tokens: int) -> int:
    """Size of a checkpoint in bytes."""
    return sum(_size(*one) for one in _fields(plan, slots, context_tokens).values())


@dataclass(eq=False)
class Retirements:
    """The retirement under way in each slot: the move of recent pages of each head row."""

    phase: Ids
    """Phase of the retirement, by slot; 0: none is under way."""
    recent_pages: Ids
    """The table of recent pages before the retirement."""
    plan: Ids
    """The numbers of a ``Retirement``, [layers, slots, kv_heads, ...]."""
    retired: Ids
    """Tokens that are not in recent pages, by slot."""
    retired_after: Ids
    """The same after the retirement under way."""


LOWERED = 4
"""Phase of a slot whose valid class table is the first one of ``ValidTables``, and not the one that
attention reads; with ``LOWERED + 1`` it is the second one."""


@dataclass(eq=False)
class ValidTables:
    """Two class tables of each slot, for a lowering (``Lowering``) or a removal of expired pages
    (``PageExpiry``) that is under way. The phase tells which one is valid."""

    valid_entries: Ids
    """Entries of the class tables, [2, layers, slots, kv_heads, entries of a row]."""
    valid_tokens: Ids
    """Their token counts, [2, tables, layers, slots, kv_heads]."""
    valid_lowered: Ids
    """``Checkpoint.lowered``, [2, slots]."""


@dataclass(eq=False)
class Checkpoint:
    """The checkpoint of one decode worker. Arrays are indexed by slot."""

    plan: PagePlan
    memory: NDArray[np.uint8]
    slots: int
    context_tokens: int
    tables: WorkerTables = field(init=False)

    def __post_init__(self) -> None:
        fields = _fields(self.plan, self.slots, self.context_tokens)
        arrays = _carve(self.memory, fields)
        self._stored_fingerprint: NDArray[np.bytes_] = arrays["fingerprint"]
        self._fingerprint = sha256(repr((VERSION, fields, self.plan)).encode()).hexdigest().encode()
        self.request: NDArray[np.bytes_] = arrays["request"]
        self.lease: NDArray[np.int64] = arrays["lease"]
        self.method: Ids = arrays["method"]
        """Index of the compression method of a slot's request, of those that the server offers."""
        self.num_prior_tokens: Ids = arrays["num_prior_tokens"]
        """Tokens before the first output token counted here: the prompt and any earlier output."""
        self.num_output_tokens: Ids = arrays["num_output_tokens"]
        """Output tokens since then."""
        self.token_ids: Ids = arrays["token_ids"]
        self.plugin_memory: NDArray[np.float64] = arrays["plugin_memory"]
        """State of the step plug-ins after an even and after an odd number of tokens. The state for
        the next token does not overwrite the present one before ``num_output_tokens`` has grown."""
        self.ended_by: Ids = arrays["ended_by"]
        """The plug-in that ended the output, indexed likewise; 0: none."""
        self.logprob_ids: Ids = arrays["logprob_ids"]
        """Ring of the newest output tokens, each followed by its alternatives."""
        self.logprobs: NDArray[np.float64] = arrays["logprobs"]
        """Their log probabilities."""
        self.logprob_counts: Ids = arrays["logprob_counts"]
        """Log probabilities of each ring entry; 0: the request asked for none."""
        self.scored: NDArray[np.int64] = arrays["scored"]
        """Layers whose scores are added, counted over all positions."""
        self.retirements = Retirements(*(arrays[name] for name in Retirements.__dataclass_fields__))
        self.lowered: Ids = arrays["lowered"]
        """High tokens of all head rows that became low because memory was short, by slot."""
        self.valid = ValidTables(*(arrays[name] for name in ValidTables.__dataclass_fields__))
        layouts = TableLayouts.of(self.plan)
        self.tables = WorkerTables(
            self.plan,
            [_entries_and_tokens(arrays, "recent", at) for at in range(len(layouts.recent))],
            arrays["class_entries"],
            arrays["class_tokens"],
            [_entries_and_tokens(arrays, "fixed", at) for at in range(len(layouts.fixed))],
        )

    @property
    def sections(self) -> list[SectionTable]:
        """All tables that attention reads, of all methods."""
        return self.tables.sections

    def tables_for(self, method: str) -> MethodTables:
        """The tables of a method, by its name; empty: of the default one.

        Raises: UnknownMethod
        """
        name = self.plan.of_method(method).policy.name
        return self.tables.methods[list(self.plan.by_method).index(name)]

    def tables_of(self, slot: int) -> MethodTables:
        """The tables of a slot's method."""
        return self.tables.methods[int(self.method[slot])]

    @classmethod
    def create(
        cls, plan: PagePlan, memory: NDArray[np.uint8] | None, slots: int, context_tokens: int
    ) -> Self:
        """Create a checkpoint in zeroed memory; None: in memory of this process alone."""
        if memory is None:
            memory = np.zeros(checkpoint_bytes(plan, slots, context_tokens), np.uint8)
        checkpoint = cls(plan, memory, slots, context_tokens)
        checkpoint._stored_fingerprint[0] = checkpoint._fingerprint
        return checkpoint

    def open_other(self, memory: NDArray[np.uint8]) -> Self:
        """Open the checkpoint of another worker.

        Raises: StaleHandle if its version, its settings or its page plan differ
        """
        if memory.size < self.memory.size:
            raise StaleHandle(
                0, f"a checkpoint of {memory.size} bytes: expected {self.memory.size}"
            )
        other = type(self)(self.plan, memory, self.slots, self.context_tokens)
        if other._stored_fingerprint[0] != self._fingerprint:
            raise StaleHandle(0, "a checkpoint of other settings, or of another version")
        return other

    # ---------------------------------------------------------------- writing

    def assign(self, slot: int, tables: MethodTables) -> None:
        """Give a slot to a request of the method with these tables, and empty all of its tables."""
        self.method[slot] = self.tables.methods.index(tables)
        for table in self.sections:
            table.clear(slot)

    def join(
        self,
        slot: int,
        request: str,
        lease: int,
        output_tokens: Sequence[int],
        stored_tokens: int,
        memory: Sequence[float] = (),
        logprobs: Sequence[TokenLogprob] = (),
        lowered_tokens: int = 0,
    ) -> None:
        """Record a request whose tables are filled.

        ``stored_tokens`` counts the whole sequence without the last output token. ``memory``:
        state of the step plug-ins; empty for a new request. ``logprobs``: those of the newest
        output tokens. ``lowered_tokens``: as in ``CompressionReport``.
        """
        self.num_output_tokens[slot] = len(output_tokens)
        self.plugin_memory[slot] = 0.0
        self.plugin_memory[slot, len(output_tokens) % 2, : len(memory)] = memory
        self.ended_by[slot] = self.logprob_counts[slot] = 0
        for index, one in enumerate(logprobs, len(output_tokens) - len(logprobs)):
            self._write_logprob(slot, index, one)
        self.token_ids[slot, : len(output_tokens)] = output_tokens
        self.num_prior_tokens[slot] = stored_tokens + 1 - len(output_tokens)
        self.scored[slot] = self.retirements.phase[slot] = 0
        self.lowered[slot] = lowered_tokens * self.plan.geometry.head_rows
        recent = self.tables_of(slot).tables[0]
        self.retirements.retired[slot] = stored_tokens - recent.length(slot)
        self.enter(slot, request, lease)

    def enter(self, slot: int, request: str, lease: int) -> None:
        """Set the request id of a slot whose other fields are written: this commits the slot."""
        self.lease[slot] = lease
        name = request.encode()
        self.request[slot] = name if len(name) <= ID_BYTES else b""

    def forget(self, request: str) -> None:
        """Erase the entry of a request that was here before and left."""
        self.request[self.request == request.encode()] = b""

    def record_plugins(self, slot: int, memory: NDArray[np.float64], ended_by: int) -> None:
        """Record the plug-in state that belongs to the next output token."""
        turn = (int(self.num_output_tokens[slot]) + 1) % 2
        self.plugin_memory[slot, turn], self.ended_by[slot, turn] = memory, ended_by

    def record_logprob(self, slot: int, one: TokenLogprob) -> None:
        """Record the log probabilities of the next output token, if there is room for all."""
        self._write_logprob(slot, int(self.num_output_tokens[slot]), one)

    def _write_logprob(self, slot: int, index: int, one: TokenLogprob) -> None:
        place, count = index % LOGPROB_TOKENS, 1 + len(one.top)
        if count <= 1 + MAX_TOP_LOGPROBS:
            self.logprob_ids[slot, place, :count] = [one.token, *(token for token, _ in one.top)]
            self.logprobs[slot, place, :count] = [one.logprob, *(value for _, value in one.top)]
        self.logprob_counts[slot, place] = count

    def append_token(self, slot: int, token: int) -> None:
        """Append an output token; this commits the step that sampled it."""
        count = int(self.num_output_tokens[slot])
        self.token_ids[slot, count] = token
        self.num_output_tokens[slot] = count + 1

    def replace_classes(self, slot: int, entries: Ids, tokens: Ids) -> None:
        """Replace the class table of a slot.

        ``entries``, ``tokens``: as ``PageTable.of_slot`` returns them. The phase commits it: before
        that store nothing has changed, and after it a takeover worker completes it (``resume``).
        """
        self._keep_valid(slot, entries, tokens)
        self.restore_classes(slot)

    def keep_classes(self, slot: int) -> None:
        """Keep the class table of a slot as the valid one, before it changes."""
        self._keep_valid(slot, *self.tables_of(slot).classes.of_slot(slot))

    def _keep_valid(self, slot: int, entries: Ids, tokens: Ids) -> None:
        valid = self.valid
        valid.valid_entries[0, :, slot] = entries
        valid.valid_tokens[0, : len(tokens), :, slot] = tokens
        valid.valid_lowered[0, slot] = self.lowered[slot]
        self.retirements.phase[slot] = LOWERED

    def restore_classes(self, slot: int) -> None:
        """Put the valid class table of a slot in place; it can be repeated."""
        valid, table = self.valid, self.tables_of(slot).classes
        at = int(self.retirements.phase[slot]) - LOWERED
        table.entries[:, slot] = valid.valid_entries[at, :, slot]
        table.tokens[:, :, slot] = valid.valid_tokens[at, : len(table.tokens), :, slot]
        self.lowered[slot] = valid.valid_lowered[at, slot]
        self.retirements.phase[slot] = 0

    def mark_finished(self, slot: int) -> None:
        """Record that an output is complete and its pages are no longer needed.

        The output tokens stay until the slot is used again, in case the last messages were lost.
        """
        self.lease[slot] = FINISHED

    def mark_preempted(self, slot: int) -> None:
        """Record that the pages of a request are being handed off in a lease for its next worker.

        The entry stays, as with ``mark_finished``.
        """
        self.lease[slot] = PREEMPTED

    def leave(self, slot: int) -> None:
        """Erase the request of a slot, unless its output is complete."""
        if not self.is_finished(slot):
            self.request[slot] = b""

    # ---------------------------------------------------------------- reading

    def lowered_tokens(self, slot: int) -> int:
        """High tokens of a head row that became low because memory was short, rounded up."""
        return -(-int(self.lowered[slot]) // self.plan.geometry.head_rows)

    def is_finished(self, slot: int) -> bool:
        """Whether the output of a slot's request is complete."""
        return int(self.lease[slot]) == FINISHED

    def lease_of(self, slot: int) -> LeaseId | None:
        """The lease of a slot's pages; None: the pool knows the lease by the request id."""
        lease = int(self.lease[slot])
        return None if lease == PREEMPTED else LeaseId(lease)

    def output_tokens(self, slot: int) -> list[int]:
        """Output tokens so far."""
        return self.token_ids[slot, : self.num_output_tokens[slot]].tolist()

    def logprob_of(self, slot: int, index: int) -> TokenLogprob | None:
        """Log probabilities of an output token; None: they are not in the ring.

        A step that was cut short can have overwritten the oldest ring entry, so it is never used.
        """
        place = index % LOGPROB_TOKENS
        count = int(self.logprob_counts[slot, place])
        if (
            not 0 < count <= 1 + MAX_TOP_LOGPROBS
            or not 0 < int(self.num_output_tokens[slot]) - index < LOGPROB_TOKENS
        ):
            return None
        ids, values = self.logprob_ids[slot, place].tolist(), self.logprobs[slot, place].tolist()
        top = tuple(zip(ids[1:count], values[1:count], strict=True))
        return TokenLogprob(token=ids[0], logprob=values[0], top=top)

    def newest_logprobs(self, slot: int) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the newest output tokens in the ring, oldest first."""
        newest = deque[TokenLogprob]()
        index = int(self.num_output_tokens[slot])
        while index and (one := self.logprob_of(slot, index - 1)) is not None:
            newest.appendleft(one)
            index -= 1
        return tuple(newest)

    def plugin_memory_of(self, slot: int) -> NDArray[np.float64]:
        """State of the step plug-ins after the newest output token."""
        return self.plugin_memory[slot, self.num_output_tokens[slot] % 2]

    def ending_plugin(self, slot: int) -> int:
        """The plug-in that ended the output; 0: none."""
        return int(self.ended_by[slot, self.num_output_tokens[slot] % 2])

    def position(self, slot: int) -> int:
        """Position of the newest output token, the input of the next step."""
        return int(self.num_prior_tokens[slot] + self.num_output_tokens[slot]) - 1

    def find(self, request: str) -> int | None:
        """The slot of a request; None: the checkpoint has no entry, so no step was done for it.

        Raises: MessageError if the entry is inconsistent
        """
        name = request.encode()
        found = np.flatnonzero(self.request == name)
        if not 1 <= len(name) <= ID_BYTES or len(found) > 1:
            raise MessageError(f"the checkpoint has no unique entry of {request!r}")
        if len(found) == 0:
            return None
        slot = int(found[0])
        moving, count = self.retirements, int(self.num_output_tokens[slot])
        last = self.context_tokens
        sound = (
            1 <= count <= last
            and 0 <= int(self.num_prior_tokens[slot]) <= last
            and 0 <= int(moving.phase[slot]) <= LOWERED + 1
            and 0 <= int(self.method[slot]) < len(self.tables.methods)
            and 0 <= self.recent_tokens(slot) <= self.position(slot)
            and (self.is_finished(slot) or self._fits(slot))
        )
        if not sound:
            raise MessageError(f"the checkpoint entry of {request!r} is inconsistent")
        return slot

    def _fits(self, slot: int) -> bool:
        """Whether the tables of a slot have room for its tokens. Those of a slot with a finished
        output may have been emptied for the next request."""
        return all(
            counts.min() >= 0 and table.layout.pages(int(counts.max())) <= table.width
            for table, counts in zip(self.tables_of(slot).sections, self.counts(slot), strict=True)
        )

    def recent_tokens(self, slot: int) -> int:
        """Tokens in the recent pages of each row, after the retirement under way."""
        moving = self.retirements
        retired = moving.retired_after if self._is_retiring(slot) else moving.retired
        return self.position(slot) - int(retired[slot])

    def counts(self, slot: int) -> list[Ids]:
        """Tokens of each row by section, [layers, kv_heads], after the retirement or the lowering
        under way."""
        own = self.tables_of(slot)
        first, *others = own.sections
        recent = np.full_like(first.tokens[:, slot], self.recent_tokens(slot))
        counts = [recent, *(table.tokens[:, slot] for table in others)]
        classes = len(own.classes.layouts)
        if self._is_retiring(slot):
            then = Retirement(self.retirements.plan[:, slot]).counts
            counts[1 : 1 + classes] = (then[..., i] for i in range(classes))
        elif (valid := self._valid_table(slot)) is not None:
            counts[1 : 1 + classes] = self.valid.valid_tokens[valid, :classes, :, slot]
        return counts

    def pages(self, slot: int) -> Ids:
        """All pages of the pool in use by a slot's request, those of the retirement or lowering
        under way and of a step that was cut short included; fixed pages last."""
        own = self.tables_of(slot)
        tables = [table.pages[:, slot] for table in own.sections]
        held = self.counts(slot)
        if self._is_retiring(slot):
            tables[0] = self.retirements.recent_pages[:, slot]
            held[0] = held[0] + np.int32(own.plan.retire_tokens)
        elif (valid := self._valid_table(slot)) is not None:
            entries = self.valid.valid_entries[valid, :, slot]
            both = entries, entries[..., ::-1]
            tables[1 : len(own.tables)] = both[: len(own.classes.layouts)]
        used = [
            table[_first(table, -(-tokens // np.int32(section.layout.tokens)))]
            for table, tokens, section in zip(tables, held, own.sections, strict=True)
        ]
        begun = self.mid_step_pages(slot)  # one may have been emptied by the retirement
        used[0] = np.concatenate([begun[~np.isin(begun, used[0])], used[0]])
        used[0] = pool_pages(used[0], own.plan.recent.parts)
        return np.concatenate(used, dtype=np.int32)

    def unused_pages(self, slot: int) -> Ids:
        """Recent pages in no row, of the pages of the pool that have others of a slot's rows.

        Those of a step that was cut short come first, since rows take them in this order.
        """
        own, begun = self.tables_of(slot), self.mid_step_pages(slot)
        parts = own.plan.recent.parts
        _, used = own.tables[0].read(slot)
        used = np.concatenate([begun, used])
        every = small_pages(pool_pages(used, parts), parts)
        return np.concatenate([begun, np.setdiff1d(every, used)])

    def fixed_run(self, slot: int) -> Run | None:
        """Layout, tokens and pages of the cached prefix that a slot's request shares, if any."""
        fixed = self.tables_of(slot).fixed
        run = None if fixed is None else fixed.run(slot)
        return run if run and run[2].size else None

    def _is_retiring(self, slot: int) -> bool:
        return 0 < int(self.retirements.phase[slot]) < LOWERED

    def _valid_table(self, slot: int) -> int | None:
        """Index of the valid class table of a slot; None: the one that attention reads is valid."""
        phase = int(self.retirements.phase[slot])
        return phase - LOWERED if phase >= LOWERED else None

    def is_mid_step(self, slot: int) -> bool:
        """Whether the next step of a slot has added scores already and was cut short."""
        return int(self.scored[slot]) > self.position(slot) * self.plan.geometry.layers

    def mid_step_pages(self, slot: int) -> Ids:
        """Recent pages, in row order, that hold only the token of a step that was cut short.

        The repeated step skips the layers whose scores are added, so it needs their keys and
        values. Empty if the token is not the first of its page.
        """
        recent = self.tables_of(slot).tables[0]
        column, row = divmod(self.recent_tokens(slot), recent.layout.tokens)
        if row or not self.is_mid_step(slot) or column >= recent.width:
            return np.empty(0, np.int32)
        return recent.pages[:, slot, :, column].ravel()

    def copy_slot(self, other: Self, at: int, slot: int) -> None:
        """Copy the tables and output of another checkpoint's slot, but not its lease."""
        given: MethodTables = other.tables_of(at)
        own = self.tables.methods[int(other.method[at])]
        self.assign(slot, own)
        for mine, theirs in zip(own.sections, given.sections, strict=True):
            mine.pages[:, slot], mine.tokens[:, slot] = theirs.pages[:, at], theirs.tokens[:, at]
        self.num_prior_tokens[slot], self.num_output_tokens[slot] = (
            other.num_prior_tokens[at],
            other.num_output_tokens[at],
        )
        self.token_ids[slot], self.scored[slot] = other.token_ids[at], other.scored[at]
        self.plugin_memory[slot], self.ended_by[slot] = other.plugin_memory[at], other.ended_by[at]
        self.logprob_ids[slot], self.logprobs[slot] = other.logprob_ids[at], other.logprobs[at]
        self.logprob_counts[slot] = other.logprob_counts[at]
        self.lowered[slot] = other.lowered[at]
        self.retirements.phase[slot] = 0
        self.retirements.retired[slot] = other.retirements.retired[at]


def _first(table: Ids, counts: Ids) -> NDArray[np.bool_]:
    """Mask of the first ``counts`` entries of each row."""
    return np.asarray(np.arange(table.shape[-1]) < counts[..., None], np.bool_)


def _entries_and_tokens(arrays: Mapping[str, Any], kind: str, index: int) -> tuple[Ids, Ids]:
    """Page ids and token counts of one table of recent or of fixed pages."""
    return arrays[f"{kind}_entries_{index}"], arrays[f"{kind}_tokens_{index}"]


def _fields(plan: PagePlan, slots: int, context_tokens: int) -> Fields:
    geometry, plans, layouts = plan.geometry, plan.by_method.values(), TableLayouts.of(plan)
    rows = (geometry.layers, slots, geometry.kv_heads)
    compressing = [one for one in plans if one.compresses]
    width = max((one.most_pages(context_tokens) + 1 for one in compressing), default=0)
    retire_tokens = max(one.retire_tokens for one in plans)
    moving = (*rows, Retirement.width(retire_tokens) if compressing else 0)
    most_classes = max(len(one.classes) for one in plans)
    is_replaced = most_classes > 1 or any(one.has_windows for one in plans)
    each = (slots,)
    recent = [
        max(one.recent_pages(context_tokens) + 1 for one in plans if one.recent == layout)
        for layout in layouts.recent
    ]
    retiring = max((one.recent_pages(context_tokens) + 1 for one in compressing), default=recent[0])
    fields: dict[str, tuple[str, tuple[int, ...]]] = {
        "fingerprint": ("S64", (1,)),
        "request": (f"S{ID_BYTES}", each),
        "lease": ("<i8", each),
        "method": ("<i4", each),
        "num_prior_tokens": ("<i4", each),
        "num_output_tokens": ("<i4", each),
        "token_ids": ("<i4", (slots, context_tokens)),
        "plugin_memory": ("<f8", (slots, 2, MAX_PLUGIN_MEMORY)),
        "ended_by": ("<i4", (slots, 2)),
        "logprob_ids": ("<i4", (slots, LOGPROB_TOKENS, 1 + MAX_TOP_LOGPROBS)),
        "logprobs": ("<f8", (slots, LOGPROB_TOKENS, 1 + MAX_TOP_LOGPROBS)),
        "logprob_counts": ("<i4", (slots, LOGPROB_TOKENS)),
        "scored": ("<i8", each),
        "class_entries": ("<i4", (*rows, width)),
        "class_tokens": ("<i4", (layouts.class_tables, *rows)),
        "phase": ("<i4", each),
        "recent_pages": ("<i4", (*rows, retiring)),
        "plan": ("<i4", moving),
        "retired": ("<i4", each),
        "retired_after": ("<i4", each),
        "lowered": ("<i4", each),
        "valid_entries": ("<i4", (2, *rows, width if is_replaced else 0)),
        "valid_tokens": ("<i4", (2, most_classes, *rows)),
        "valid_lowered": ("<i4", (2, slots)),
    }
    for index, entries in enumerate(recent):
        fields[f"recent_entries_{index}"] = ("<i4", (*rows, entries))
        fields[f"recent_tokens_{index}"] = ("<i4", (1, *rows))
    for index, layout in enumerate(layouts.fixed):
        fields[f"fixed_entries_{index}"] = ("<i4", (*rows, layout.pages(context_tokens)))
        fields[f"fixed_tokens_{index}"] = ("<i4", rows)
    return fields


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, rounded up to the alignment of the next one."""
    count = 1
    for side in shape:
        count *= side
    return -(-count * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN


def _carve(memory: NDArray[np.uint8], fields: Fields) -> dict[str, Any]:
    """Views of the arrays, one after another."""
    arrays, start = dict[str, Any](), 0
    for name, (dtype, shape) in fields.items():
        arrays[name] = np.ndarray(shape, dtype, memory.data, start)
        start += _size(dtype, shape)
    return arrays
