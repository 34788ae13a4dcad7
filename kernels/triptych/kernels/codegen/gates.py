"""Limits on the machine code of kernels: register spills, widths of loads, instructions.

A GPU shows the rest. These are what it cannot be fast without, and they need none.
"""

from collections.abc import Iterator, Sequence

from triptych.kernels.codegen.aot import BEFORE, Compiled
from triptych.kernels.triton.launch import multiplies_in_groups

SHAPE = "d128 g4 bf16"
"""Head size, query heads of a KV head and type of queries for which instructions are limited."""
MOST_PER_TOKEN = {"fp16": 34.0, "k8v4": 37.5, "k4v2": 34.4}
"""Most instructions of warps for a token of a KV head in decode attention, by format: 542, 600 and
550 for a tile of 64 tokens in four warps. 16-bit pages took 542 before quantized ones were fast."""
NARROWEST_LOAD = 4
"""Fewest bytes that a lane of decode attention loads at a time: codes, scales, positions."""
NARROW = ("kvarn",)
"""Methods whose pages have a scale of two bytes for each token."""


MOST_OVER_FLASH = 1.6
"""Most instructions of prefill attention for a query and a key, over those of FlashAttention-2."""
FLASH, PREFILL = "flash_attention", "attend_chunks"


def failed_gates(rows: Sequence[Compiled]) -> Iterator[str]:
    """A sentence for each limit that a kernel exceeds."""
    flash = {row.target: row for row in rows if row.kernel == FLASH}
    for row in rows:
        if row.kernel == PREFILL and row.variant.endswith(SHAPE) and row.target in flash:
            yield from _prefill_gates(row, flash[row.target])
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
        most = MOST_PER_TOKEN.get(one.reads)
        if most and one.per_token is not None and one.per_token > most:
            yield (
                f"{name} issues {one.per_token:.1f} instructions for a token of {one.reads} pages; "
                f"at most {most}"
            )


def _prefill_gates(row: Compiled, flash: Compiled) -> Iterator[str]:
    """Only where warps multiply in groups: elsewhere its blocks spill registers."""
    ours, theirs = (_before(one) for one in (row, flash))
    if multiplies_in_groups(row.target) and theirs and ours > MOST_OVER_FLASH * theirs:
        yield (
            f"{row.kernel} {row.variant} on {row.target} issues {ours:.2f} instructions for a "
            f"query and a key, FlashAttention {theirs:.2f}; at most {MOST_OVER_FLASH} times as many"
        )


def _before(row: Compiled) -> float:
    """Instructions for a query and a key before its block; 0 if the loop was not found."""
    return next((one.per_token or 0.0 for one in row.passes if one.reads == BEFORE), 0.0)
