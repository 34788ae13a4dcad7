# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Kernels and some methods of tensors have no types.
"""Page summaries and page selection on the GPU: a kernel scores, torch sorts; nothing waits.

Shapes depend on the widths of tables alone, so a CUDA graph can hold a call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.core.spread import SPREAD_STEPS
from triptych.kernels.codec import gpu as codec
from triptych.kernels.launch import Launch, check_device, power_of_two
from triptych.kernels.lists import PageLists, check_lists
from triptych.kernels.pages import Section, check_indices
from triptych.kernels.select import reference
from triptych.kernels.select.gpu_tiles import score_tiles
from triptych.kernels.select.summary import (
    DEVIATIONS,
    WHOLE,
    Rule,
    Summaries,
    check_spread,
    check_summaries,
)


def summarize_pages(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    summaries: Summaries,
    rows: Tensor,
    columns: Tensor,
) -> None:
    """See ``reference.summarize_pages``; keys are decoded by the GPU's kernel."""
    check_indices(pages, rows, columns)
    check_device("summarize_pages", arena, pages, summaries.memory, rows, columns)
    tokens = torch.full_like(pages, layout.tokens)
    key, _, positions = codec.load_tokens(arena, layout, pages[:, None].contiguous(), tokens)
    reference.write_summaries(key, positions, summaries, rows, columns)


