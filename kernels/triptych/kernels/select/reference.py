# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Tensor.tolist and Tensor.flatten have no types.
"""What page summaries and their scores mean, one page and one head row at a time."""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.codec import reference as codec
from triptych.kernels.lists import PageLists
from triptych.kernels.pages import Section
from triptych.kernels.select.summary import DEVIATIONS, TILE_PAGES, Rule, Summaries, check_rule

BOX_TOP, TOP = 254.0, 255.0
"""Codes of a box leave room to be rounded outwards."""
OUTWARDS = 0.01
"""Added to codes of a box before they are rounded up, in steps: more than float32 loses."""


def summarize_pages(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    summaries: Summaries,
    rows: Tensor,
    columns: Tensor,
) -> None:
    """Write summaries of full pages, from their decoded keys.

    Page ``pages[i]`` is page ``columns[i]`` in the list of head row ``rows[i]``, counted
    ``slot * KV heads + head``. From decoded keys, so that a box bounds the logits that
    attention computes, in whatever basis and format the keys are.

    Shapes:  arena [P, page_bytes]; pages, rows, columns [n]
    Dtypes:  arena uint8; the others int32
    Source:  Quest and TinyServe (bounding box); moments are ours (docs/log.md)
    """
    key, _, positions = codec.load_tokens(
        arena, layout, pages[:, None], torch.full_like(pages, layout.tokens)
    )
    write_summaries(key, positions, summaries, rows, columns)


def write_summaries(
    key: Tensor, positions: Tensor, summaries: Summaries, rows: Tensor, columns: Tensor
) -> None:
    """Write summaries of pages with these keys [n, T, d] and positions [n, T]."""
    first, second = vectors(key, summaries)
    kv_heads = summaries.memory.shape[1]
    slot, head = rows.long() // kv_heads, rows.long() % kv_heads
    tile, page = columns.long() // TILE_PAGES, columns.long() % TILE_PAGES
    for index, vector in enumerate((first, second)):
        codes, scale, zero = _coded(vector, summaries, index)
        summaries.codes[slot, head, tile, index, :, page] = codes
        summaries.numbers[slot, head, tile, 2 * index, page] = scale
        summaries.numbers[slot, head, tile, 2 * index + 1, page] = zero
    summaries.positions[slot, head, tile, 0, page] = positions.amin(1)
    summaries.positions[slot, head, tile, 1, page] = positions.amax(1)


def vectors(key: Tensor, summaries: Summaries) -> tuple[Tensor, Tensor]:
    """The two vectors of each page, exactly: key [n, T, d] -> [n, d] twice."""
    if summaries.kind == "box":
        return key.amax(1), key.amin(1)
    return key.mean(1), key.std(1, correction=0)


