"""Variants of all Triton kernels to compile: layouts, head sizes, groups, types and options.

The variants are the launches that the ops plan for tensors on the meta device, with the layouts
that engines use for each method (``served_layouts``), so that the compiled kernels are those that
run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.core.head_budgets import BUDGET_STEPS
from triptych.core.layout import LATENT_FORMATS, PageLayout, default_page_bytes, stored_format
from triptych.kernels.bench import flash_attention
from triptych.kernels.codec import gpu as codec
from triptych.kernels.compact import Retirement
from triptych.kernels.compact import gpu as compact
from triptych.kernels.decode import gpu as decode
from triptych.kernels.draw import gpu as draw
from triptych.kernels.draw.reference import SETTINGS
from triptych.kernels.page_lists import PageLists
from triptych.kernels.pages import Past, Section
from triptych.kernels.pointwise import gpu as pointwise
from triptych.kernels.prefill import gpu as prefill
from triptych.kernels.select import KINDS, KeyCodebooks, Rule, Summaries, tile_bytes
from triptych.kernels.select import Kind as SummaryKind
from triptych.kernels.select import gpu as select
from triptych.kernels.select.key_codes import CENTROIDS
from triptych.kernels.served_layouts import FIRST, ServedLayouts, served_layouts
from triptych.kernels.triton.launch import Launch

HEAD_DIMS = (64, 96, 128, 256)
LATENT_DIM = 512 + 64
"""Size of DeepSeek's latents, with the rotated part of a key."""
FEW_DIMS = (64, 128)
"""Head sizes of what has many variants: moves between all pairs of layouts, adaptive selection."""
MAIN = "diffkv"
"""The method whose calls are compiled in all kinds; its requests have pages of four tables."""
PASTS = (None, "fp16", "k8v4", "k4v2")
"""Formats of past pages of a prompt; None: no past."""

Planned = tuple[str, Sequence[Launch]]
"""Name of a variant, and its launches."""


class Kind(NamedTuple):
    """Parameters of a variant other than format and head size."""

    dtype: torch.dtype = torch.bfloat16
    group: int = 4
    """Query heads of a KV head; up to 16 take one tile of the tensor cores, 32 take two."""
    window: int = 0
    softcap: float = 0.0

    def __str__(self) -> str:
        words = [f"g{self.group}", _short(self.dtype)]
        return " ".join(words + ["window cap"] * (self.window > 0))


USUAL = Kind()
EXACT = Kind(torch.float32)
RICH = Kind(window=100, softcap=30.0)
HALF = Kind(torch.float16)


class Scope(NamedTuple):
    """Which variants are planned."""

    dims: tuple[int, ...] = HEAD_DIMS
    methods: tuple[str, ...] = ()
    """Methods whose layouts are planned; empty: all."""
    kinds: tuple[Kind, ...] = ()
    """Empty: all."""

    def served(self, dim: int) -> list[ServedLayouts]:
        """Layouts of each method."""
        layouts = served_layouts(dim)
        return [layouts[name] for name in self.methods or layouts]

    def few_dims(self) -> list[int]:
        """Those of ``FEW_DIMS`` that are planned."""
        return [dim for dim in FEW_DIMS if dim in self.dims]

    def some(self, kinds: Sequence[Kind]) -> list[Kind]:
        """Those of some kinds that are planned."""
        return [kind for kind in kinds if not self.kinds or kind in self.kinds]


EVERYTHING = Scope()
SERVED = Scope((128,), FIRST, (USUAL, EXACT))
"""What engines run for the default methods on models with the most common heads."""


def all_variants() -> dict[tuple[str, str], Launch]:
    """Launches of all kernels by kernel and variant, without duplicates."""
    made, seen = dict[tuple[str, str], Launch](), set[str]()
    for variant, launch in _planned(EVERYTHING):
        if (key := _key(launch)) not in seen:
            seen.add(key)
            made[_unused(made, launch.name, variant)] = launch
    return made


def served_variants() -> dict[tuple[str, str], Launch]:
    """Those of all variants that engines run as ``SERVED`` says, and the usual ones."""
    keys = {_key(launch) for _, launch in _planned(SERVED)}
    served = {name: launch for name, launch in all_variants().items() if _key(launch) in keys}
    return served | usual_variants()


