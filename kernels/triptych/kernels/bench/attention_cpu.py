"""Benchmark of decode attention over pages against torch's attention over contiguous float32."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triptych.core.errors import TriptychError
from triptych.core.layout import (
    ALIGN_BYTES,
    KeyOrder,
    PageLayout,
    default_page_bytes,
    page_format,
)
from triptych.kernels.codec import move_tokens, store_tokens
from triptych.kernels.decode import decode_attention
from triptych.kernels.pages import Section
from triptych.kernels.served_layouts import ServedLayouts, served_layouts

READ_BYTES = 1 << 28
"""Larger than any cache."""

TOLERANCE = 2e-3
"""Largest relative error of a backend against the reference; beyond it no time is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads of one layer; the default is that of SmolLM2-135M."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case."""

    backend: str
    format: str
    """A page format, several joined by ``+``, each with an equal part of the tokens, or a
    compression method."""
    batch: int
    """Number of requests; each has ``context`` tokens."""
    context: int
    time_ms: float
    """Fastest call: noise only ever adds."""
    median_ms: float
    bytes: int
    """Bytes of pages that attention has to read."""
    gb_per_s: float
    share_of_read: float
    """Bandwidth divided by that of a sum over memory; above 1 if pages stay in the cache."""
    sdpa_ms: float
    """Fastest call of the fastest form of torch's attention, interleaved with ours."""
    sdpa_median_ms: float
    speedup_vs_sdpa_fp32: float


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of requests with keys and values in pages."""

    arena: Tensor
    sections: list[Section]
    query: Tensor
    read_bytes: int

    def attend(self, backend: str) -> Tensor:
        slots = torch.arange(len(self.query), dtype=torch.int32, device=self.query.device)
        scale = self.query.shape[2] ** -0.5
        attention = decode_attention.on(backend)
        return attention(self.query, self.arena, self.sections, slots, scale=scale)


def run(
    backends: Sequence[str] = ("cpu",),
    formats: Sequence[str] = ("fp16", "k8v8", "k8v4", "k4v4", "k4v2", "diffkv"),
    batches: Sequence[int] = (1, 4, 16),
    contexts: Sequence[int] = (512, 2048),
    *,
    shape: Shape | None = None,
    repeats: int = 30,
) -> list[Row]:
    """Measure every combination on the CPU, with torch's number of threads.

    Our calls and torch's are interleaved: both have the same noise, and the data of each is out of
    the cache if both do not fit.

    Raises:  ConfigError for an unknown format or backend; TriptychError if a backend
             disagrees with the reference
    """
    rows: list[Row] = []
    speed = READ_BYTES / min(read_seconds(repeats))
    for batch, context in product(batches, contexts):
        query, baselines = torch_attention(shape or Shape(), batch, context)
        for name in formats:
            case = build_case(shape or Shape(), name, query, context)
            for backend in backends:
                check_case(case, backend, name)
                rows.append(_measure(case, backend, name, context, baselines, speed, repeats))
    return rows


def build_case(
    shape: Shape,
    name: str,
    query: Tensor,
    context: int,
    key_order: KeyOrder = "channel",
    page_tokens: int = 0,
) -> Case:
    """Store random tokens for each request of ``query`` [R, H, d], in pages in random order.

    ``page_tokens``: tokens of a page of the first format; 0: as many as in pages of the server.
    """
    batch, device = len(query), query.device
    page_bytes = default_page_bytes(shape.head_dim)
    if page_tokens:
        page_bytes = page_bytes_of(name.partition("+")[0], shape.head_dim, page_tokens)
    parts = list(_parts(name, shape.head_dim, context, key_order, page_bytes))
    pages = sum(part.pool_pages for part in parts)
    head_rows = batch * shape.kv_heads
    arena = torch.zeros(head_rows * pages, page_bytes, dtype=torch.uint8, device=device)
    free = torch.randperm(len(arena), dtype=torch.int32, device=device)
    free = free.view(batch, shape.kv_heads, -1)
    sections: list[Section] = []
    for part in parts:
        taken, free = free[..., : part.pool_pages], free[..., part.pool_pages :]
        table = part.ids_of(taken)
        _fill(arena, part.layout, table, part.count)
        tokens = torch.full((batch, shape.kv_heads), part.count, dtype=torch.int32, device=device)
        entries = table.flip(-1).contiguous() if part.backward else table
        sections.append(Section(part.layout, entries, tokens, part.backward))
    read = sum(part.layout.read_bytes * part.count for part in parts)
    return Case(arena, sections, query, round(read * head_rows))


@dataclass(frozen=True, slots=True)
class _Part:
    """The pages of one layout of a request."""

    layout: PageLayout
    count: int
    """Tokens in them."""
    backward: bool = False
    """Whether a row's pages are entered backward."""

    @property
    def pool_pages(self) -> int:
        return self.layout.pool_pages(self.layout.pages(self.count))

    def ids_of(self, pages: Tensor) -> Tensor:
        """Ids of the pages of this layout in pages of the arena, [R, KH, M]."""
        places = torch.arange(self.layout.parts, dtype=torch.int32, device=pages.device)
        ids = (pages[..., None] * self.layout.parts + places).flatten(-2)
        return ids[..., : self.layout.pages(self.count)].contiguous()


