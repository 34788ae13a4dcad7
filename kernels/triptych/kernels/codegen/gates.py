"""Limits on the machine code of kernels: register spills, widths of loads, instructions.

A GPU shows the rest. These are what it cannot be fast without, and they need none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.kernels.codegen.aot import BEFORE, DECODE, FLASH, PREFILL, Compiled

SHAPE = "d128 g4 bf16"
"""Head size, query heads of a KV head and type of queries for which instructions are limited."""
MOST_PER_TOKEN = {"fp16": 34.0, "k8v4": 37.5, "k4v2": 34.4}
"""Most instructions of warps for a token of a KV head in decode attention, by format: 542, 600 and
550 for a tile of 64 tokens in four warps. 16-bit pages took 542 before quantized ones were fast."""
NARROWEST_LOAD = 4
"""Fewest bytes that a lane loads at a time: numbers, codes, scales, positions."""

MOST_OVER_FLASH = 1.6
"""Most instructions of prefill attention for a query and a key, over those of FlashAttention-2."""


@dataclass(frozen=True, slots=True)
class OverFlash:
    """Instructions of warps for a query and a key before its block."""

    row: Compiled
    """Prefill attention."""
    ours: float
    flash: float
    """FlashAttention-2 of Triton's tutorial, for the same target."""

    @property
    def is_within(self) -> bool:
        """Whether both loops were found, and ours is short enough."""
        return 0 < self.ours <= MOST_OVER_FLASH * self.flash

    def __str__(self) -> str:
        ratio = f"{self.ours / self.flash:.2f}" if self.flash else "unknown"
        return (
            f"{self.row.kernel} {self.row.variant} on {self.row.target} issues {self.ours:.3f} "
            f"instructions for a query and a key, FlashAttention {self.flash:.3f}: {ratio} times "
            f"as many, of {MOST_OVER_FLASH} allowed"
        )


def over_flash(rows: Sequence[Compiled]) -> list[OverFlash]:
    """Prefill attention beside FlashAttention-2 on each of NVIDIA's targets that has both."""
    flash = {row.target: row for row in rows if row.kernel == FLASH}
    return [
        OverFlash(row, _before(row), _before(flash[row.target]))
        for row in rows
        if row.kernel == PREFILL and row.variant.endswith(SHAPE) and row.target in flash
        if row.target.startswith("sm_")
    ]


def failed_gates(rows: Sequence[Compiled]) -> Iterator[str]:
    """A sentence for each limit that a kernel exceeds, or that could not be checked."""
    yield from (str(one) for one in over_flash(rows) if not one.is_within)
    for row in rows:
        name = f"{row.kernel} {row.variant} on {row.target}"
        if row.spill_bytes > row.spill_limit:
            yield f"{name} spills {row.spill_bytes} B of registers, of {row.spill_limit} allowed"
        narrowest = row.narrowest_load
        if narrowest and narrowest < NARROWEST_LOAD:
            yield f"{name} loads {narrowest} B a lane; expected {NARROWEST_LOAD} or more"
        if row.kernel == DECODE and row.target.startswith("sm_"):
            yield from _decode_gates(name, row)


def _decode_gates(name: str, row: Compiled) -> Iterator[str]:
    if not all(one.reads for one in row.passes) or not row.passes:
        yield f"{name} has loops other than those that read token counts, lists and pages"
    for one in row.passes if row.variant.endswith(SHAPE) else ():
        most = MOST_PER_TOKEN.get(one.reads)
        if most and one.per_token is not None and one.per_token > most:
            yield (
                f"{name} issues {one.per_token:.1f} instructions for a token of {one.reads} pages; "
                f"at most {most}"
            )


def _before(row: Compiled) -> float:
    """Instructions for a query and a key before its block; 0 if the loop was not found."""
    return next((one.per_token or 0.0 for one in row.passes if one.reads == BEFORE), 0.0)
