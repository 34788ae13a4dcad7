# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled page selection by the scores of summaries, in the threads of torch."""

from collections import namedtuple

import numpy as np
from numba import carray, types

from triptych.core.head_budgets import BUDGET_STEPS
from triptych.kernels.codegen.kernel_cache import CalledKernels
from triptych.kernels.codegen.numba_runtime import (
    call_score_tile,
    fetch_add,
    kernel,
    pointer,
    run_team,
    summing_kernel,
    team_body,
)
from triptych.kernels.select.cpu_summaries import block_of
from triptych.kernels.select.summary import BLOCKS, POSITIONS, TILE_PAGES, WHOLE

ROOM, WIDTH, TOKENS, TOKENS_SLOT, TOKENS_HEAD, COUNT_SLOTS = range(6)
TILE_AT, TILE_SLOT, TILE_HEAD, TILE_COUNT, PARTS = range(6, 11)
SECTION_COLUMNS = 11
"""Number of columns of the table of sections; without summaries ``TILE_AT`` is 0."""

BUDGET_STEP_SIZE = WHOLE // BUDGET_STEPS
SERIAL_PAGES = 512
"""Up to so many pages one thread scores all (10 us): waking a second thread takes longer."""

Job = namedtuple(
    "Job",
    "counter bad query slots positions rows"
    " list_rows list_count ordinals list_stride list_head list_entries counts count_slot count_head"
    " head_budgets scores score_row score_head"
    " kv_heads group dim sections section_count step keep budget sinks window"
    " kind codes numbers"
    " scale omitted",
)
JOB_WORDS = len(Job._fields)

MOMENTS, BOX, TOKEN_CODES = range(3)
WORDS = {"moments": MOMENTS, "box": BOX, "a2ats": TOKEN_CODES}
"""Kinds of summaries as words of a job."""

FORCED = np.int32(2**31 - 1)
"""Key of a page that is always read; above the key of every score."""
LOWEST = np.int32(-(2**31))


@kernel
def run_choice(words, team, body, threads):
    """Select pages for all head rows; False if a slot, a count or a list is out of range."""
    job = _job(words.ctypes.data)
    sections = _sections(job)
    most = _max_pages(sections)
    few = job.rows * job.kv_heads * most <= SERIAL_PAGES
    run_team(team, body, words, 1 if few else threads)
    return words[1] == 0


@kernel
def _job(address):
    words = carray(pointer(address), JOB_WORDS, np.int64)
    numbers = carray(pointer(address), JOB_WORDS, np.float64)
    return Job(
        words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7],
        words[8], words[9], words[10], words[11], words[12], words[13], words[14], words[15],
        words[16], words[17], words[18], words[19], words[20], words[21], words[22], words[23],
        words[24], words[25], words[26], words[27], words[28], words[29], words[30], words[31],
        np.float32(numbers[32]), np.float32(numbers[33]),
    )  # fmt: skip


@kernel
def _sections(job):
    return carray(pointer(job.sections), (job.section_count, SECTION_COLUMNS), np.int64)


@kernel
def _max_pages(sections):
    """Largest number of pages of a head row, from the widths of the tables."""
    most = 0
    for section in sections:
        most += section[WIDTH]
    return most