def page_bytes_of(name: str, head_dim: int, tokens: int) -> int:
    """The smallest page of a format that holds so many tokens, in bytes.

    Raises: ConfigError if it is no page format
    """
    used = PageLayout(page_format(name), head_dim, ALIGN_BYTES << 16).used_bytes(tokens)
    return -(-used // ALIGN_BYTES) * ALIGN_BYTES


def _parts(
    name: str, head_dim: int, context: int, key_order: KeyOrder, page_bytes: int
) -> Iterator[_Part]:
    """Layouts and tokens of the sections of a request.

    Tokens that do not fill a page of a format whose pages are encoded whole are in K8V8 pages, as
    recent tokens are. A method has those sections that engines read, and as many recent tokens as a
    request in the middle of an answer.
    """
    if name in served_layouts(head_dim):
        yield from _parts_of(served_layouts(head_dim)[name], context, key_order)
        return
    layouts = [
        PageLayout(page_format(part), head_dim, page_bytes, key_order) for part in name.split("+")
    ]
    share, left = context // len(layouts), context
    for layout in layouts:
        count = left if layout is layouts[-1] else share
        count -= count % layout.tokens if layout.format.codes_whole_pages else 0
        left -= count
        yield _Part(layout, count)
    if left:
        yield _Part(replace(layouts[0], format=page_format("k8v8")), left)


def _parts_of(served: ServedLayouts, context: int, key_order: KeyOrder) -> Iterator[_Part]:
    (first, back), *others = served.sections
    if not others:
        yield _Part(first, context, back)
        return
    plan, counts = served.plan, list[int]()
    for layout, _ in others:
        count = max(0, context - plan.full_recent_tokens) // len(others)
        counts.append(count - (count % layout.tokens if layout.format.codes_whole_pages else 0))
    yield _Part(first, context - sum(counts), back)
    for (layout, backward), count in zip(others, counts, strict=True):
        yield _Part(replace(layout, key_order=key_order), count, backward)


def _fill(arena: Tensor, layout: PageLayout, table: Tensor, count: int) -> None:
    """Store ``count`` random tokens in each head row of ``table`` [R, KH, M]."""
    token = torch.arange(count, device=arena.device)
    if layout.format.codes_whole_pages:
        for pages in table:
            _encode(arena, layout, pages, count)
        return
    for pages in table:
        key, value = torch.randn(2, count, len(pages), layout.head_dim, device=arena.device)
        where = pages[:, token // layout.tokens].T.contiguous()
        rows = (token % layout.tokens).int()[:, None].repeat(1, len(pages))
        store_tokens(arena, layout, key, value, where, rows, token.int())


def _encode(arena: Tensor, layout: PageLayout, pages: Tensor, count: int) -> None:
    """Encode ``count`` random tokens in each row of ``pages`` [KH, M], from raw pages."""
    raw, device = replace(layout, format=page_format("fp16")), arena.device
    heads, width = pages.shape
    each = raw.pages(count)
    both = arena.new_empty(heads * (each + width), arena.shape[1])
    numbers = torch.arange(len(both), dtype=torch.int32, device=device)
    source, target = numbers[: heads * each].view(heads, -1), numbers[heads * each :]
    held = torch.full((1, heads), count, dtype=torch.int32, device=device)
    sections = Section(raw, source[None], held), Section(layout, target.view(1, heads, -1), held)
    _fill(both, raw, source[None], count)
    token = torch.arange(count, dtype=torch.int32, device=device).expand(1, heads, -1).contiguous()
    move_tokens(both, *sections, torch.zeros(1, dtype=torch.int32, device=device), token, token)
    arena[pages.flatten().long()] = both[heads * each :]


def torch_attention(
    shape: Shape, batch: int, context: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Callable[[], Tensor]]]:
    """A query [R, H, d], and three calls of torch for the same attention."""
    query = torch.randn(batch, shape.heads, shape.head_dim, device=device).to(dtype)
    size = (2, batch, shape.kv_heads, context, shape.head_dim)
    key, value = torch.randn(size, device=device, dtype=dtype)
    group = shape.heads // shape.kv_heads
    wide_key, wide_value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    one, grouped = query[:, :, None], query.view(batch, shape.kv_heads, group, shape.head_dim)
    return query, [
        lambda: scaled_dot_product_attention(one, key, value, enable_gqa=True),
        lambda: scaled_dot_product_attention(one, wide_key, wide_value),
        lambda: scaled_dot_product_attention(grouped, key, value),
    ]


def check_case(case: Case, backend: str, name: str) -> float:
    """The relative error of a backend against the reference.

    Raises:  TriptychError if it is above ``TOLERANCE``
    """
    with poisoned_memory():
        found = case.attend(backend)
    return check_error(found, case.attend("reference"), backend, name)


def check_error(found: Tensor, expected: Tensor, backend: str, name: str) -> float:
    """``norm(found - expected) / norm(expected)``.

    Raises:  TriptychError if it is above ``TOLERANCE``, or no number
    """
    error = float(((found - expected).square().sum() / expected.square().sum()).sqrt())
    if not error <= TOLERANCE:
        raise TriptychError(f"{backend} is off by {error:.2g} on {name} pages: not measured")
    return error


@contextmanager
def poisoned_memory() -> Generator[None]:
    """Fill ``torch.empty`` with NaN, so that a value that no kernel writes is seen."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def _measure(
    case: Case,
    backend: str,
    name: str,
    context: int,
    baselines: Sequence[Callable[[], Tensor]],
    read_speed: float,
    repeats: int,
) -> Row:
    ours, *theirs = in_turns([lambda: case.attend(backend), *baselines], repeats)
    best = min(theirs, key=min)
    return Row(
        backend=backend,
        format=name,
        batch=len(case.query),
        context=context,
        time_ms=min(ours) * 1e3,
        median_ms=median(ours) * 1e3,
        bytes=case.read_bytes,
        gb_per_s=case.read_bytes / min(ours) / 1e9,
        share_of_read=case.read_bytes / min(ours) / read_speed,
        sdpa_ms=min(best) * 1e3,
        sdpa_median_ms=median(best) * 1e3,
        speedup_vs_sdpa_fp32=min(best) / min(ours),
    )


def read_seconds(repeats: int) -> list[float]:
    """Seconds of summing ``READ_BYTES``, for the read bandwidth of memory."""
    numbers = torch.ones(READ_BYTES // 4)
    (seconds,) = in_turns([numbers.sum], repeats)
    return seconds


def in_turns(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of interleaved calls, A B C A B C; the first round is warm-up and not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for spent, seconds in zip(times, _timed(calls), strict=True):
            if round_:
                spent.append(seconds)
    return times


def _timed(calls: Sequence[Callable[[], object]]) -> Iterator[float]:
    for call in calls:
        start = perf_counter()
        call()
        yield perf_counter() - start