def _planned(scope: Scope) -> Iterator[tuple[str, Launch]]:
    parts = (_decode, _scores, _select, _prefill, _codec, _compact, _pointwise)
    planned = chain(*(part(scope) for part in parts), _draw(), _latents())
    for name, launches in chain(planned, [("d128 bf16", [flash_attention.plan()])]):
        for launch in launches:
            yield name, launch


def _key(launch: Launch) -> str:
    """Name, signature and constants of a launch: equal for those that share a compiled kernel."""
    return f"{launch.name} {launch.source().signature} {launch.constants}"


def _unused(made: Mapping[tuple[str, str], Launch], kernel: str, variant: str) -> tuple[str, str]:
    """A unique name for a launch; the second launch of a kernel in a variant ends in ``#2``."""
    taken = sum(name == kernel and other.split(" #")[0] == variant for name, other in made)
    return kernel, f"{variant} #{taken + 1}" if taken else variant


USUAL_VARIANTS = {
    "attend_sections": "diffkv d128 g4 bf16 listed",
    "merge_runs": "diffkv d128 g4 bf16 rotated",
    "score_run": "diffkv d128 g4 bf16",
    "record_rows": "any",
    "score_spans": "moments d128 g4 bf16",
    "choose_pages": "moments d128 g4 bf16 means short",
    "attend_chunks": "past k8v4 d128 g4 bf16 window cap",
    "sum_columns": "past k8v4 d128 g4 bf16 window cap #2",
    "find_first": "past k8v4 d128 g4 bf16 window cap",
    "store_slots": "k8v4 d128 bf16",
    "append_slots": "k8v4 d128 bf16",
    "load_slots": "k8v4 d128",
    "transcode_slots": "fp16 d128>k8v4 d128",
    "move_slots": "k8v4 d128>k4v2 d128",
    "encode_pages": "fp16 d128>kvarn d128",
    "classify": "any",
    "retire_tokens": "diffkv d128",
    "norm_rows": "sum 4096 bf16",
    "rotate_pairs": "d128 g4 bf16",
    "gate_rows": "bf16",
    "rotate_all": "d128 g4 bf16",
    "rotate_outputs": "d128 g4 bf16",
    "draw_rows": "drawn",
    "flash_attention": "d128 bf16",
}
"""The variant of each kernel that tests compile: a usual one that needs many registers."""


LIMITED_VARIANTS = (
    ("attend_chunks", "alone d128 g4 bf16"),
    ("attend_sections", f"{MAIN} d128 g4 bf16"),
    ("attend_sections", "uniform:k4v2 d128 g4 bf16"),
    ("attend_sections", "uniform:fp16 d128 g4 bf16"),
)
"""Variants whose instructions are limited (``gates``)."""


def usual_variants() -> dict[tuple[str, str], Launch]:
    """One variant of each kernel, those of ``USUAL_VARIANTS``, and those that are limited."""
    made = all_variants()
    return {name: made[name] for name in (*USUAL_VARIANTS.items(), *LIMITED_VARIANTS)}


def _decode(scope: Scope) -> Iterator[Planned]:
    """Decode attention over all pages of each method, and over page lists."""
    kinds = scope.some((USUAL, Kind(group=1), Kind(group=32), EXACT, RICH))
    for dim in scope.dims:
        for served in scope.served(dim):
            for kind in kinds if served.method == MAIN else (USUAL, EXACT):
                yield f"{served.method} d{dim} {kind}", _attention(served, kind)
                yield (
                    f"{served.method} d{dim} {kind} rotated",
                    _attention(served, kind, is_rotated=True),
                )
        main = served_layouts(dim)[MAIN]
        listed = PageLists(_meta(4, 8, 900), _meta(4, 8), _meta(4))
        for kind in kinds:
            yield f"{MAIN} d{dim} {kind} listed", _attention(main, kind, listed)


def _attention(
    served: ServedLayouts,
    kind: Kind,
    page_lists: PageLists | None = None,
    *,
    is_rotated: bool = False,
) -> Sequence[Launch]:
    query = _query(served.plan.geometry.head_dim, kind)
    lse = _meta(4, 8 * kind.group, dtype=torch.float32)
    return decode.plan(
        query, _arena_of(served), _sections(served, kind), _meta(4), 0.1, kind.window,
        kind.softcap, _meta(4), lse, page_lists, query if is_rotated else query.float(),
        is_rotated=is_rotated,
    )  # fmt: skip