def _coded(vector: Tensor, summaries: Summaries, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, d], scale [n] and zero [n]: ``code * scale + zero``.

    A box is rounded outwards; of a deviation the zero is 0.
    """
    low, high = vector.amin(1), vector.amax(1)
    if summaries.kind == "moments":
        low = low if index == 0 else torch.zeros_like(low)
        scale = (high - low) / TOP
        scale = torch.where(scale > 0, scale, 1.0)
        codes = ((vector - low[:, None]) / scale[:, None]).round()
    else:
        scale = (high - low) / BOX_TOP + torch.maximum(high.abs(), low.abs()) * 2.0**-20
        scale = torch.where(scale > 0, scale, 1.0)
        if index == 0:
            codes = ((vector - low[:, None]) / scale[:, None] + OUTWARDS).ceil()
        else:  # counted from above, so that rounding up is outwards as well
            codes = ((high[:, None] - vector) / scale[:, None] + OUTWARDS).ceil()
            low, scale = high, -scale
    return codes.clamp(0, TOP).to(torch.uint8), scale, low


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
    scores: Tensor | None = None,
) -> None:
    """Choose the pages that each KV head of each request reads, and write them to ``lists``.

    The pages with the largest scores, as many as the rule still has room for beside those that
    are read in any case; of equal scores the earlier page. A page's score is the largest among
    the query heads of its KV head: for a box ``sum of max(q M, q m)``, never below the logit of
    any key of the page; for moments ``q mean + 2 sqrt(sum of q**2 deviation**2)``.

    With ``omitted_mass`` pages are added in the order of their scores until, for each query head,
    the others are expected to receive no more than that share. What a page of n tokens receives
    is expected to be ``n exp(q mean + sum of q**2 deviation**2 / 2)``, as if its keys were normally
    distributed: an estimate, no bound (a bound by boxes says nothing in practice).

    ``summaries`` has one entry for each section; None: all its pages are read. ``scores``, if
    given, receives the score of every page that competes, and infinity for those that need not.

    Shapes:  query [R, H, d]; slots, positions [R]; scores float32 [R, KH, M]
    Promise: lists are sorted and without doubles; if the rule keeps all pages, all are listed
    Source:  TinyServe, section 3 (Algorithm 1); Quest; one set per KV head is ours
    """
    for known in summaries:
        if known is not None:
            check_rule(rule, known.kind)
    kv_heads = sections[0].tokens.shape[1]
    grouped = query.float().unflatten(1, (kv_heads, -1)) * scale
    for request, place in enumerate(lists.rows.tolist()):
        for head in range(kv_heads if place >= 0 else 0):
            slot = int(slots[request])
            row = _row(sections, summaries, slot, head)
            found = _scores(grouped[request, head], row, int(positions[request]), rule)
            tokens = sum(int(section.tokens[slot, head]) for section in sections)
            count = rule.pages(len(found), tokens)
            if rule.omitted_mass > 0:
                masses = expected(grouped[request, head], row)
                count = max(count, enough(found, masses, rule.omitted_mass))
            chosen = choose(found, count)
            lists.ordinals[place, head, : len(chosen)] = chosen
            lists.counts[place, head] = len(chosen)
            if scores is not None:
                scores[request, head, : len(found)] = found


def choose(scores: Tensor, count: int) -> Tensor:
    """Pages with infinite scores, and the best of the others up to ``count`` in all."""
    count = max(count, int(scores.isposinf().sum()))
    best = scores.argsort(descending=True, stable=True)[:count]
    return best.sort().values.int()


def enough(scores: Tensor, masses: Tensor, omitted: float) -> int:
    """The fewest pages, best scores first, that leave no head more than its share ``omitted``.

    Shapes:  scores [pages]; masses [G, pages], which sum up to 1, or are 0 without summaries
    """
    order = scores.argsort(descending=True, stable=True)
    left = 1.0 - masses[:, order].cumsum(1).amin(0)
    return int((left > omitted).sum()) + 1 if masses.any() else 0


Row = list[tuple[Summaries | None, int, int, int, int, int]]
"""Of each section: its summaries, slot, head, pages of a head row, those that may compete, and
tokens of a page."""


def _row(
    sections: Sequence[Section], summaries: Sequence[Summaries | None], slot: int, head: int
) -> Row:
    row: Row = []
    for section, known in zip(sections, summaries, strict=True):
        tokens, room = int(section.tokens[slot, head]), section.layout.tokens
        competing = max(0, tokens - 1) // room if known else 0
        row.append((known, slot, head, -(-tokens // room), competing, room))
    return row


def _scores(query: Tensor, row: Row, position: int, rule: Rule) -> Tensor:
    """Scores [pages] of a head row for its queries [G, d]; infinity: read in any case."""
    parts: list[Tensor] = []
    for summaries, slot, head, pages, count, _ in row:
        scores = torch.full((pages,), float("inf"), device=query.device)
        if summaries is not None and count > 0:
            tiles = summaries.positions[slot, head].transpose(0, 1).flatten(1)[:, :count]
            competes = (tiles[0] >= rule.sink_tokens) & (tiles[1] <= position - rule.window_tokens)
            found = page_scores(query, summaries, slot, head)[:count]
            scores[:count] = found.where(competes, float("inf"))
        parts.append(scores)
    return torch.cat(parts)


def page_scores(query: Tensor, summaries: Summaries, slot: int, head: int) -> Tensor:
    """Scores of all pages of a head row that there is room for, over the queries [G, d]."""
    first, second = decoded(summaries, slot, head)
    if summaries.kind == "box":
        scores = query.relu() @ first.T + query.clamp(max=0) @ second.T
    else:
        scores = query @ first.T + DEVIATIONS * (query.square() @ second.square().T).sqrt()
    return scores.amax(0)


def decoded(summaries: Summaries, slot: int, head: int) -> tuple[Tensor, Tensor]:
    """The two vectors of all pages of a head row, [pages, d] each."""
    codes = summaries.codes[slot, head].float().permute(1, 0, 3, 2).flatten(1, 2)
    numbers = summaries.numbers[slot, head].transpose(0, 1).flatten(1)[..., None]
    return codes[0] * numbers[0] + numbers[1], codes[1] * numbers[2] + numbers[3]


def expected(query: Tensor, row: Row) -> Tensor:
    """Share of the attention that each page is expected to receive from each query, [G, pages].

    Of the attention that goes to pages with summaries: the others count for nothing.
    """
    parts: list[Tensor] = []
    for summaries, slot, head, pages, count, room in row:
        logits = torch.full((len(query), pages), float("-inf"), device=query.device)
        if summaries is not None and count > 0:
            mean, deviation = decoded(summaries, slot, head)
            logits[:, :count] = (query @ mean.T + query.square() @ deviation.square().T / 2)[
                :, :count
            ]
            logits[:, :count] += log(room)
        parts.append(logits)
    return torch.cat(parts, 1).softmax(1).nan_to_num()
