# pyright: basic, reportCallIssue=false
# numba is untyped.
"""The books of a decode step, which lie in the host's memory: one pass for each thing to be done.

A table is int32 [layers, slots, kv_heads, pages of a row], its tokens int32 [layers, slots,
kv_heads], and ``room`` the tokens of a page. Compiled, since after a step the processor's caches
are full of weights: there a call of numpy takes five times as long as in a warm loop, and the books
of a step would take some forty of them.
"""

import numpy as np

from triptych.kernels.compiled import kernel


@kernel
def begin_step(pages, tokens, slots, room, positions, progress, every):
    """Count one more token in each row of some slots, and see whose tokens are given scores.

    Rows of a slot are equally long. Every so many ``positions`` scores are due; ``every`` 0: never.
    ``progress`` has for each slot the layers whose scores are added, over all positions: a step may
    be done again.

    Returns: page and row of each new token, int32 [layers, slots, kv_heads]; indices of those for
             whom scores are due; ``positions * layers``, and whether somebody's progress is further
    Raises:  IndexError if a row has no page for a token
    """
    layers, _, heads, width = pages.shape
    ids = np.empty((layers, len(slots), heads), np.int32)
    rows = np.empty_like(ids)
    due, before = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    columns = np.empty_like(due)
    count, is_begun = 0, False
    for at in range(len(slots)):
        slot = slots[at]
        columns[at] = tokens[0, slot, 0] // room
        if columns[at] >= width:
            raise IndexError("a row of a page table has no cell for another token")
        before[at] = np.int64(positions[at]) * layers
        is_begun |= progress[slot] > before[at]
        if every > 0 and positions[at] % every == 0:
            due[count] = at
            count += 1
    for layer in range(layers):
        for at in range(len(slots)):
            slot, column = slots[at], columns[at]
            for head in range(heads):
                ids[layer, at, head] = pages[layer, slot, head, column]
                rows[layer, at, head] = tokens[layer, slot, head] - column * room
                tokens[layer, slot, head] += 1
    return ids, rows, due[:count].copy(), before, is_begun


@kernel
def leaving_rows(tokens, slots, seen, sink_tokens, lag):
    """What a retirement is planned from, for the rows of each layer and slot as one slot.

    ``seen``: tokens of each slot. The oldest token judged is ``lag`` behind those that leave raw
    pages, which are ``tokens - sink_tokens`` behind the newest one.

    Returns: row, tokens seen, and the oldest position that is judged, int32 [3, layers * slots]
    """
    layers, all_slots, _ = tokens.shape
    found = np.empty((3, layers * len(slots)), np.int32)
    for layer in range(layers):
        for at in range(len(slots)):
            slot, row = slots[at], layer * len(slots) + at
            found[0, row] = layer * all_slots + slot
            found[1, row] = seen[at]
            found[2, row] = seen[at] - (tokens[0, slot, 0] - sink_tokens) - lag
    return found


@kernel
def count_lacking(tokens, slots, wanted, room, counts):
    """Add to ``counts`` [slots] the pages that the rows of each slot lack to hold so many tokens.

    ``wanted``: int32 [layers, slots, kv_heads]
    """
    layers, requests, heads = wanted.shape
    for layer in range(layers):
        for at in range(requests):
            for head in range(heads):
                have = _pages(tokens[layer, slots[at], head], room)
                counts[at] += max(0, _pages(wanted[layer, at, head], room) - have)


@kernel
def append_pages(pages, tokens, slots, wanted, room, ids, first):
    """Put the pages that are lacking behind those that the rows of each slot have, row after row.

    Those of a slot are in ``ids`` from ``first`` [slots] on, which then points behind them.

    Raises: IndexError if a row cannot have so many, or there are fewer ``ids`` than are lacking
    """
    layers, requests, heads = wanted.shape
    for layer in range(layers):
        for at in range(requests):
            slot = slots[at]
            for head in range(heads):
                have = _pages(tokens[layer, slot, head], room)
                want = _pages(wanted[layer, at, head], room)
                if want > pages.shape[3] or first[at] + want - have > len(ids):
                    raise IndexError("a row of a page table lacks more pages than there are")
                for column in range(have, want):
                    pages[layer, slot, head, column] = ids[first[at]]
                    first[at] += 1


@kernel
def _pages(tokens, room):
    return (np.int64(tokens) + room - 1) // room


@kernel
def moving_cells(source, source_room, places, target, target_room, target_places, slots):
    """Where tokens lie and where they go; a negative ``target_places``: such a token stays.

    Shapes:  places, target_places int32 [layers, slots, kv_heads, tokens]
    Returns: page and row in ``source``, page and row in ``target``, int32 [4, tokens that move]
    Raises:  IndexError if a place lies in no cell of a table
    """
    layers, requests, heads, most = places.shape
    cells = np.empty((4, places.size), np.int32)
    found = 0
    for layer in range(layers):
        for at in range(requests):
            slot = slots[at]
            for head in range(heads):
                for token in range(most):
                    to = target_places[layer, at, head, token]
                    if to < 0:
                        continue
                    column, row = divmod(places[layer, at, head, token], source_room)
                    to_column, to_row = divmod(to, target_room)
                    if not (0 <= column < source.shape[3] and to_column < target.shape[3]):
                        raise IndexError("a token moves to or from where its row has no cell")
                    cells[0, found] = source[layer, slot, head, column]
                    cells[1, found] = row
                    cells[2, found] = target[layer, slot, head, to_column]
                    cells[3, found] = to_row
                    found += 1
    return cells if found == places.size else cells[:, :found].copy()


@kernel
def write_down(pages, plan, slots, kept_pages, kept_plan):
    """Keep the table of some slots as it is, and what is planned for them, [layers, slots, ...]."""
    layers, _, heads, width = pages.shape
    for layer in range(layers):
        for at in range(len(slots)):
            slot = slots[at]
            for head in range(heads):
                for column in range(width):
                    kept_pages[layer, slot, head, column] = pages[layer, slot, head, column]
                for number in range(plan.shape[3]):
                    kept_plan[layer, slot, head, number] = plan[layer, at, head, number]


@kernel
def drop_page(pages, tokens, before, slots, column, room):
    """Take one full page out of each row of some slots; what lies behind it moves up.

    ``before`` is the table as it was, so that this can be done again after half of it was.

    Returns: the pages, int32 [slots, layers * kv_heads]
    """
    layers, _, heads, width = pages.shape
    gone = np.empty((len(slots), layers * heads), np.int32)
    for layer in range(layers):
        for at in range(len(slots)):
            slot = slots[at]
            for head in range(heads):
                gone[at, layer * heads + head] = before[layer, slot, head, column]
                for place in range(column, width - 1):
                    pages[layer, slot, head, place] = before[layer, slot, head, place + 1]
                tokens[layer, slot, head] -= room
    return gone
