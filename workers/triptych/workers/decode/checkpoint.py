# numpy's comparisons lack types.
# pyright: reportUnknownVariableType=false
"""What a decode worker writes down as it goes, so that another one can go on in its place.

The keys and values of a request lie in the pool, which outlives its workers. What else a decode
worker knows lies here: page tables, token counts, the tokens of the answer, and the retirement
that is under way. The tables *are* the ones that attention reads, so nothing is written twice.

A worker may be killed between any two stores. What it did is valid up to one store of a small
integer: ``said`` for a step, ``phase`` for a retirement. Everything before that can be done
again with the same result.
"""

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
from triptych.kernels import Retirement
from triptych.workers.kv.block_table import PageTable, SectionTable

Ids = NDArray[np.int32]

VERSION = 6
ID_BYTES = 128
"""Longest request id that is written down; one that is longer begins anew if its worker dies."""
MAX_PLUGIN_MEMORY = 16
"""Numbers that the plug-ins of the decode step may remember of an answer, all together."""
MAX_TOP_LOGPROBS = 20
"""Alternatives of a token whose log probabilities are written down, as many as one may ask for."""
LOGPROB_TOKENS = 8
"""The newest tokens of an answer of which they are: those that may not have got through."""
_ALIGN = 64

Fields = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each array of a checkpoint, by name."""


FINISHED = -1
"""Stands for the lease of a request that has none any more, as its answer is complete."""
PREEMPTED = -2
"""Stands for whatever lease the request has in the pool: the one before, or that on offer."""


def checkpoint_bytes(plan: PagePlan, slots: int, context_tokens: int) -> int:
    """Memory that a checkpoint takes."""
    return sum(_size(*one) for one in _fields(plan, slots, context_tokens).values())


@dataclass(eq=False)
class Retirements:
    """What is to become of a raw page of each head row, for each slot where that is under way."""

    phase: Ids
    """How far it has come, by slot; 0: nothing is under way."""
    raw_pages: Ids
    """The table of raw pages as it was before."""
    plan: Ids
    """The numbers of a ``Retirement``, [layers, slots, kv_heads, ...]."""
    retired: Ids
    """Tokens that have left raw pages so far, by slot."""
    retired_after: Ids
    """The same when the retirement is over."""


@dataclass(eq=False)
class Checkpoint:
    """One worker's checkpoint. Arrays are indexed by slot."""

    plan: PagePlan
    memory: NDArray[np.uint8]
    slots: int
    context_tokens: int
    tables: list[SectionTable] = field(init=False)
    """Raw pages, then those of the policy's classes: the tables of ``raw_cells`` and
    ``class_cells``."""
    fixed: SectionTable | None = field(init=False)
    """Pages that nobody writes: the cached beginnings of prompts. None if they are never shared."""

    def __post_init__(self) -> None:
        fields = _fields(self.plan, self.slots, self.context_tokens)
        arrays = _carve(self.memory, fields)
        self._stored_fingerprint: NDArray[np.bytes_] = arrays["fingerprint"]
        self._fingerprint = sha256(repr((VERSION, fields, self.plan)).encode()).hexdigest().encode()
        self.request: NDArray[np.bytes_] = arrays["request"]
        self.lease: NDArray[np.int64] = arrays["lease"]
        self.num_prior_tokens: Ids = arrays["num_prior_tokens"]
        """Tokens before the first one that this worker read: prompt, and what was said before."""
        self.num_output_tokens: Ids = arrays["num_output_tokens"]
        """Tokens of the answer since then."""
        self.token_ids: Ids = arrays["token_ids"]
        self.plugin_memory: NDArray[np.float64] = arrays["plugin_memory"]
        """What plug-ins remember after an even number of tokens, and after an odd one: what is
        written for the next token leaves that of this one as it is, until ``said`` has grown."""
        self.ended_by: Ids = arrays["ended_by"]
        """The plug-in that ended the answer, likewise; 0: none."""
        self.logprob_ids: Ids = arrays["logprob_ids"]
        """The newest tokens in a ring, each before its alternatives."""
        self.logprobs: NDArray[np.float64] = arrays["logprobs"]
        """Their log probabilities."""
        self.logprob_counts: Ids = arrays["logprob_counts"]
        """How many there are of each; 0: nobody asked."""
        self.scored: NDArray[np.int64] = arrays["scored"]
        """Layers whose scores are added, counted over all positions."""
        self.retirements = Retirements(*(arrays[name] for name in Retirements.__dataclass_fields__))
        self.raw_table = PageTable([self.plan.raw], arrays["raw_entries"], arrays["raw_tokens"])
        self.class_table = PageTable(
            self.plan.classes, arrays["class_entries"], arrays["class_tokens"]
        )
        self.tables = [*self.raw_table.tables, *self.class_table.tables]
        self.fixed = (
            SectionTable(self.plan.high, arrays["fixed"], arrays["fixed_tokens"])
            if self.plan.shares
            else None
        )

    @property
    def sections(self) -> list[SectionTable]:
        """All that attention reads: the tables, and fixed pages last."""
        return self.tables if self.fixed is None else [*self.tables, self.fixed]

    @classmethod
    def create(
        cls, plan: PagePlan, memory: NDArray[np.uint8] | None, slots: int, context_tokens: int
    ) -> Self:
        """Start a checkpoint in memory full of zeros; None: in memory of this process alone."""
        if memory is None:
            memory = np.zeros(checkpoint_bytes(plan, slots, context_tokens), np.uint8)
        checkpoint = cls(plan, memory, slots, context_tokens)
        checkpoint._stored_fingerprint[0] = checkpoint._fingerprint
        return checkpoint

    def open_other(self, memory: NDArray[np.uint8]) -> Self:
        """Another worker's checkpoint.

        Raises: StaleHandle if it was written by other rules or for other pages
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

    def join(
        self,
        slot: int,
        request: str,
        lease: int,
        output_tokens: Sequence[int],
        stored_tokens: int,
        memory: Sequence[float] = (),
    ) -> None:
        """Write a request down, whose tables are filled.

        ``stored_tokens`` counts the whole sequence, all but the last of the words. ``memory``:
        what plug-ins remember; none: nothing yet.
        """
        self.num_output_tokens[slot] = len(output_tokens)
        self.plugin_memory[slot] = 0.0
        self.plugin_memory[slot, len(output_tokens) % 2, : len(memory)] = memory
        self.ended_by[slot] = self.logprob_counts[slot] = 0
        self.token_ids[slot, : len(output_tokens)] = output_tokens
        self.num_prior_tokens[slot] = stored_tokens + 1 - len(output_tokens)
        self.scored[slot] = self.retirements.phase[slot] = 0
        self.retirements.retired[slot] = stored_tokens - int(self.tables[0].tokens[0, slot, 0])
        self.enter(slot, request, lease)

    def enter(self, slot: int, request: str, lease: int) -> None:
        """Put the name on a slot in which everything is written: from now on it counts."""
        self.lease[slot] = lease
        name = request.encode()
        self.request[slot] = name if len(name) <= ID_BYTES else b""

    def forget(self, request: str) -> None:
        """Strike out what is still written of a request that was here before and left."""
        self.request[self.request == request.encode()] = b""

    def record_plugins(self, slot: int, memory: NDArray[np.float64], ended_by: int) -> None:
        """Write down what plug-ins made of the token that is said next."""
        turn = (int(self.num_output_tokens[slot]) + 1) % 2
        self.plugin_memory[slot, turn], self.ended_by[slot, turn] = memory, ended_by

    def record_logprob(self, slot: int, one: TokenLogprob) -> None:
        """Write down how likely the token is that is said next, unless it has too many others."""
        place, count = int(self.num_output_tokens[slot]) % LOGPROB_TOKENS, 1 + len(one.top)
        if count <= 1 + MAX_TOP_LOGPROBS:
            self.logprob_ids[slot, place, :count] = [one.token, *(token for token, _ in one.top)]
            self.logprobs[slot, place, :count] = [one.logprob, *(value for _, value in one.top)]
        self.logprob_counts[slot, place] = count

    def append_token(self, slot: int, token: int) -> None:
        """Write down a token of the answer: with this the step that drew it is done."""
        count = int(self.num_output_tokens[slot])
        self.token_ids[slot, count] = token
        self.num_output_tokens[slot] = count + 1

    def mark_finished(self, slot: int) -> None:
        """Note that an answer is complete: its pages are not needed any more, only its words.

        These stay until the slot is used again, in case they did not get through.
        """
        self.lease[slot] = FINISHED

    def mark_preempted(self, slot: int) -> None:
        """Note that the pages of a request are on their way into a lease for whoever joins it next.

        What is written of it stays, as with ``end``.
        """
        self.lease[slot] = PREEMPTED

    def leave(self, slot: int) -> None:
        """Strike a request out, unless its answer is complete."""
        if not self.is_finished(slot):
            self.request[slot] = b""

    # ---------------------------------------------------------------- reading

    def is_finished(self, slot: int) -> bool:
        """Whether the answer of a slot's request is complete."""
        return int(self.lease[slot]) == FINISHED

    def lease_of(self, slot: int) -> LeaseId | None:
        """The lease of a slot's pages; None: the one that the pool has for the request."""
        lease = int(self.lease[slot])
        return None if lease == PREEMPTED else LeaseId(lease)

    def output_tokens(self, slot: int) -> list[int]:
        """Tokens of the answer so far."""
        return self.token_ids[slot, : self.num_output_tokens[slot]].tolist()

    def logprob_of(self, slot: int, index: int) -> TokenLogprob | None:
        """How likely a token of the answer was; None: that is not written, or not any more.

        The oldest of the ring may be overwritten by a step that was cut short.
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

    def plugin_memory_of(self, slot: int) -> NDArray[np.float64]:
        """What plug-ins remember of the answer so far."""
        return self.plugin_memory[slot, self.num_output_tokens[slot] % 2]

    def ending_plugin(self, slot: int) -> int:
        """The plug-in that ended the answer; 0: none did."""
        return int(self.ended_by[slot, self.num_output_tokens[slot] % 2])

    def position(self, slot: int) -> int:
        """Position of the newest token, which no step has read yet."""
        return int(self.num_prior_tokens[slot] + self.num_output_tokens[slot]) - 1

    def find(self, request: str) -> int | None:
        """The slot of a request; None: nothing is written of it, so nothing was done for it.

        Raises: MessageError if what is written of it makes no sense
        """
        name = request.encode()
        found = np.flatnonzero(self.request == name)
        if not 1 <= len(name) <= ID_BYTES or len(found) > 1:
            raise MessageError(f"what is written cannot be that of {request!r} alone")
        if len(found) == 0:
            return None
        slot = int(found[0])
        moving, count = self.retirements, int(self.num_output_tokens[slot])
        last = self.context_tokens
        sound = (
            1 <= count <= last
            and 0 <= int(self.num_prior_tokens[slot]) <= last
            and 0 <= int(moving.phase[slot]) <= 3
            and 0 <= self.raw_tokens(slot) <= self.position(slot)
            and all(
                counts.min() >= 0 and table.layout.pages(int(counts.max())) <= table.width
                for table, counts in zip(self.sections, self.counts(slot), strict=True)
            )
        )
        if not sound:
            raise MessageError(f"what is written of {request!r} makes no sense")
        return slot

    def raw_tokens(self, slot: int) -> int:
        """Tokens in each row's raw pages, once what is under way is done."""
        moving = self.retirements
        retired = moving.retired_after if moving.phase[slot] else moving.retired
        return self.position(slot) - int(retired[slot])

    def counts(self, slot: int) -> list[Ids]:
        """Tokens of each row by section, [layers, kv_heads], once what is under way is done."""
        raw = np.full_like(self.tables[0].tokens[:, slot], self.raw_tokens(slot))
        counts = [raw, *(table.tokens[:, slot] for table in self.sections[1:])]
        if self.retirements.phase[slot]:
            then = Retirement(self.retirements.plan[:, slot]).counts
            counts[1 : len(self.tables)] = (then[..., i] for i in range(len(self.tables) - 1))
        return counts

    def pages(self, slot: int) -> Ids:
        """All pages that hold something of a slot's request, or do so until it has retired; fixed
        ones last."""
        raw = self.tables[0].pages[:, slot]
        if self.retirements.phase[slot]:
            raw = self.retirements.raw_pages[:, slot]
        tables = [raw, *(table.pages[:, slot] for table in self.sections[1:])]
        held = self.counts(slot)
        if self.retirements.phase[slot]:
            held[0] = held[0] + np.int32(self.plan.raw.tokens)
        used = [
            table[_first(table, -(-tokens // np.int32(section.layout.tokens)))]
            for table, tokens, section in zip(tables, held, self.sections, strict=True)
        ]
        return np.concatenate(used, dtype=np.int32)

    def fixed_run(self, slot: int) -> tuple[str, Ids, Ids] | None:
        """Format, tokens and pages of the cached prefix that a slot's request reads, if it does."""
        run = None if self.fixed is None else self.fixed.run(slot)
        return run if run and run[2].size else None

    def is_mid_step(self, slot: int) -> bool:
        """Whether the next step of a slot has come to its scores already, and was cut short."""
        return int(self.scored[slot]) > self.position(slot) * len(self.tables[0].pages)

    def mid_step_pages(self, slot: int) -> Ids:
        """Raw pages, in row order, that hold nothing but the token of a step that was cut short.

        They are needed if the step has come to its scores: whoever does it again leaves the layers
        alone that are done, keys and values included. Most often there are none.
        """
        raw = self.tables[0]
        column, row = divmod(self.raw_tokens(slot), raw.layout.tokens)
        if row or not self.is_mid_step(slot) or column >= raw.width:
            return np.empty(0, np.int32)
        return raw.pages[:, slot, :, column].ravel()

    def copy_slot(self, other: "Checkpoint", at: int, slot: int) -> None:
        """Take over the tables and the answer of another checkpoint's slot, but not its lease."""
        for mine, theirs in zip(self.sections, other.sections, strict=True):
            mine.pages[:, slot], mine.tokens[:, slot] = theirs.pages[:, at], theirs.tokens[:, at]
        self.num_prior_tokens[slot], self.num_output_tokens[slot] = (
            other.num_prior_tokens[at],
            other.num_output_tokens[at],
        )
        self.token_ids[slot], self.scored[slot] = other.token_ids[at], other.scored[at]
        self.plugin_memory[slot], self.ended_by[slot] = other.plugin_memory[at], other.ended_by[at]
        self.logprob_ids[slot], self.logprobs[slot] = other.logprob_ids[at], other.logprobs[at]
        self.logprob_counts[slot] = other.logprob_counts[at]
        self.retirements.phase[slot] = 0
        self.retirements.retired[slot] = other.retirements.retired[at]


def _first(table: Ids, counts: Ids) -> NDArray[np.bool_]:
    """Which cells are among the first ``counts`` of their row."""
    return np.asarray(np.arange(table.shape[-1]) < counts[..., None], np.bool_)


def _fields(plan: PagePlan, slots: int, context_tokens: int) -> Fields:
    geometry = plan.geometry
    rows = (geometry.layers, slots, geometry.kv_heads)
    raw = (*rows, plan.raw_pages(context_tokens) + 1)
    entries = (*rows, plan.most_pages(context_tokens) + 1 if plan.compresses else 0)
    moving = (*rows, Retirement.width(plan.raw.tokens) if plan.compresses else 0)
    each = (slots,)
    fixed = (*rows, plan.high.pages(context_tokens)) if plan.shares else ()
    shared: Fields = {"fixed": ("<i4", fixed), "fixed_tokens": ("<i4", rows)} if fixed else {}
    return {
        "fingerprint": ("S64", (1,)),
        "request": (f"S{ID_BYTES}", each),
        "lease": ("<i8", each),
        "num_prior_tokens": ("<i4", each),
        "num_output_tokens": ("<i4", each),
        "token_ids": ("<i4", (slots, context_tokens)),
        "plugin_memory": ("<f8", (slots, 2, MAX_PLUGIN_MEMORY)),
        "ended_by": ("<i4", (slots, 2)),
        "logprob_ids": ("<i4", (slots, LOGPROB_TOKENS, 1 + MAX_TOP_LOGPROBS)),
        "logprobs": ("<f8", (slots, LOGPROB_TOKENS, 1 + MAX_TOP_LOGPROBS)),
        "logprob_counts": ("<i4", (slots, LOGPROB_TOKENS)),
        "scored": ("<i8", each),
        "raw_entries": ("<i4", raw),
        "raw_tokens": ("<i4", (1, *rows)),
        "class_entries": ("<i4", entries),
        "class_tokens": ("<i4", (len(plan.classes), *rows)),
        "phase": ("<i4", each),
        "raw_pages": ("<i4", raw),
        "plan": ("<i4", moving),
        "retired": ("<i4", each),
        "retired_after": ("<i4", each),
        **shared,
    }


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, up to where the next one may begin."""
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
