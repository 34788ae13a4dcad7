# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""``plan_tokens`` and ``plan_retirement`` on the GPU: one program per head row, no host sync."""

from collections.abc import Iterator

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.compact.gpu_rows import classify, retire_tokens
from triptych.kernels.compact.retire import Retirement
from triptych.kernels.pages import Section, check_arena, check_indices
from triptych.kernels.triton.launch import Argument, Launch, check_device, power_of_two
from triptych.kernels.triton.triton_layout import form_of, section_arguments

TILE = 1024


def plan_tokens(
    scores: Tensor, tokens: Tensor, high: Tensor, low: Tensor, *, first: int = 0, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.plan_tokens``: the same integers."""
    classes = torch.empty_like(scores, dtype=torch.uint8, memory_format=torch.contiguous_format)
    ranks = torch.empty_like(classes, dtype=torch.int32)
    counts = torch.empty(len(scores), 2, dtype=torch.int32, device=scores.device)
    for launch in plan(scores, tokens, high, low, first, window, classes, ranks, counts):
        launch.run()
    return classes, ranks, counts


def plan(
    scores: Tensor,
    tokens: Tensor,
    high: Tensor,
    low: Tensor,
    first: int,
    window: int,
    classes: Tensor,
    ranks: Tensor,
    counts: Tensor,
) -> list[Launch]:
    """The launch of one call of ``plan_tokens``; it writes to the last three arguments."""
    check_indices(tokens)
    check_device("plan_tokens", scores, tokens, high, low)
    if not scores.dtype == high.dtype == low.dtype == torch.float32:
        raise ConfigError(
            f"plan_tokens: scores {scores.dtype}, high {high.dtype}, low {low.dtype}: "
            "expected float32"
        )
    rows, longest = scores.shape
    arguments = (
        scores, *scores.stride(), tokens.contiguous(), high.contiguous(), low.contiguous(),
        first, window, longest, classes, ranks, counts,
    )  # fmt: skip
    return [Launch(classify, (rows,), arguments, {"TILE": TILE})]


def plan_retirement(
    arena: Tensor,
    high: Section,
    low: Section | None,
    slots: Tensor,
    now: Tensor,
    first_leaving: Tensor,
    limits: Tensor,
    *,
    count: int,
) -> Retirement[Tensor]:
    """See ``retire.plan_retirement``; tokens of a page id out of range stay where they are."""
    shape = (len(slots), high.tokens.shape[1], Retirement.width(count))
    found = Retirement(torch.empty(shape, dtype=torch.int32, device=arena.device))
    for launch in plan_rows(arena, high, low, slots, now, first_leaving, limits, found):
        launch.run()
    return found


def plan_rows(
    arena: Tensor,
    high: Section,
    low: Section | None,
    slots: Tensor,
    now: Tensor,
    first_leaving: Tensor,
    limits: Tensor,
    found: Retirement[Tensor],
) -> list[Launch]:
    """The launch of one call of ``plan_retirement``; it writes to ``found``."""
    rows, heads, _ = found.numbers.shape
    check_indices(slots, now, first_leaving)
    check_device("plan_retirement", arena, slots, now, first_leaving, limits)
    if limits.dtype != torch.float64:
        raise ConfigError(f"plan_retirement: limits {limits.dtype}: expected float64")
    for section in (high, low):
        if section is not None:
            check_arena(arena, section.layout)
            check_indices(section.pages, section.tokens)
            check_device("plan_retirement", arena, section.pages, section.tokens)
    arguments = (
        arena, arena.shape[0], slots.contiguous(), now.contiguous(), first_leaving.contiguous(),
        limits.contiguous(), found.tokens, *section_arguments(high), *_low_arguments(low),
        found.numbers,
    )  # fmt: skip
    constants = {
        "HIGH": form_of(high.layout),
        "HIGH_BACKWARD": high.backward,
        "LOW": None if low is None else form_of(low.layout),
        "LOW_BACKWARD": low is not None and low.backward,
        "COUNT": power_of_two(found.tokens),
        "TILE": TILE,
    }
    return [Launch(retire_tokens, (1, heads, rows), arguments, constants)]


def _low_arguments(low: Section | None) -> Iterator[Argument]:
    if low is None:
        yield from (None, None, 0, 0, 0, 0, 0, 0, 0)
    else:
        yield from section_arguments(low)
