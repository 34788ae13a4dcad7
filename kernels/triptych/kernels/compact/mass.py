"""LeanKV's cumulative thresholds: score limits from a share of the total attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.kernels.compact.retire import Token, row_tokens
from triptych.kernels.pages import Section, segments


def mass_limits(scores: Tensor, total: Tensor, mass: float) -> Tensor:
    """Score limit of each row: the tokens below it hold less than ``mass`` of all attention.

    Tokens are summed in ascending order while the sum is below ``mass * total``; the limit is the
    score of the next token, or infinity.

    Shapes:  scores [rows, N], significance of the tokens to classify; total [rows], the sum over
             all tokens of the row, the unclassified ones included -> [rows]
    Dtypes:  float32
    Source:  LeanKV, section 4.2 (cumulative thresholds, prompt phase)
    """
    if mass <= 0 or scores.shape[1] == 0:
        return scores.new_zeros(len(scores))
    ordered = scores.sort(dim=1).values
    gone = (ordered.cumsum(1) < mass * total[:, None]).sum(1, keepdim=True)
    beyond = scores.new_full((len(scores), 1), float("inf"))
    return torch.cat((ordered, beyond), 1).gather(1, gone)[:, 0]


def stored_mass_limits(
    arena: Tensor,
    classified: Sequence[Section],
    recent: Section,
    slots: Tensor,
    now: Tensor,
    end: Tensor,
    *,
    masses: tuple[float, float],
) -> Tensor:
    """The limits of ``mass_limits`` for the stored tokens of each head row, while it generates.

    The significance of a token is its score divided by the number of tokens after it. Tokens of the
    classes at positions before ``end`` are summed in ascending order while the sum is below
    ``masses`` times the sum over all tokens of the three sections; the limit is the significance of
    the next one, or infinity.

    Shapes:  arena [P, page_bytes]; slots, now (tokens seen), end [R] -> [R, KH, 2], one limit for
             each of ``masses``
    Dtypes:  uint8; int32; float64 out, sums are float64
    Source:  LeanKV, section 4.2. Its Algorithm 1 compares single scores with thresholds of the same
             name; the shares of the prompt phase keep their meaning in ours
    """
    heads = recent.tokens.shape[1]
    found = torch.zeros(len(slots), heads, 2, dtype=torch.float64, device=arena.device)
    for r in range(len(slots)):
        where = int(slots[r])
        for head in range(heads):
            own = [row_tokens(arena, one, where, head, int(now[r])) for one in classified]
            rows = [*own, row_tokens(arena, recent, where, head, int(now[r]))]
            for index, mass in enumerate(masses):
                found[r, head, index] = _limit(own, rows, int(end[r]), mass)
    return found


def _limit(own: list[list[Token]], rows: list[list[Token]], end: int, mass: float) -> float:
    total = sum(mean for row in rows for _, mean in row)
    means = sorted(mean for row in own for position, mean in row if position < end)
    running = 0.0
    for mean in means if mass > 0 else ():
        running += mean
        if running >= mass * total:
            return mean
    return float("inf") if mass > 0 and means else 0.0


def gathered_mass_limits(
    arena: Tensor,
    classified: Sequence[Section],
    recent: Section,
    slots: Tensor,
    now: Tensor,
    end: Tensor,
    *,
    masses: tuple[float, float],
) -> Tensor:
    """See ``stored_mass_limits``: all head rows at once, with tensors of the longest row."""
    rows = [_gathered(arena, one, slots, now) for one in (*classified, recent)]
    total = torch.stack([mean.sum(2) for _, mean, _ in rows]).sum(0)
    beyond = float("inf")
    parts = [
        mean.where(live & (position < end[:, None, None]), beyond)
        for position, mean, live in rows[: len(classified)]
    ]
    ordered = torch.cat(parts, 2).sort(2).values
    ordered = torch.cat((ordered, torch.full_like(ordered[..., :1], beyond)), 2)
    sums = ordered.cumsum(2)
    has_tokens = ordered[..., 0] < beyond
    found = list[Tensor]()
    for mass in masses:
        gone = (sums < mass * total[..., None]).sum(2, keepdim=True)
        limit = ordered.gather(2, gone)[..., 0]
        found.append(limit.where(has_tokens & (mass > 0), 0.0))
    return torch.stack(found, 2)


def _gathered(
    arena: Tensor, section: Section, slots: Tensor, now: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, float64 significance (0 behind the last token) and a mask [R, KH, tokens]."""
    at = slots.long()
    counts = section.tokens[at]
    pages = section.forward_pages[at]
    places = torch.arange(pages.shape[2] * section.layout.tokens, device=arena.device)
    live = places < counts[..., None]
    is_used = live[..., :: section.layout.tokens]
    parts, ids = segments(arena, section.layout), pages.where(is_used, 0).long()
    positions, scores = parts.positions[ids].flatten(2), parts.scores[ids].flatten(2)
    ages = (now[:, None, None] - positions).where(live, 1)
    return positions, (scores / ages).double().where(live, 0.0), live
