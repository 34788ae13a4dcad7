# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
# Triton's language is not Python: the checker sees integers where tiles will be.
"""Classes and ranks of tokens on the GPU: one pass over the scores, one program for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.launch import Launch, check_device
from triptych.kernels.pages import check_indices

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
    """The launch of one call, into the outputs given."""
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


@triton.jit
def classify(
    scores, by_row, by_token, tokens, high, low, first, window, longest, classes, ranks, counts,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row, from its first token on: ranks go on where the tile before ended."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(tokens + row)
    least_high, least_low = tl.load(high + row), tl.load(low + row)
    highs = 0
    lows = 0
    for start in range(0, longest, TILE):
        token = start + tl.arange(0, TILE)
        inside, live = token < longest, (token < count) & (token < longest)
        at = scores + row * by_row + token.to(tl.int64) * by_token
        score = tl.load(at, mask=live, other=0.0)
        kept = (token < first) | (token >= count - window)
        is_high = (live & (kept | (score >= least_high))).to(tl.int32)
        is_low = (live & (score >= least_low)).to(tl.int32) * (1 - is_high)
        rank = tl.where(is_high > 0, highs + tl.cumsum(is_high, 0), lows + tl.cumsum(is_low, 0))
        rank = tl.where(is_high + is_low > 0, rank - 1, 0)
        place = row * longest + token
        named = tl.where(live, 2 * is_high + is_low, 255)
        tl.store(classes + place, named.to(tl.uint8), mask=inside)
        tl.store(ranks + place, rank, mask=inside)
        highs += tl.sum(is_high, 0)
        lows += tl.sum(is_low, 0)
    tl.store(counts + row * 2, highs)
    tl.store(counts + row * 2 + 1, lows)
