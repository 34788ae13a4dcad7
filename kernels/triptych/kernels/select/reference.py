# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Tensor.tolist and Tensor.flatten have no types.
"""Reference of page summaries, page scores and page selection, one head row at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.codec import reference as codec
from triptych.kernels.hadamard import hadamard
from triptych.kernels.page_lists import PageLists
from triptych.kernels.pages import Section
from triptych.kernels.select.summary import (
    BLOCKS,
    DEVIATIONS,
    TILE_PAGES,
    Rule,
    Summaries,
    block_ends,
    check_head_budgets,
    check_summaries,
)

BOX_TOP, TOP, MEAN_TOP = 254.0, 255.0, 15.0
"""Largest codes; a box uses 254 steps so that rounding outwards stays below 256."""
OUTWARDS = 0.01
"""Steps added to the codes of a box before rounding up: more than float32 errors."""


def summarize_pages(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    summaries: Summaries,
    rows: Tensor,
    columns: Tensor,
) -> None:
    """Compute and write the summaries of full pages from their decoded keys.

    Page ``pages[i]`` is in column ``columns[i]`` of the page table of head row ``rows[i]``, which
    is ``slot * KV heads + head``. Decoded keys are used so that a box bounds the logits that
    attention computes, for all formats and with or without rotation.

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
    """Write the summaries of n pages from keys [n, T, d] and positions [n, T]."""
    kv_heads = summaries.memory.shape[1]
    slot, head = rows.long() // kv_heads, rows.long() % kv_heads
    tile, page = columns.long() // TILE_PAGES, columns.long() % TILE_PAGES
    if summaries.codebooks is not None:
        found = summaries.codebooks.codes(key, positions, rows.long(), rotated=summaries.rotated)
        summaries.token_codes[slot, head, tile, page] = found
    else:
        key = unrotated(key, summaries)
        codes, numbers = _coded_box(key) if summaries.kind == "box" else _coded_moments(key)
        summaries.codes[slot, head, tile, :, :, page] = codes
        summaries.numbers[slot, head, tile, :, page] = numbers
    summaries.positions[slot, head, tile, 0, page] = positions.amin(1)
    summaries.positions[slot, head, tile, 1, page] = positions.amax(1)


def unrotated(vectors: Tensor, summaries: Summaries) -> Tensor:
    """Vectors [..., d] in the coordinates of the model, without the rotation of the pages."""
    if not summaries.rotated:
        return vectors
    return vectors @ hadamard(summaries.head_dim, vectors.device)


def code_logits(query: Tensor, positions: Tensor, summaries: Summaries, scale: float) -> Tensor:
    """Logits of queries with the codes of ``a2ats`` (``KeyCodebooks.logits``): [R, KH, 256]."""
    assert summaries.codebooks is not None
    model_query = unrotated(query.float(), summaries)
    return summaries.codebooks.logits(model_query, positions, scale=scale)


