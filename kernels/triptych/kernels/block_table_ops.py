# pyright: basic, reportCallIssue=false
# numba is untyped.
"""The books of a decode step, which lie in the host's memory: one pass for each thing to be done.

A table is int32 [layers, slots, kv_heads, pages of a row], its tokens int32 [layers, slots,
kv_heads], and ``room`` the tokens of a page. Compiled, since after a step the processor's caches
are full of weights: there a call of numpy takes five times as long as in a warm loop, and the books
of a step would take some forty of them.
"""

import numpy as np

from triptych.kernels.codegen.numba_runtime import kernel


@kernel
def count_new_tokens(tokens, slots, room, positions, progress, every):
    """Count one more token in each row of some slots, and see whose tokens are given scores.

    Rows of a slot are equally long, and have cells for ``room`` tokens. Every so many
    ``positions`` scores are due; ``every`` 0: never. ``progress`` has for each slot the layers
    whose scores are added, over all positions: a step may be done again.

    Returns: the place of each new token in its rows, int32 [slots]; indices of those for whom
             scores are due; ``positions * layers``, and whether somebody's progress is further
    Raises:  IndexError if a row has no page for a token
    """
    layers, _, heads = tokens.shape
    places = np.empty(len(slots), np.int32)
    due, before = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    count, is_begun = 0, False
    for at in range(len(slots)):
        slot = slots[at]
        places[at] = tokens[0, slot, 0]
        if places[at] >= room:
            raise IndexError("a row of a page table has no cell for another token")
        before[at] = np.int64(positions[at]) * layers
        is_begun |= progress[slot] > before[at]
        if every > 0 and positions[at] % every == 0:
            due[count] = at
            count += 1
    for layer in range(layers):
        for at in range(len(slots)):
            for head in range(heads):
                tokens[layer, slots[at], head] += 1
    return places, due[:count].copy(), before, is_begun


@kernel
def retirement_inputs(tokens, slots, seen, sink_tokens, lag):
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
def fill_rows(pages, tokens, slot, given, room, ids):
    """Set the rows of a slot: ``given`` tokens, and ids in row order, [layers * kv_heads] rows.

    Raises: IndexError if a row cannot have so many pages, or there are more or fewer ids
    """
    layers, _, heads, width = pages.shape
    at = 0
    for row in range(layers * heads):
        layer, head = row // heads, row % heads
        count = _pages(given[row], room)
        if count > width or at + count > len(ids):
            raise IndexError("a row of a page table has not so many cells, or lacks pages")
        for column in range(count):
            pages[layer, slot, head, column] = ids[at + column]
        tokens[layer, slot, head] = given[row]
        at += count
    if at < len(ids):
        raise IndexError("more pages than the rows of a page table have tokens for")


@kernel
def tokens_plus_one(tokens, slots):
    """Tokens of each row of some slots, and one more: int32 [layers, slots, kv_heads, tables]."""
    tables, layers, _, heads = tokens.shape
    more = np.empty((layers, len(slots), heads, tables), np.int32)
    for layer in range(layers):
        for at in range(len(slots)):
            for head in range(heads):
                for table in range(tables):
                    more[layer, at, head, table] = tokens[table, layer, slots[at], head] + 1
    return more


@kernel
def count_lacking(tokens, slots, wanted, rooms):
    """Pages that the rows of each slot lack to hold so many tokens, int64 [slots].

    ``tokens``: what the tables have that share the rows' cells, [tables, layers, slots, kv_heads];
    ``rooms``: tokens of a page in each table.

    ``wanted``: int32 [layers, slots, kv_heads, tables or more]
    """
    tables, layers, _, heads = tokens.shape
    counts = np.zeros(len(slots), np.int64)
    for layer in range(layers):
        for at in range(len(slots)):
            for head in range(heads):
                for table in range(tables):
                    have = _pages(tokens[table, layer, slots[at], head], rooms[table])
                    want = _pages(wanted[layer, at, head, table], rooms[table])
                    counts[at] += max(0, want - have)
    return counts


@kernel
def append_pages(entries, tokens, slots, wanted, rooms, ids, first):
    """Put the pages that are lacking behind those that the rows of each slot have, row after row.

    The first table's pages lie in ``entries`` from the left, those of a second one from the right.
    Pages of a slot are in ``ids`` from ``first`` [slots] on, which then points behind them.

    Raises: IndexError if a row cannot have so many, or there are fewer ``ids`` than are lacking
    """
    tables, layers, _, heads = tokens.shape
    width = entries.shape[3]
    for layer in range(layers):
        for at in range(len(slots)):
            slot = slots[at]
            for head in range(heads):
                for table in range(tables):
                    have = _pages(tokens[table, layer, slot, head], rooms[table])
                    want = _pages(wanted[layer, at, head, table], rooms[table])
                    if want > width or first[at] + want - have > len(ids):
                        raise IndexError("a row of a page table lacks more pages than there are")
                    for column in range(have, want):
                        entry = column if table == 0 else width - 1 - column
                        entries[layer, slot, head, entry] = ids[first[at]]
                        first[at] += 1


@kernel
def _pages(tokens, room):
    return (np.int64(tokens) + room - 1) // room


@kernel
def save_retirement(pages, plan, slots, room, saved_pages, saved_plan, retired, retired_after):
    """Keep the table of some slots as it is, what is planned for them, [layers, slots, ...], and
    how many of their tokens will have left it when a page has."""
    layers, _, heads, width = pages.shape
    for at in range(len(slots)):
        retired_after[slots[at]] = retired[slots[at]] + room
    for layer in range(layers):
        for at in range(len(slots)):
            slot = slots[at]
            for head in range(heads):
                for column in range(width):
                    saved_pages[layer, slot, head, column] = pages[layer, slot, head, column]
                for number in range(plan.shape[3]):
                    saved_plan[layer, slot, head, number] = plan[layer, at, head, number]


@kernel
def move_page_to_end(pages, tokens, before, slots, column, last, room, class_tokens, counts):
    """Let one page of each row of some slots be empty, and the next one to be written.

    The row's tokens fill its pages up to column ``last``, where the page comes; what lies between
    moves up. ``before`` is the table as it was, so that this can be done again after half of it
    was. ``counts`` are the tokens of each class from now on, int32 [layers, slots, kv_heads,
    classes or more].

    Returns: the pages, int32 [slots, layers * kv_heads]
    """
    layers, _, heads, _ = pages.shape
    moved = np.empty((len(slots), layers * heads), np.int32)
    for layer in range(layers):
        for at in range(len(slots)):
            slot = slots[at]
            for head in range(heads):
                page = before[layer, slot, head, column]
                for place in range(column, last):
                    pages[layer, slot, head, place] = before[layer, slot, head, place + 1]
                pages[layer, slot, head, last] = moved[at, layer * heads + head] = page
                tokens[layer, slot, head] -= room
                for each in range(class_tokens.shape[0]):
                    class_tokens[each, layer, slot, head] = counts[layer, at, head, each]
    return moved