def _scores(scope: Scope) -> Iterator[Planned]:
    """Scores of tokens, which decode writes into each table that has some."""
    for dim in scope.dims:
        for served in scope.served(dim):
            kinds = (USUAL, Kind(group=32), EXACT, RICH) if served.method == MAIN else (USUAL,)
            for kind, mirrored in product(scope.some(kinds), (False, True)):
                lse, arena = _meta(4, 8 * kind.group, dtype=torch.float32), _arena_of(served)
                yield (
                    f"{served.method} d{dim} {kind}{' mirror' if mirrored else ''}",
                    decode.plan_scores(
                        _query(dim, kind), arena, _sections(served, kind), _meta(4), lse, 0.1,
                        kind.window, kind.softcap, _meta(4), 1.0, arena if mirrored else None,
                    ),
                )  # fmt: skip
    progress = _meta(4, dtype=torch.int64)
    yield "any", [decode.plan_record(progress, _meta(4), _meta(4), 3, 32)]


def _select(scope: Scope) -> Iterator[Planned]:
    """Page selection in rows of pages of all classes, short and long; recent pages have no
    summaries."""
    adaptive = Rule.of(0.3, omitted_mass=0.1)
    kinds, more = scope.some((USUAL, Kind(group=1))), scope.some((USUAL, Kind(group=32), EXACT))
    wanted = chain(
        product(scope.dims, KINDS, kinds, (Rule.of(0.3),), (16, 300)),
        product(scope.dims, ("a2ats",), (USUAL,), (Rule.of(0.3),), (16, 300)),
        product(scope.few_dims(), ("moments",), more, (adaptive,), (16, 300)),
    )
    for dim, how, kind, rule, width in wanted:
        cache = _sections(served_layouts(dim)[MAIN], kind, width)
        known = [_summaries(how, section, dim, width) for section in cache[1:]]
        page_lists = PageLists(_meta(4, 8, len(cache) * width), _meta(4, 8), _meta(4))
        means = " means" if rule.omitted_mass else ""
        yield (
            f"{how} d{dim} {kind}{means}{' short' if width < 100 else ''}",
            select.plan(
                _query(dim, kind), cache, [None, *known], _meta(4), _meta(4),
                rule, page_lists, 0.1, _meta(8, BUDGET_STEPS + 1),
            ),
        )  # fmt: skip


