# pyright: basic, reportCallIssue=false
# numba is untyped.
"""Compiled updates of page tables in host memory, for decode steps and retirements.

A page table is int32 [layers, slots, kv_heads, pages of a row], its token counts are int32
[layers, slots, kv_heads], and ``room`` is the number of tokens of a page. ``slots`` are batch
slots.

The functions are compiled because a decode step leaves the processor's caches full of weights. A
numpy call then takes five times as long as in a warm loop, and the updates of one step would take
about forty calls.
"""

import numpy as np
from numba import types

from triptych.kernels.codegen.kernel_cache import CalledKernels
from triptych.kernels.codegen.numba_runtime import kernel


@kernel
def count_new_tokens(tokens, slots, room, positions, progress, every):
    """Add one to the token count of each row of some slots, and find the slots with scores due.

    All rows of a slot have the same number of tokens, at most ``room``. Scores are due at
    positions divisible by ``every``; 0: never. ``progress``: for each slot the number of layers
    whose scores are added, over all positions; a repeated step compares it with ``before``.

    Returns: places: index of each new token in its rows, int32 [slots]; due: indices into
             ``slots`` of those with scores due; before: ``positions * layers``; and whether the
             progress of any slot is beyond ``before``
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
            raise IndexError("a row of a page table has no slot for another token")
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
    """The inputs ``slots``, ``now`` and ``first_leaving`` of ``plan_retirement`` for all layers.

    A row of the result is one slot of one layer. ``seen``: number of tokens of each slot. The
    tokens that leave raw pages are ``tokens - sink_tokens`` positions behind the newest token, and
    the first position that leaves the high window is ``lag`` positions further behind.

    Returns: int32 [3, layers * slots]: ``layer * all slots + slot``, tokens seen, first position
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
def fill_rows(pages, tokens, slot, row_tokens, room, ids):
    """Set page ids and token counts of all rows of a slot.

    ``row_tokens``: tokens of each row, [layers * kv_heads]; ``ids``: page ids, row after row.

    Raises: IndexError if a row has fewer entries than pages, or the number of ids is wrong
    """
    layers, _, heads, width = pages.shape
    at = 0
    for row in range(layers * heads):
        layer, head = row // heads, row % heads
        count = _pages(row_tokens[row], room)
        if count > width or at + count > len(ids):
            raise IndexError("a row of a page table has too few entries, or page ids are missing")
        for column in range(count):
            pages[layer, slot, head, column] = ids[at + column]
        tokens[layer, slot, head] = row_tokens[row]
        at += count
    if at < len(ids):
        raise IndexError("more page ids than the tokens of the rows need")


@kernel
def tokens_plus_one(tokens, slots):
    """Token count of each row of some slots plus one, int32 [layers, slots, kv_heads, tables]."""
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
    """Number of pages that the rows of each slot lack to hold ``wanted`` tokens, int64 [slots].

    ``tokens``: token counts of the tables that share the entries of a row, [tables, layers, slots,
    kv_heads]; ``rooms``: tokens of a page in each table; ``wanted``: int32 [layers, slots,
    kv_heads, tables or more].
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
    """Append the pages that the rows of each slot lack to hold ``wanted`` tokens, row after row.

    The first table fills ``entries`` from the left, a second one from the right. The ids of slot
    number i start at ``ids[first[i]]``; ``first`` [slots] is advanced past them.

    Raises: IndexError if a row has fewer entries than pages, or there are too few ``ids``
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
    """Save page table, retirement plan and retired tokens of some slots before a retirement.

    ``plan``: int32 [layers, slots, kv_heads, numbers]. ``retired_after``: ``retired`` plus the
    ``room`` tokens that retire.
    """
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
def remove_pages(
    pages, tokens, before, slots, column, count, used, room, class_tokens, counts
):  # fmt: skip
    """Remove ``count`` pages from ``column`` on from each row of some slots.

    The pages behind them, of ``used`` in all, move to the left, and the row has ``room`` tokens
    less. ``before`` is the table before the call, so that an interrupted call can be repeated.
    ``counts``: new token counts of each class, int32 [layers, slots, kv_heads, classes or more].

    Returns: the removed page ids, int32 [slots, layers * kv_heads * count]
    """
    layers, _, heads, _ = pages.shape
    moved = np.empty((len(slots), layers * heads * count), np.int32)
    for layer in range(layers):
        for at in range(len(slots)):
            slot = slots[at]
            for head in range(heads):
                first = (layer * heads + head) * count
                for place in range(count):
                    moved[at, first + place] = before[layer, slot, head, column + place]
                for place in range(column, used - count):
                    pages[layer, slot, head, place] = before[layer, slot, head, place + count]
                tokens[layer, slot, head] -= room
                for each in range(class_tokens.shape[0]):
                    class_tokens[each, layer, slot, head] = counts[layer, at, head, each]
    return moved


_WORD, _LIST, _IDS = types.int64, types.int32[::1], types.int64[::1]
_COUNTS, _TABLE, _REVERSED = (
    types.int32[:, :, ::1],
    types.int32[:, :, :, ::1],
    types.int32[:, :, :, :],
)

CALLS = CalledKernels(
    (count_new_tokens, (_COUNTS, _LIST, _WORD, _LIST, _IDS, _WORD)),
    (retirement_inputs, (_COUNTS, _LIST, _LIST, _WORD, _WORD)),
    *((fill_rows, (pages, _COUNTS, _WORD, _LIST, _WORD, _LIST)) for pages in (_TABLE, _REVERSED)),
    (tokens_plus_one, (_TABLE, _LIST)),
    *((count_lacking, (_TABLE, _LIST, wanted, _LIST)) for wanted in (_TABLE, _REVERSED)),
    *(
        (append_pages, (_TABLE, _TABLE, _LIST, wanted, _LIST, _LIST, _IDS))
        for wanted in (_TABLE, _REVERSED)
    ),
    (save_retirement, (_TABLE, _TABLE, _LIST, _WORD, _TABLE, _TABLE, _LIST, _LIST)),
    (remove_pages, (_TABLE, _COUNTS, _TABLE, _LIST, *[_WORD] * 4, _TABLE, _REVERSED)),
)
"""How workers call the kernels."""
