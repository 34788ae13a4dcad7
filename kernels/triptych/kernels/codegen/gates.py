"""What compiled kernels must keep to: limits on spills, on widths of loads, on instructions.

A GPU shows the rest. These are what it cannot be fast without, and they need none.
"""

from collections.abc import Iterator, Sequence

from triptych.kernels.codegen.aot import Compiled

SHAPE = "d128 g4 bf16"
"""Head size, query heads of a KV head and type of queries for which instructions are limited."""
MOST_PER_TOKEN = {"fp16": 34.0, "k8v4": 37.5, "k4v2": 34.4}
"""Most instructions of warps for a token of a KV head in decode attention, by format: 542, 600 and
550 for a tile of 64 tokens in four warps. 16-bit pages took 542 before quantized ones were fast."""
NARROWEST_LOAD = 4
"""Fewest bytes that a lane of decode attention loads at a time: codes, scales, positions."""
NARROW = ("kvarn",)
"""Methods whose pages have a scale of two bytes for each token."""


def failed_gates(rows: Sequence[Compiled]) -> Iterator[str]:
    """A sentence for each limit that a kernel exceeds."""
    for row in rows:
        name = f"{row.kernel} {row.variant} on {row.target}"
        if row.spill_bytes > row.spill_limit:
            yield f"{name} spills {row.spill_bytes} B of registers, of {row.spill_limit} allowed"
        if row.kernel == "attend_sections":
            yield from _decode_gates(name, row)


def _decode_gates(name: str, row: Compiled) -> Iterator[str]:
    narrowest = row.narrowest_load
    if narrowest and narrowest < NARROWEST_LOAD and not row.variant.startswith(NARROW):
        yield f"{name} loads {narrowest} B a lane; expected {NARROWEST_LOAD} or more"
    for one in row.passes if row.variant.endswith(SHAPE) else ():
        most = MOST_PER_TOKEN.get(one.pages)
        if most and one.per_token is not None and one.per_token > most:
            yield (
                f"{name} issues {one.per_token:.1f} instructions for a token of {one.pages} pages; "
                f"at most {most}"
            )