@kernel
def _choose(job, sections, row, keys, found, query, masses):
    """Write the list of one head row; False if a slot, a count or a list is out of range."""
    request, head = row // job.kv_heads, row % job.kv_heads
    slot = np.int64(_word(job.slots, request))
    place = np.int64(_word(job.list_rows, request))
    if place >= job.list_count:
        return False
    pages, forced, small, tokens = _mark_required(
        job, sections, slot, head, _word(job.positions, request), keys
    )
    if pages < 0:
        return False
    share = _share(job, head, tokens)
    budget = min(pages, max(forced, small - (small - pages) * share // WHOLE))
    if budget > job.list_entries:
        return False
    if budget < pages or job.scores:
        if job.kind == TOKEN_CODES:
            _score_codes(job, sections, slot, head, row, keys, found)
        else:
            _prepare(job, row, query)
            _score(job, sections, slot, head, keys, found, query, masses)
        if job.scores:
            _write_scores(job, request, head, keys[:pages])
        if job.omitted > 0:
            shares, powers = masses[: job.group, :pages], masses[job.group :, :pages]
            budget = max(budget, _count_for_mass(keys[:pages], shares, powers, job.omitted))
            if budget > job.list_entries:
                return False
    ordinals = carray(
        pointer(job.ordinals + 4 * (place * job.list_stride + head * job.list_head)),
        job.list_entries, np.int32,
    )  # fmt: skip
    count = carray(
        pointer(job.counts + 4 * (place * job.count_slot + head * job.count_head)), 1, np.int32
    )
    _write_list(keys[:pages], budget, ordinals)
    count[0] = budget
    return True


@kernel
def _share(job, head, tokens):
    """Share of the pages of a head row that are read, in parts of ``WHOLE`` (``Rule.pages``)."""
    mean = min(WHOLE, max(job.keep, job.budget * WHOLE // max(1, tokens)))
    if job.head_budgets == 0:
        return mean
    step, rest = mean // BUDGET_STEP_SIZE, mean % BUDGET_STEP_SIZE
    first = head * (BUDGET_STEPS + 1)
    low = np.int64(_word(job.head_budgets, first + step))
    high = np.int64(_word(job.head_budgets, first + min(step + 1, BUDGET_STEPS)))
    return low + -(-(high - low) * rest // BUDGET_STEP_SIZE)


@kernel
def _word(address, index):
    return carray(pointer(address + 4 * np.int64(index)), 1, np.int32)[0]


@kernel
def _tokens(section, slot, head):
    """Number of tokens of a head row in a section."""
    offset = slot * section[TOKENS_SLOT] + head * section[TOKENS_HEAD]
    return np.int64(_word(section[TOKENS], offset))


@kernel
def _mark_required(job, sections, slot, head, position, keys):
    """Set the keys of pages that are always read to ``FORCED``, those of others to ``LOWEST``.

    Returns: pages of the row, -1 if a section has no such row; forced pages; how many fewer pages
             of the arena they are; tokens of the row
    """
    pages = forced = small = total = np.int64(0)
    newest = np.int32(position - job.window)
    for section in sections:
        if not 0 <= slot < section[COUNT_SLOTS]:
            return np.int64(-1), forced, small, total
        tokens = _tokens(section, slot, head)
        count, full = -(-tokens // section[ROOM]), _competing(section, tokens)
        if tokens < 0 or count > section[WIDTH]:
            return np.int64(-1), forced, small, total
        if full > section[TILE_COUNT] * TILE_PAGES:
            return np.int64(-1), forced, small, total
        for first in range(0, full, TILE_PAGES):
            at = _tile(job, section, slot, head, first)
            at += TILE_PAGES * _code_bytes(job, section)
            ends = carray(pointer(at), 2 * TILE_PAGES, np.int32)
            for page in range(min(TILE_PAGES, full - first)):
                competes = ends[page] >= job.sinks and ends[TILE_PAGES + page] <= newest
                keys[pages + first + page] = LOWEST if competes else FORCED
                forced += 0 if competes else 1
        keys[pages + full : pages + count] = FORCED
        forced += count - full
        pages += count
        small += count - -(-count // section[PARTS])
        total += tokens
    return pages, forced, small, total


@kernel
def _competing(section, tokens):
    """Number of pages of a row that have scores: all but the last, if there are summaries."""
    return max(0, tokens - 1) // section[ROOM] if section[TILE_AT] else np.int64(0)


@kernel
def _tile(job, section, slot, head, page):
    at = section[TILE_AT] + slot * section[TILE_SLOT] + head * section[TILE_HEAD]
    return at + page * (_code_bytes(job, section) + 4 * POSITIONS)


@kernel
def _code_bytes(job, section):
    """Bytes of a summary in front of its positions."""
    return section[ROOM] if job.kind == TOKEN_CODES else job.codes * job.dim + 4 * job.numbers


@kernel
def _prepare(job, row, query):
    """Write the vectors that summaries are multiplied by, and their sums, to ``query``."""
    group, dim = job.group, job.dim
    near = carray(pointer(job.query + 4 * row * group * dim), group * dim, np.float32)
    second, sums = group * dim, 2 * group * dim
    for head in range(group):
        first_sum = second_sum = np.float32(0.0)
        for channel in range(head * dim, (head + 1) * dim):
            number = near[channel] * job.scale
            if job.kind == BOX:
                first, other = max(number, np.float32(0.0)), min(number, np.float32(0.0))
            else:
                first, other = number, number * number
            query[channel], query[second + channel] = first, other
            first_sum += first
            second_sum += other
        query[sums + head], query[sums + group + head] = first_sum, second_sum


@kernel
def _score(job, sections, slot, head, keys, found, query, masses):
    """Replace the ``LOWEST`` keys of pages by the keys of their scores.

    ``found``: scratch memory for the scores and the masses of a tile. ``masses`` is filled with
    the masses of all pages if ``omitted`` is above 0; pages without a summary have mass 0.
    """
    start, has_masses = np.int64(0), job.omitted > 0
    bits, of_tile = found[0].view(np.int32), found[1:]
    about_tile = query[2 * job.group * (job.dim + 1) :]
    for section in sections:
        tokens = _tokens(section, slot, head)
        full, pages = _competing(section, tokens), -(-tokens // section[ROOM])
        if has_masses:
            for block in range(BLOCKS):
                first, end = block_of(block, section[ROOM])
                about_tile[block] = end - first
            masses[: job.group, start + full : start + pages] = 0.0
            masses[job.group :, start + full : start + pages] = -np.inf
        for first in range(0, full, TILE_PAGES):
            here = min(TILE_PAGES, full - first)
            about_tile[BLOCKS] = here
            tile = _tile(job, section, slot, head, first)
            call_score_tile(
                job.step, tile, query.ctypes.data, found.ctypes.data, of_tile.ctypes.data
            )  # fmt: skip
            if has_masses:
                masses[:, start + first : start + first + here] = of_tile[:, :here]
            for page in range(here):
                if keys[start + first + page] != FORCED:
                    keys[start + first + page] = _key(bits[page])
        start += pages


@kernel
def _score_codes(job, sections, slot, head, row, keys, found):
    """As ``_score`` for codes of tokens: the largest of their logits. No masses."""
    logits = carray(pointer(job.query + 4 * np.int64(row) * job.dim), job.dim, np.float32)
    start, bits = np.int64(0), found[0].view(np.int32)
    for section in sections:
        tokens, room = _tokens(section, slot, head), section[ROOM]
        full, pages = _competing(section, tokens), -(-tokens // room)
        for first in range(0, full, TILE_PAGES):
            here = min(TILE_PAGES, full - first)
            at = _tile(job, section, slot, head, first)
            codes = carray(pointer(at), here * room, np.uint8)
            for page in range(here):
                best = np.float32(-np.inf)
                for code in codes[page * room : (page + 1) * room]:
                    best = max(best, logits[code])
                found[0, page] = best
                if keys[start + first + page] != FORCED:
                    keys[start + first + page] = _key(bits[page])
        start += pages


@kernel
def _count_for_mass(keys, masses, powers, omitted):
    """Fewest pages, largest keys first, so that the others have at most ``omitted`` of each head.

    The expected attention of a page is ``masses * 2**powers``; ``masses`` is overwritten with
    shares. Pages of equal scores are added together.
    """
    for head in range(len(masses)):
        peak = powers[head].max()
        if peak == -np.inf:
            return 0
        _to_shares(masses[head], powers[head], peak)
    low, high = np.int64(LOWEST), np.int64(FORCED)
    enough, few = len(keys), _count(keys, FORCED)
    if _fits(keys, masses, FORCED, omitted):
        return np.int64(few)
    while enough - few > 1 and high - low > 1:
        middle = (low + high) >> 1
        count = _count(keys, np.int32(middle))
        if _fits(keys, masses, np.int32(middle), omitted):
            low, enough = middle, count
        else:
            high, few = middle, count
    return np.int64(enough)


@kernel
def _to_shares(masses, powers, peak):
    """Overwrite the masses of one head with shares that sum to 1.

    Adjacent pages mostly have the same power, so the factor is kept from page to page.
    """
    total, power, factor = np.float32(0.0), peak, np.float32(1.0)
    for page in range(len(masses)):
        if powers[page] != power:
            power = powers[page]
            factor = np.float32(np.exp2(power - peak))
        masses[page] *= factor
        total += masses[page]
    for page in range(len(masses)):
        masses[page] /= total


@kernel
def _fits(keys, shares, least, omitted):
    """Whether pages with keys below ``least`` have at most ``omitted`` of every head."""
    most = np.float32(0.0)
    for head in range(len(shares)):
        most = max(most, _mass_below(keys, shares[head], least))
    return most <= omitted


@summing_kernel
def _mass_below(keys, shares, least):
    """Sum of the shares of pages with keys below ``least``."""
    total = np.float32(0.0)
    for page in range(len(keys)):
        total += shares[page] if keys[page] < least else np.float32(0.0)
    return total


@kernel
def _key(bits):
    """Map float32 bits to integers of the same order; the function is its own inverse."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(2**31 - 1))


@kernel
def _write_scores(job, request, head, keys):
    at = job.scores + 4 * (request * job.score_row + head * job.score_head)
    scores = carray(pointer(at), len(keys), np.int32)
    for page in range(len(keys)):
        scores[page] = np.int32(0x7F800000) if keys[page] == FORCED else _key(keys[page])


@kernel
def _write_list(keys, count, ordinals):
    """Write the pages of the ``count`` largest keys, of equal keys the first, in ascending order.

    The smallest chosen key is found by bisection over all int32 values: at most 32 passes over the
    keys, independent of their values.
    """
    low, high = np.int64(LOWEST), np.int64(FORCED) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        found = _count(keys, np.int32(middle))
        low, high = (middle, high) if found >= count else (low, middle)
        if found == count:
            break
    least = np.int32(low)
    equal = count - (_count(keys, np.int32(low + 1)) if least != FORCED else 0)
    written = 0
    for page in range(len(keys)):
        if keys[page] > least or (keys[page] == least and equal > 0):
            equal -= 1 if keys[page] == least else 0
            ordinals[written] = page
            written += 1


@kernel
def _count(keys, least):
    """Number of keys that are at least ``least``."""
    count = np.int32(0)
    for page in range(len(keys)):
        count += np.int32(keys[page] >= least)
    return count


@team_body
def choose_rows(address):
    job = _job(address)
    sections = _sections(job)
    most = _max_pages(sections)
    keys = np.empty(most, np.int32)
    found = np.empty((1 + 2 * job.group, TILE_PAGES), np.float32)
    masses = np.empty((2 * job.group, most if job.omitted > 0 else 0), np.float32)
    query = np.empty(2 * job.group * (job.dim + 1) + BLOCKS + 1, np.float32)
    list_rows = carray(pointer(job.list_rows), job.rows, np.int32)
    while True:
        row = fetch_add(address, 1)
        if row >= job.rows * job.kv_heads:
            break
        if list_rows[row // job.kv_heads] < 0:
            continue
        if not _choose(job, sections, row, keys, found, query, masses):
            fetch_add(address + 8, 1)


CALLS = CalledKernels((run_choice, (types.int64[::1], *[types.int64] * 3)))
"""How Python calls the kernel."""