def select_pages(
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    slots: Tensor,
    positions: Tensor,
    rule: Rule,
    lists: PageLists,
    *,
    scale: float,
    spread: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:
    """See ``reference.select_pages``.

    Nothing waits for the device, so wrong slots cannot raise: their lists are empty.
    """
    kv_heads = sections[0].tokens.shape[1]
    check_lists(lists, len(query), kv_heads)
    check_spread(spread, kv_heads)
    known = check_summaries(summaries, rule)
    if known is not None:
        query = reference.unrotated(query.float(), known)
    widths = [section.pages.shape[2] for section in sections]
    shape = (len(query), kv_heads, sum(widths))
    found = torch.full(shape, float("-inf"), dtype=torch.float32, device=query.device)
    group = query.shape[1] // kv_heads
    means = None
    if rule.omitted_mass > 0:
        means = torch.full(
            (*shape[:2], group, shape[2]), float("-inf"), dtype=torch.float32, device=query.device
        )
    held = [section.tokens[slots.long().clamp(min=0)] for section in sections]
    first = 0
    for section, part, tokens, width in zip(sections, summaries, held, widths, strict=True):
        if part is None:
            page = torch.arange(width, device=query.device)
            live = page * section.layout.tokens < tokens[..., None]
            found[..., first : first + width] = torch.where(live, float("inf"), float("-inf"))
        first += width
    for launch in plan_scores(
        query, sections, summaries, slots, positions, rule, scale, found, means
    ):
        launch.run()
    _write(sections, held, widths, rule, spread, lists, found, means, scores)


def plan_scores(
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    slots: Tensor,
    positions: Tensor,
    rule: Rule,
    scale: float,
    found: Tensor,
    means: Tensor | None,
) -> list[Launch]:
    """The launches of one call: one for each section with summaries.

    Shapes:  found [R, KH, W], means [R, KH, G, W]; W: the widths of all sections together
    """
    rows, heads, dim = query.shape
    kv_heads = sections[0].tokens.shape[1]
    check_indices(slots, positions)
    check_device("select_pages", query, slots, positions, found)
    launches: list[Launch] = []
    first = 0
    for section, part in zip(sections, summaries, strict=True):
        width = section.pages.shape[2]
        if part is not None:
            if part.pages < width or part.head_dim != dim:
                raise ConfigError(
                    f"select_pages: summaries of {part.pages} pages of head_dim {part.head_dim} "
                    f"for a table of {width} pages of head_dim {dim}"
                )
            memory, tokens = part.memory, section.tokens
            arguments = (
                query.contiguous(), memory, slots.contiguous(), positions.contiguous(), tokens,
                found, means, min(memory.shape[0], tokens.shape[0]), *memory.stride()[:2],
                *tokens.stride(), section.layout.tokens, rule.sink_tokens, rule.window_tokens,
                float(scale), DEVIATIONS, first, width, found.shape[2],
            )  # fmt: skip
            constants = {"IS_BOX": part.kind == "box", "G": heads // kv_heads, "DIM": dim}
            constants |= {"WIDE": power_of_two(dim)}
            grid, warps = (-(-width // 16), kv_heads, rows), max(4, power_of_two(dim) // 16)
            launches.append(Launch(score_tiles, grid, arguments, constants, warps, stages=2))
        first += width
    return launches


def _write(
    sections: Sequence[Section],
    held: Sequence[Tensor],
    widths: Sequence[int],
    rule: Rule,
    spread: Tensor | None,
    lists: PageLists,
    found: Tensor,
    means: Tensor | None,
    scores: Tensor | None,
) -> None:
    """Sort, cut, and lay the chosen pages end to end."""
    pages = [
        (tokens + section.layout.tokens - 1) // section.layout.tokens
        for section, tokens in zip(sections, held, strict=True)
    ]
    total, tokens = sum(pages[1:], pages[0]), sum(held[1:], held[0]).clamp(min=1)
    budget = torch.full_like(tokens, rule.budget_tokens, dtype=torch.int64) * WHOLE
    mean = (budget // tokens).clamp(min=rule.keep, max=WHOLE)
    own = mean if spread is None else _between(spread, mean)
    count = _share(total.long() * own, WHOLE)
    count = torch.maximum(torch.minimum(count, total), found.isposinf().sum(2))
    order = torch.sort(found, dim=2, descending=True, stable=True).indices
    if means is not None:
        count = torch.maximum(count, _enough(means, order, rule.omitted_mass))
    rank = torch.empty_like(order).scatter_(2, order, _places(order))
    chosen = (rank < count[..., None]) & (found > float("-inf"))
    bases = [sum(pages[:at], torch.zeros_like(total)) for at in range(len(pages))]
    ordinal = torch.cat(
        [
            base[..., None] + torch.arange(width, device=base.device)
            for base, width in zip(bases, widths, strict=True)
        ],
        2,
    )
    _store(lists, chosen, ordinal)
    if scores is not None:
        live = found > float("-inf")
        _put(scores, ordinal, found, live)


def _share(whole: Tensor, parts: Tensor | int) -> Tensor:
    """``whole / parts``, rounded up."""
    return (whole + parts - 1) // parts


def _between(spread: Tensor, mean: Tensor) -> Tensor:
    """``summary.between`` for all head rows: spread [KH, steps + 1], mean [R, KH]."""
    size = WHOLE // SPREAD_STEPS
    step, rest = mean // size, mean % size
    steps = spread.long().expand(len(mean), *spread.shape)
    low = steps.gather(2, step[..., None])[..., 0]
    high = steps.gather(2, (step + 1).clamp(max=SPREAD_STEPS)[..., None])[..., 0]
    return low + _share((high - low) * rest, size)


def _places(like: Tensor) -> Tensor:
    return torch.arange(like.shape[2], device=like.device).expand_as(like)


def _enough(means: Tensor, order: Tensor, omitted: float) -> Tensor:
    """``reference.enough`` for all head rows: means [R, KH, G, W], order [R, KH, W]."""
    shares = means.softmax(3).nan_to_num()
    sorted_shares = shares.gather(3, order[:, :, None].expand_as(shares))
    left = 1.0 - sorted_shares.cumsum(3).amin(2)
    return torch.where(shares.amax((2, 3)) > 0, (left > omitted).sum(2) + 1, 0)


def _store(lists: PageLists, chosen: Tensor, ordinal: Tensor) -> None:
    """Write lists of the requests that have one."""
    to = chosen.cumsum(2) - 1
    width = lists.ordinals.shape[2]
    fresh = torch.zeros((*chosen.shape[:2], width), dtype=torch.int32, device=chosen.device)
    _put(fresh, to, ordinal.int(), chosen)
    has_list = (lists.rows >= 0)[:, None]
    place = lists.rows.long().clamp(min=0)
    # A request without a list writes back what is there: which requests have one is not known here.
    keep = torch.where(has_list[..., None], fresh, lists.ordinals[place])
    counts = torch.where(has_list, chosen.sum(2).int(), lists.counts[place])
    spare = lists.ordinals.shape[0]
    target = torch.where(lists.rows >= 0, place, spare)
    ordinals = torch.cat([lists.ordinals, lists.ordinals[:1]])
    ordinals[target] = keep
    every = torch.cat([lists.counts, lists.counts[:1]])
    every[target] = counts
    lists.ordinals.copy_(ordinals[:spare])
    lists.counts.copy_(every[:spare])


def _put(into: Tensor, at: Tensor, values: Tensor, wanted: Tensor) -> None:
    """``into[..., at] = values`` where ``wanted``; the others go to a place that is cut off."""
    width = into.shape[2]
    room = torch.cat([into, into[..., :1]], 2)
    room.scatter_(2, torch.where(wanted & (at < width), at, width), values.to(into.dtype))
    into.copy_(room[..., :width])