def _summaries(how: SummaryKind, section: Section, dim: int, width: int) -> Summaries:
    room = section.layout.tokens
    size = tile_bytes(how, dim, room)
    memory, books = _meta(4, 8, -(-width // 16), size, dtype=torch.uint8), None
    if how == "a2ats":
        shapes = (1, 8, CENTROIDS, dim), (1, 8, dim, dim), (dim // 2,), (1, 8, dim)
        centroids, moments, frequencies, centre = (
            _meta(*shape, dtype=torch.float32) for shape in shapes
        )
        books = KeyCodebooks(centroids, moments, frequencies, 64, centre)
    return Summaries(how, memory, dim, page_tokens=room, codebooks=books)


def _prefill(scope: Scope) -> Iterator[Planned]:
    wanted = chain(
        product(scope.dims, PASTS, (USUAL,)),
        product(scope.dims, (None, "k8v4"), scope.some((EXACT, RICH))),
        product(scope.dims, (None, "fp16"), scope.some((HALF,))),
    )
    for dim, name, kind in wanted:
        query = _meta(100, 8 * kind.group, dim, dtype=kind.dtype)
        key, sums = query[:, :8], _meta(2, 8 * kind.group, 200, dtype=torch.float32)
        sinks = _meta(8 * kind.group, dtype=torch.float32) if kind is RICH else None
        past = None
        if name is not None:
            past = Past(_arena(dim), _layout(name, dim), _meta(2, 8, 300), _meta(2, 8))
        yield (
            f"{f'past {name}' if name else 'alone'} d{dim} {kind}",
            prefill.plan(
                query,
                key,
                key,
                [0, 40, 100],
                0.1,
                kind.window,
                kind.softcap,
                sinks,
                past,
                sums,
                (True, False) if kind is RICH else (),
                query,
            ),
        )


def _codec(scope: Scope) -> Iterator[Planned]:
    """Stores and loads of each layout, and what engines move and copy between two."""
    for dim in scope.dims:
        served = scope.served(dim)
        layouts = dict.fromkeys(layout for one in served for layout, _ in one.sections)
        for layout in layouts:
            yield from _stores(layout)
            out = _meta(7, 50, dim, dtype=torch.float32)
            table = _meta(7, 9), _meta(7)
            yield (
                _named(layout),
                codec.plan_load(_pages(layout), layout, *table, out, out, _meta(7, 50)),
            )
    for dim in scope.few_dims():
        served = scope.served(dim)
        for source, target in dict.fromkeys(pair for one in served for pair in one.moves):
            old, new = _section(source), _section(target, RICH)
            moves = _meta(4), _meta(4, 8, new.layout.tokens), _meta(4, 8, new.layout.tokens)
            name = f"{_named(source)}>{_named(target)}"
            yield name, codec.plan_moves(_pages(source), old, new, *moves)
        for source, target in dict.fromkeys(pair for one in served for pair in one.copies):
            slots, name = [_meta(100)] * 4, f"{_named(source)}>{_named(target)}"
            yield name, codec.plan_transcode(_pages(source), source, target, *slots)


def _stores(layout: PageLayout) -> Iterator[Planned]:
    """Launches that write single tokens to a layout; none if its pages are encoded whole."""
    if layout.format.codes_whole_pages:
        return
    slots, scores = (_meta(100, 8), _meta(100, 8), _meta(100)), _meta(100, 8).float()
    three, arena, dim = (_meta(4), _meta(4), _meta(4)), _pages(layout), layout.head_dim
    for dtype in (torch.bfloat16, torch.float32, torch.float16)[: 3 if dim == 128 else 1]:
        given = _meta(100, 8, dim, dtype=dtype)
        new, name = given[:4], f"{_named(layout)} {_short(dtype)}"
        yield name, codec.plan_store(arena, layout, given, given, *slots, scores)
        yield name, codec.plan_append(arena, _section(layout), new, new, *three)
        yield f"{name} mirror", codec.plan_append(arena, _section(layout), new, new, *three, arena)


def _compact(scope: Scope) -> Iterator[Planned]:
    scores, limits = _meta(7, 500).float(), _meta(7).float()
    outputs = _meta(7, 500, dtype=torch.uint8), _meta(7, 500), _meta(7, 2)
    yield "any", compact.plan(scores, _meta(7), limits, limits, 4, 64, *outputs)
    for dim, method in product(scope.dims, (MAIN, "uniform:k8v4")):
        row, found = _meta(4), Retirement(_meta(4, 8, Retirement.width(20)))
        served = served_layouts(dim)[method]
        high, low, *_ = *(_section(layout) for layout in served.plan.classes), None
        arena = _arena_of(served)
        limits = _meta(4, 8, 2, dtype=torch.float64)
        made = compact.plan_rows(arena, high, low, row, row, row, limits, found)
        yield f"{method} d{dim}", made


def _pointwise(scope: Scope) -> Iterator[Planned]:
    """Norms of rows and of heads, rotations and gates."""
    for dtype, width in product((torch.bfloat16, torch.float32), (576, 2048, 4096, 8192)):
        hidden, delta = _meta(4, width).float(), _meta(4, width, dtype=dtype)
        norm = hidden[0], 1e-5, hidden, delta
        yield f"sum {width} {_short(dtype)}", [pointwise.plan_norm(hidden, delta, *norm)]
        yield (
            f"{width} {_short(dtype)}",
            [pointwise.plan_norm(hidden, None, *norm[:2], None, delta)],
        )
        yield _short(dtype), [pointwise.plan_gate(delta, delta[:, : width // 2])]
    for dim, kind in product(scope.dims, (USUAL, EXACT)):
        query = _query(dim, kind)
        key, exact, angles = query[:, :8], query.float(), _meta(4, dim // 2).float()
        weight, outputs = _meta(dim).float(), (exact, exact[:, :8], exact[:, :8])
        rotated = pointwise.plan_rotate_kv(query, key, key, exact[0, :8], *outputs)
        yield (
            f"d{dim} {kind}",
            [
                pointwise.plan_norm(query, None, weight, 1e-5, None, query),
                pointwise.plan_rotate(query, angles, angles, query),
                rotated,
                pointwise.plan_rotate_back(exact, query),
            ],
        )


def _draw() -> Iterator[Planned]:
    logits, out = _meta(4, 32_000).float(), _meta(4, dtype=torch.int64)
    settings = _meta(SETTINGS, 4, dtype=torch.float64)
    yield "drawn", [draw.plan_draw(logits, settings, out)]
    yield "greedy", [draw.plan_draw(logits, None, out)]


def _latents() -> Iterator[Planned]:
    """Attention of 16 heads over latents, and their encoding."""
    dim, mix = LATENT_DIM, tuple(LATENT_FORMATS)
    arena = _arena(dim)

    def section(name: str) -> Section:
        return Section(_layout(name, dim), _meta(4, 1, 300), _meta(4, 1))

    for kind in (Kind(group=16), Kind(torch.float32, group=16)):
        query = _meta(4, kind.group, dim, dtype=kind.dtype)
        key, exact = query[:, :1], query.float()
        lse = _meta(4, kind.group, dtype=torch.float32)
        variant = f"latents d{dim} {kind}"
        cache = [section(name) for name in mix]
        options = (_meta(4), 0.1, 0, 0.0, _meta(4))
        yield variant, decode.plan(query, arena, cache, *options, lse, None, exact)
        scored = (_meta(4), lse, 0.1, 0, 0.0, _meta(4), 1.0, None)
        if kind.dtype != torch.float32:
            yield variant, decode.plan_scores(query, arena, cache, *scored)
        past = Past(arena, _layout("latent8", dim), _meta(2, 1, 300), _meta(2, 1))
        sums = _meta(2, kind.group, 200, dtype=torch.float32)
        given = (query, key, key, [0, 1, 4])
        yield variant, prefill.plan(*given, 0.1, 0, 0.0, None, past, sums, (), query)
        turned = exact, exact[:, :1], exact[:, :1]
        yield (
            variant,
            [
                pointwise.plan_rotate_kv(query, key, key, exact[0, :1], *turned),
                pointwise.plan_rotate_back(exact, query),
            ],
        )
    for name in mix:
        given, three = _meta(4, 1, dim, dtype=torch.bfloat16), (_meta(4), _meta(4), _meta(4))
        yield f"{name} d{dim}", codec.plan_append(arena, section(name), given, given, *three)
        moves = _meta(4), _meta(4, 1, 16), _meta(4, 1, 16)
        moved = codec.plan_moves(arena, section("latent16"), section(name), *moves)
        yield f"latent16>{name} d{dim}", moved


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _query(dim: int, kind: Kind) -> Tensor:
    return _meta(4, 8 * kind.group, dim, dtype=kind.dtype)


def _arena(dim: int) -> Tensor:
    return _meta(1000, default_page_bytes(dim), dtype=torch.uint8)


def _arena_of(served: ServedLayouts) -> Tensor:
    return _pages(served.plan.high)


def _layout(name: str, dim: int) -> PageLayout:
    return PageLayout(stored_format(name), dim, default_page_bytes(dim), "token")


def _pages(layout: PageLayout) -> Tensor:
    return _meta(1000, layout.page_bytes, dtype=torch.uint8)


def _sections(served: ServedLayouts, kind: Kind, width: int = 300) -> list[Section]:
    """The sections of a method; pages of the window come last first if ``kind`` has one.

    With a window all tokens are tracked.
    """
    tracked = kind.window > 0
    return [
        _section(
            replace(layout, is_tracked=layout.is_tracked or tracked), kind, width, backward=back
        )
        for layout, back in served.sections
    ]


def _section(
    layout: PageLayout, kind: Kind = USUAL, width: int = 300, *, backward: bool = False
) -> Section:
    """A section of 4 slots."""
    return Section(layout, _meta(4, 8, width), _meta(4, 8), backward or kind.window > 0)


def _named(layout: PageLayout) -> str:
    """Format and head size of a layout, and what else tells it from others."""
    small, biased = " small" * (layout.parts > 1), " biased" * layout.has_bias
    untracked = " untracked" * (not layout.is_tracked)
    return f"{layout.format.name}{small}{biased}{untracked} d{layout.head_dim}"


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}[dtype]
