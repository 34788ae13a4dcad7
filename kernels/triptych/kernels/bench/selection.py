"""Benchmark of decode attention with page selection against reading all pages, on CPU or GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor

from triptych.kernels.bench.attention_cpu import (
    Case,
    Shape,
    build_case,
    check_error,
    in_turns,
    poisoned_memory,
)
from triptych.kernels.bench.attention_gpu import device_seconds
from triptych.kernels.decode import decode_attention
from triptych.kernels.page_lists import PageLists
from triptych.kernels.pages import Section
from triptych.kernels.select import (
    TILE_PAGES,
    Kind,
    Rule,
    Summaries,
    select_pages,
    summarize_pages,
    tile_bytes,
)


@dataclass(frozen=True, slots=True)
class SelectionRow:
    """One measured case: page selection and attention, interleaved with reading all pages."""

    backend: str
    method: Kind
    format: str
    batch: int
    context: int
    page_tokens: int
    """Tokens of a page of the first format."""
    rule: str
    """``keep 0.3`` or ``budget 2048``."""
    pages: int
    """Pages of all head rows."""
    pages_read: float
    """Share of them that is read, including those that are always read."""
    tokens_read: int
    """Tokens in the pages that are read."""
    selected_ms: float
    """Fastest page selection and attention together."""
    selected_median_ms: float
    select_ms: float
    """Fastest page selection alone."""
    whole_ms: float
    whole_median_ms: float
    speedup: float
    """Ratio of the fastest calls."""
    speedup_median: float
    bytes_read: int
    """Bytes of listed pages and of scored summaries, counted from the lists."""
    bytes_formula: int
    """The same, computed from the rule and the page sizes alone."""
    bytes_whole: int


@dataclass(frozen=True, slots=True)
class SelectionCase:
    """A case with page summaries and page lists."""

    case: Case
    summaries: list[Summaries]
    rule: Rule
    page_lists: PageLists
    slots: Tensor
    positions: Tensor

    @classmethod
    def of(cls, case: Case, kind: Kind, rule: Rule, context: int) -> "SelectionCase":
        batch, heads = case.sections[0].tokens.shape
        most = sum(section.pages.shape[2] for section in case.sections)
        device = case.query.device
        slots = torch.arange(batch, dtype=torch.int32, device=device)
        return cls(
            case=case,
            summaries=[summaries_of(case.arena, section, kind) for section in case.sections],
            rule=rule,
            page_lists=PageLists(
                torch.zeros(batch, heads, most, dtype=torch.int32, device=device),
                torch.zeros(batch, heads, dtype=torch.int32, device=device),
                slots,
            ),
            slots=slots,
            positions=torch.full_like(slots, context - 1),
        )

    def select(self, backend: str) -> None:
        case = self.case
        select_pages.on(backend)(
            case.query,
            case.sections,
            self.summaries,
            self.slots,
            self.positions,
            self.rule,
            self.page_lists,
            scale=case.query.shape[2] ** -0.5,
        )

    def attend(self, backend: str) -> Tensor:
        case = self.case
        return decode_attention.on(backend)(
            case.query,
            case.arena,
            case.sections,
            self.slots,
            scale=case.query.shape[2] ** -0.5,
            page_lists=self.page_lists,
        )

    def run(self, backend: str) -> Tensor:
        self.select(backend)
        return self.attend(backend)

    def pages(self) -> int:
        """Number of pages of all head rows."""
        return sum(int(section.layout.pages(n)) for section, n in self._counts())

    @property
    def tile_bytes(self) -> int:
        """Bytes of the summaries of ``TILE_PAGES`` pages."""
        return tile_bytes(self.summaries[0].kind, self.case.query.shape[2])

    def listed(self) -> tuple[int, int]:
        """Tokens of listed pages; bytes that attention reads of them and of scored summaries."""
        total, every = 0, 0
        batch, heads = self.page_lists.counts.shape
        for request, head in product(range(batch), range(heads)):
            count = int(self.page_lists.counts[request, head])
            listed, first = self.page_lists.ordinals[request, head, :count], 0
            for section in self.case.sections:
                tokens, room = int(section.tokens[request, head]), section.layout.tokens
                pages = section.layout.pages(tokens)
                inside = listed[(listed >= first) & (listed < first + pages)] - first
                held = int((tokens - inside * room).clamp(max=room).sum())
                every += held
                total += round(held * section.layout.read_bytes)
                total += _tiles(section, tokens) * self.tile_bytes
                first += pages
        return every, total

    def formula_bytes(self) -> int:
        """Expected bytes: all summaries, pages that are always read, and a share of the others.

        The rule gives the share of the others only. Their choice depends on the data, so each is
        counted as equally likely. The last page of a section is rarely full, which matters for
        short contexts.
        """
        batch, heads = self.page_lists.counts.shape
        position = int(self.positions[0])
        context, tiles, always, chance = 0, 0, list[float](), list[float]()
        for section in self.case.sections:
            layout, tokens = section.layout, int(section.tokens[0, 0])
            token_bytes = layout.read_bytes
            context, tiles = context + tokens, tiles + _tiles(section, tokens)
            for first in range(0, tokens, layout.tokens):
                end = min(tokens, first + layout.tokens)
                is_new = end - 1 > position - self.rule.window_tokens
                is_always = first < self.rule.sink_tokens or is_new or end == tokens
                (always if is_always else chance).append((end - first) * token_bytes)
        chosen = self.rule.pages(len(always) + len(chance), context) - len(always)
        read = sum(always) + max(0, chosen) * sum(chance) / max(1, len(chance))
        return round(batch * heads * (read + tiles * self.tile_bytes))

    def _counts(self) -> list[tuple[Section, int]]:
        return [
            (section, int(count))
            for section in self.case.sections
            for count in section.tokens.flatten()
        ]


def _tiles(section: Section, tokens: int) -> int:
    """Summary tiles of a head row that are scored; its last page is not scored."""
    return -(-((tokens - 1) // section.layout.tokens) // TILE_PAGES)


def summaries_of(arena: Tensor, section: Section, kind: Kind) -> Summaries:
    """Summaries of all full pages of a section."""
    batch, heads, width = section.pages.shape
    dim = section.layout.head_dim
    tiles = -(-width // TILE_PAGES)
    size, device = (batch, heads, tiles, tile_bytes(kind, dim)), arena.device
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    summaries = Summaries(kind, memory, dim)
    full = section.tokens // section.layout.tokens
    column = torch.arange(width, device=device).expand(batch, heads, width)
    row = torch.arange(batch * heads, device=device).view(batch, heads, 1).expand_as(column)
    live = column < full[..., None]
    pages, rows, columns = (part[live].int() for part in (section.pages, row, column))
    summarize_pages(arena, section.layout, pages, summaries, rows, columns)
    return summaries


def run_selection(
    backends: Sequence[str] = ("cpu",),
    methods: Sequence[Kind] = ("moments",),
    formats: Sequence[str] = ("k8v4",),
    batches: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (4096, 8192),
    keeps: Sequence[float] = (0.3,),
    budgets: Sequence[int] = (2048,),
    page_tokens: Sequence[int] = (0,),
    *,
    shape: Shape | None = None,
    repeats: int = 30,
    device: str = "cpu",
) -> list[SelectionRow]:
    """Measure every combination, on the CPU interleaved, on a GPU as replayed CUDA graphs.

    ``page_tokens``: tokens of a page of the first format; 0: as many as in pages of the server.

    Raises:  TriptychError if a backend disagrees with the reference over the chosen pages
    """
    shape = shape or Shape()
    rules = [(f"keep {keep:g}", Rule.of(keep)) for keep in keeps]
    rules += [(f"budget {tokens}", Rule.of(0.0, tokens)) for tokens in budgets]
    rows: list[SelectionRow] = []
    for batch, context, name, room in product(batches, contexts, formats, page_tokens):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        query = torch.randn(batch, shape.heads, shape.head_dim, device=device).to(dtype)
        whole = build_case(shape, name, query, context, page_tokens=room)
        for kind, (label, rule) in product(methods, rules):
            case = SelectionCase.of(whole, kind, rule, context)
            for backend in backends:
                check_selection(case, backend, name)
                rows.append(_measure(case, backend, kind, name, label, repeats))
    return rows


def check_selection(case: SelectionCase, backend: str, name: str) -> None:
    """Raise ``TriptychError`` if attention over the lists is not that of the reference."""
    with poisoned_memory():
        found = case.run(backend)
    check_error(found, case.attend("reference"), backend, name)


def _measure(
    case: SelectionCase, backend: str, kind: Kind, name: str, label: str, repeats: int
) -> SelectionRow:
    calls: list[Callable[[], object]] = [
        lambda: case.case.attend(backend),
        lambda: case.run(backend),
        lambda: case.select(backend),
    ]
    if case.case.query.is_cuda:
        whole, selected, select = (device_seconds(call, repeats) for call in calls)
    else:
        whole, selected, select = in_turns(calls, repeats)
    read, pages = int(case.page_lists.counts.sum()), case.pages()
    tokens_read, bytes_read = case.listed()
    return SelectionRow(
        backend=backend,
        method=kind,
        format=name,
        batch=len(case.case.query),
        context=int(case.positions[0]) + 1,
        page_tokens=case.case.sections[0].layout.tokens,
        rule=label,
        pages=pages,
        pages_read=read / pages,
        tokens_read=tokens_read,
        selected_ms=min(selected) * 1e3,
        selected_median_ms=median(selected) * 1e3,
        select_ms=min(select) * 1e3,
        whole_ms=min(whole) * 1e3,
        whole_median_ms=median(whole) * 1e3,
        speedup=min(whole) / min(selected),
        speedup_median=median(whole) / median(selected),
        bytes_read=bytes_read,
        bytes_formula=case.formula_bytes(),
        bytes_whole=case.case.read_bytes,
    )