def moments(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unrounded moments of pages: block means, page deviations, and block factors.

    The deviation of a channel is over all tokens of the page, from the mean of the token's block.
    The factor of a block is the ratio of its deviation to that of the page.

    Shapes:  key [n, T, d] -> [n, BLOCKS, d], [n, d], [n, BLOCKS]
    """
    blocks = [key[:, start:end] for start, end in block_ends(key.shape[1])]
    means = torch.stack([block.mean(1) for block in blocks], 1)
    squares = torch.stack([block.var(1, correction=0) for block in blocks], 1)
    sizes = torch.tensor([float(block.shape[1]) for block in blocks]).to(key.device)
    spread = (squares * sizes[:, None]).sum(1) / sizes.sum()
    whole = spread.sum(1, keepdim=True)
    factors = (squares.sum(2) / torch.where(whole > 0, whole, 1.0)).sqrt()
    return means, spread.sqrt(), factors


def _coded_moments(key: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, 3, d] and numbers [n, 12], in the order of ``CODE_BYTES`` and ``NUMBERS``."""
    means, deviation, factors = moments(key)
    low = means.amin(2)
    scale = _step(means.amax(2) - low, MEAN_TOP)
    code = ((means - low[..., None]) / scale[..., None]).round().clamp(0, MEAN_TOP)
    spread = _step(deviation.amax(1), TOP)
    above = (deviation / spread[:, None]).round().clamp(0, TOP)
    codes = torch.cat([code[:, 0::2] + 16 * code[:, 1::2], above[:, None]], 1)
    numbers = torch.stack([scale, low, spread[:, None] * factors], 2).flatten(1)
    return codes.to(torch.uint8), numbers


def _coded_box(key: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, 2, d] and numbers [n, 4]: ``code * scale + zero``, rounded outwards."""
    codes, numbers = list[Tensor](), list[Tensor]()
    for is_lowest, vector in enumerate((key.amax(1), key.amin(1))):
        low, high = vector.amin(1), vector.amax(1)
        scale = (high - low) / BOX_TOP + torch.maximum(high.abs(), low.abs()) * 2.0**-20
        scale = torch.where(scale > 0, scale, 1.0)
        # Codes of the smallest numbers count down from the largest: rounding up is outwards.
        away = high[:, None] - vector if is_lowest else vector - low[:, None]
        codes.append((away / scale[:, None] + OUTWARDS).ceil().clamp(0, TOP))
        numbers += [-scale, high] if is_lowest else [scale, low]
    return torch.stack(codes, 1).to(torch.uint8), torch.stack(numbers, 1)


def _step(range_: Tensor, top: float) -> Tensor:
    """Scale of codes 0 to ``top``; 1 where all numbers are equal."""
    return torch.where(range_ > 0, range_ / top, 1.0)


def select_pages(
    query: Tensor,
    sections: Sequence[Section],
    summaries: Sequence[Summaries | None],
    slots: Tensor,
    positions: Tensor,
    rule: Rule,
    page_lists: PageLists,
    *,
    scale: float,
    head_budgets: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:
    """Choose the pages that each KV head of each request reads, and write them to ``page_lists``.

    Besides the pages that are always read, the pages with the largest scores are chosen, up to the
    number of the rule; of equal scores the earlier page. The score of a page is the largest among
    the query heads of its KV head. For a box with largest numbers M and smallest numbers m it is
    ``sum of max(q M, q m)``, never below the logit of a key of the page. For moments it is the
    largest ``q mean + 3 sqrt(sum of q**2 deviation**2)`` of the blocks; for ``a2ats`` the largest
    logit of the keys that the codes of its tokens stand for.

    With ``omitted_mass``, pages are added in the order of their scores until, for each query head,
    the expected share of attention of the other pages is no more than that. The expected attention
    of a block of n tokens is ``n exp(q mean + sum of q**2 deviation**2 / 2)``, as for normally
    distributed keys. It is an estimate, no bound: a bound by boxes is useless in practice.

    ``summaries`` has one entry for each section; None: all its pages are read. ``head_budgets`` is
    the share of pages that each KV head reads (``Rule.pages``); None: all heads read the same.
    ``scores``, if given, is filled with the scores of pages, infinity for pages that are always
    read.

    Shapes:  query [R, H, d]; slots, positions [R]; head_budgets int32 [KH, ``BUDGET_STEPS`` + 1];
             scores float32 [R, KH, M]
    Promise: lists are ascending without duplicates; if the rule keeps all pages, all are listed
    Source:  TinyServe, section 3 (Algorithm 1); Quest; one set per KV head is ours
    """
    known, kv_heads = check_summaries(summaries, rule), sections[0].tokens.shape[1]
    check_head_budgets(head_budgets, kv_heads)
    steps: list[list[int]] = [[]] * kv_heads if head_budgets is None else head_budgets.tolist()
    model_query = query.float() if known is None else unrotated(query.float(), known)
    grouped = model_query.unflatten(1, (kv_heads, -1)) * scale
    if known is not None and known.codebooks is not None:
        grouped = code_logits(query, positions, known, scale)[:, :, None]
    for request, place in enumerate(page_lists.rows.tolist()):
        for head in range(kv_heads if place >= 0 else 0):
            slot = int(slots[request])
            row = _row(sections, summaries, slot, head)
            found = _scores(grouped[request, head], row, int(positions[request]), rule)
            tokens = sum(int(section.tokens[slot, head]) for section in sections)
            held = [
                (part.layout, part.layout.pages(int(part.tokens[slot, head]))) for part in sections
            ]
            small = sum(pages - layout.pool_pages(pages) for layout, pages in held)
            count = rule.pages(len(found), tokens, steps[head], small)
            if rule.omitted_mass > 0:
                masses = expected_shares(grouped[request, head], row)
                count = max(count, count_for_mass(found, masses, rule.omitted_mass))
            chosen = choose(found, count)
            page_lists.ordinals[place, head, : len(chosen)] = chosen
            page_lists.counts[place, head] = len(chosen)
            if scores is not None:
                scores[request, head, : len(found)] = found


def choose(scores: Tensor, count: int) -> Tensor:
    """Pages with infinite scores and those with the largest others, ``count`` in all, ascending."""
    count = max(count, int(scores.isposinf().sum()))
    best = scores.argsort(descending=True, stable=True)[:count]
    return best.sort().values.int()


def count_for_mass(scores: Tensor, masses: Tensor, omitted: float) -> int:
    """Fewest pages, largest scores first, so that the others have at most ``omitted`` of each head.

    Shapes:  scores [pages]; masses [G, pages], shares that sum to 1, or 0 without summaries
    """
    order = scores.argsort(descending=True, stable=True)
    left = 1.0 - masses[:, order].cumsum(1).amin(0)
    return int((left > omitted).sum()) + 1 if masses.any() else 0


Row = list[tuple[Summaries | None, int, int, int, int, int]]
"""A head row: for each section its summaries, slot, head, number of pages, number of pages that are
chosen by score, and tokens of a page."""


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
    """Scores [pages] of a head row for its queries [G, d]; infinity: always read."""
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
    """Scores of all pages in ``summaries`` of a head row, for the queries [G, d].

    For ``a2ats`` the query is its logits with all codes, [1, 256].
    """
    if summaries.kind == "a2ats":
        return query[0][summaries.token_codes[slot, head].flatten(0, 1).long()].amax(-1)
    if summaries.kind == "box":
        most, least = decoded_box(summaries, slot, head)
        scores = query.relu() @ most.T + query.clamp(max=0) @ least.T
    else:
        logits, squares = block_logits(query, summaries, slot, head)
        scores = (logits + DEVIATIONS * squares.sqrt()).amax(1)
    return scores.amax(0)


def decoded_box(summaries: Summaries, slot: int, head: int) -> tuple[Tensor, Tensor]:
    """The corners of the boxes of all pages of a head row, [pages, d] each."""
    codes, numbers = _of_row(summaries, slot, head)
    return codes[0] * numbers[0] + numbers[1], codes[1] * numbers[2] + numbers[3]


def decoded_moments(summaries: Summaries, slot: int, head: int) -> tuple[Tensor, Tensor]:
    """Means and deviations of all blocks of a head row, [BLOCKS, pages, d] each."""
    codes, numbers = _of_row(summaries, slot, head)
    scale, low, spread = numbers.unflatten(0, (BLOCKS, 3)).unbind(1)
    return codes[:-1] * scale + low, codes[-1] * spread


def _of_row(summaries: Summaries, slot: int, head: int) -> tuple[Tensor, Tensor]:
    """Codes [vectors, pages, d] and numbers [``NUMBERS``, pages, 1] of a head row."""
    codes = whole_codes(summaries)[slot, head].float().permute(1, 0, 3, 2).flatten(1, 2)
    return codes, summaries.numbers[slot, head].transpose(0, 1).flatten(1)[..., None]


def whole_codes(summaries: Summaries) -> Tensor:
    """Unpacked codes, uint8 [S, KH, tiles, vectors, d, pages of a tile]."""
    codes = summaries.codes
    if summaries.kind == "box":
        return codes
    pairs, deviation = codes[:, :, :, :-1], codes[:, :, :, -1:]
    means = torch.stack([pairs & 15, pairs >> 4], 4).flatten(3, 4)
    return torch.cat([means, deviation], 3)


def block_logits(
    query: Tensor, summaries: Summaries, slot: int, head: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the logits of each block: queries [G, d] -> [G, BLOCKS, pages]."""
    mean, deviation = decoded_moments(summaries, slot, head)
    squares = query.square() @ deviation.square().mT
    return (query @ mean.mT).transpose(0, 1), squares.transpose(0, 1)


def expected_shares(query: Tensor, row: Row) -> Tensor:
    """Expected share of each query's attention that each page receives, [G, pages].

    The shares are of the attention to pages with summaries; other pages have share 0.
    """
    parts: list[Tensor] = []
    for summaries, slot, head, pages, count, room in row:
        logits = torch.full((len(query), pages), float("-inf"), device=query.device)
        if summaries is not None and count > 0:
            means, squares = block_logits(query, summaries, slot, head)
            sizes = torch.tensor([float(end - start) for start, end in block_ends(room)])
            blocks = means + squares / 2 + sizes.log().to(query.device)[:, None]
            logits[:, :count] = blocks.logsumexp(1)[:, :count]
        parts.append(logits)
    return torch.cat(parts, 1).softmax(1).nan_to_num()
