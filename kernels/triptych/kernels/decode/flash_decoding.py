# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""FlashDecoding on the CPU: splits head rows into runs of pages and merges the results."""

from collections import namedtuple

import numpy as np
from numba import carray

from triptych.kernels.codegen.jobs import job_start
from triptych.kernels.codegen.numba_runtime import (
    call_page_step,
    fetch_add,
    kernel,
    pointer,
    run_team,
    team_body,
)

STEP, PAGE_TOKENS, WIDTH, PAGES, PAGES_SLOT, PAGES_HEAD, PAGES_ENTRY = range(7)
TOKENS, TOKENS_SLOT, TOKENS_HEAD, SLOTS, PAGE_BYTES, PAGE_COUNT = range(7, 13)
SECTION_COLUMNS = 13
"""Number of columns of the table of sections: addresses, and strides in elements."""

NO_SLOT = -1
"""Of a request whose tokens are not scored."""
SERIAL_PAGES = 64
"""Up to so many pages one thread reads all (15 us): waking a second thread takes longer."""
RUN_PAGES = 16
"""Most pages of a run. A constant, so that the output for a request does not depend on the other
requests of the batch."""

Job = namedtuple(
    "Job",
    "query query_stride out slots positions lse rows window"
    " arena kv_heads group dim scratch_floats sections section_count"
    " scale cap weight"
    " list_rows list_count ordinals list_stride list_head list_entries counts count_slot count_head"
    " runs run_count partial counter bad",
)
"""Arguments of all threads: sizes, and addresses of shared arrays."""
JOB_WORDS = len(Job._fields)
RECORD_WORDS = 7
"""Of a job of ``record``: addresses of counts, slots and positions; rows, layer, layers, counts."""


@kernel
def _job(address):
    words = carray(pointer(address), JOB_WORDS, np.int64)
    numbers = carray(pointer(address), JOB_WORDS, np.float64)
    return Job(
        words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7],
        words[8], words[9], words[10], words[11], words[12], words[13], words[14],
        np.float32(numbers[15]), np.float32(numbers[16]), np.float32(numbers[17]),
        words[18], words[19], words[20], words[21], words[22], words[23], words[24], words[25],
        words[26], words[27], words[28], words[29], words[30], words[31],
    )  # fmt: skip


@kernel
def _sections(job):
    return carray(pointer(job.sections), (job.section_count, SECTION_COLUMNS), np.int64)


@kernel
def _count_pages(job):
    """Pages of each head row over all sections, [R * KH]; -1 if a slot or count is out of range."""
    slots = carray(pointer(job.slots), job.rows, np.int32)
    pages = np.zeros(job.rows * job.kv_heads, np.int64)
    for row in range(len(pages)):
        slot, head = np.int64(slots[row // job.kv_heads]), row % job.kv_heads
        if slot == NO_SLOT and job.weight > 0:
            continue
        for section in _sections(job):
            tokens = _tokens(section, slot, head) if 0 <= slot < section[SLOTS] else -1
            if tokens < 0 or tokens > section[WIDTH] * section[PAGE_TOKENS]:
                pages[row] = -1
                break
            pages[row] += -(-tokens // section[PAGE_TOKENS])
        if pages[row] >= 0 and _list_of(job, row // job.kv_heads) >= 0:
            pages[row] = _listed(job, row, pages[row])
    return pages


@kernel
def _list_of(job, request):
    """Index of the page list of a request; -1: it reads all pages."""
    if not job.list_rows:
        return np.int64(-1)
    return np.int64(carray(pointer(job.list_rows + 4 * request), 1, np.int32)[0])


@kernel
def _listed(job, row, pages):
    """Length of the page list of a head row; -1 if the list is out of range or too long."""
    place, head = _list_of(job, row // job.kv_heads), row % job.kv_heads
    if place >= job.list_count:
        return np.int64(-1)
    at = job.counts + 4 * (place * job.count_slot + head * job.count_head)
    count = np.int64(carray(pointer(at), 1, np.int32)[0])
    return count if count <= min(pages, job.list_entries) else np.int64(-1)


@kernel
def _entries(job, row):
    """Address of the page list of a head row; 0 if it reads all pages."""
    place, head = _list_of(job, row // job.kv_heads), row % job.kv_heads
    if place < 0:
        return np.int64(0)
    return job.ordinals + 4 * (place * job.list_stride + head * job.list_head)


@kernel
def _cut(pages, longest):
    """Split rows into runs (head row, first page, pages, runs of the row), row after row."""
    count = 0
    for row in range(len(pages)):
        count += max(1, -(-pages[row] // longest))
    runs = np.empty((count, 4), np.int64)
    index = 0
    for row in range(len(pages)):
        parts = max(1, -(-pages[row] // longest))
        for part in range(parts):
            first, end = pages[row] * part // parts, pages[row] * (part + 1) // parts
            runs[index, 0], runs[index, 1] = row, first
            runs[index, 2], runs[index, 3] = end - first, parts
            index += 1
    return runs


@kernel
def _take_runs(job):
    """Take runs from the shared counter until none is left."""
    size = job.group * (job.dim + 2)
    runs = carray(pointer(job.runs), (job.run_count, 4), np.int64)
    partial = carray(pointer(job.partial), (job.run_count, size), np.float32)
    query = np.empty(job.group * (job.dim + 1), np.float32)
    scratch = np.empty(job.scratch_floats, np.float32)
    while True:
        index = fetch_add(job.counter, 1)
        if index >= job.run_count:
            break
        state = partial[index]
        _prepare(job, runs[index, 0], query, state)
        if not _attend_run(job, runs[index], query, state, scratch):
            fetch_add(job.bad, 1)
        if runs[index, 3] == 1 and job.weight == 0:
            _finish(job, runs[index, 0], state)


@kernel
def _prepare(job, row, query, state):
    """Scale and sum the queries of one KV head, and clear the running softmax.

    For scores, the state instead has the log2 of the finished sums, and the weight.
    """
    group, dim = job.group, job.dim
    token, head = row // job.kv_heads, row % job.kv_heads
    first = token * job.query_stride + head * group * dim
    near = carray(pointer(job.query + 4 * first), group * dim, np.float32)
    for head in range(group):
        total = np.float32(0.0)
        for channel in range(dim):
            number = near[head * dim + channel] * job.scale
            query[head * dim + channel] = number
            total += number
        query[group * dim + head] = total
    state[: group * dim] = 0.0
    state[group * dim : group * (dim + 1)] = -1e30
    state[group * (dim + 1) :] = 0.0
    if job.weight > 0:
        finished = carray(pointer(job.lse + 4 * row * group), group, np.float32)
        for head in range(group):
            state[group * dim + head] = finished[head] * np.float32(1.0 / np.log(2.0))
            state[group * (dim + 1) + head] = job.weight


@kernel
def _attend_run(job, run, query, state, scratch):
    """Attend to the pages of a run, section by section; False if a page id is out of range.

    A run is a range of the row's pages, or of its page list, which is ascending. A page is read
    once the address of the next one is computed, so that the next one is prefetched meanwhile.
    """
    row, skip, left = run[0], run[1], run[2]
    request, head = row // job.kv_heads, row % job.kv_heads
    slot = carray(pointer(job.slots + 4 * request), 1, np.int32)[0]
    oldest = np.int32(0)
    if job.window > 0:
        position = carray(pointer(job.positions + 4 * request), 1, np.int32)[0]
        oldest = np.int32(position - job.window + 1)
    step = page = live = np.int64(0)
    sections, listed = _sections(job), _entries(job, row)
    which, begin, end, tokens, room, table = -1, np.int64(0), np.int64(0), 0, 1, np.int64(0)
    for place in range(skip, skip + left):
        ordinal = np.int64(place)
        if listed:
            ordinal = np.int64(carray(pointer(listed + 4 * place), 1, np.int32)[0])
        while ordinal >= end and which + 1 < len(sections):
            which, begin = which + 1, end
            section = sections[which]
            tokens, room = _tokens(section, slot, head), section[PAGE_TOKENS]
            table = section[PAGES] + 4 * (slot * section[PAGES_SLOT] + head * section[PAGES_HEAD])
            end = begin + -(-tokens // room)
        if not begin <= ordinal < end:
            return False
        index, section = ordinal - begin, sections[which]
        entry = carray(pointer(table + 4 * index * section[PAGES_ENTRY]), 1, np.int32)
        if entry[0] < 0 or entry[0] >= section[PAGE_COUNT]:
            return False
        upcoming = job.arena + np.int64(entry[0]) * section[PAGE_BYTES]
        if live > 0:
            call_page_step(
                step, page, upcoming, live, query.ctypes.data, state.ctypes.data,
                scratch.ctypes.data, oldest, job.cap,
            )  # fmt: skip
        step, page, live = section[STEP], upcoming, min(room, tokens - index * room)
    if live > 0:
        call_page_step(
            step, page, page, live, query.ctypes.data, state.ctypes.data,
            scratch.ctypes.data, oldest, job.cap,
        )  # fmt: skip
    return True


@kernel
def _tokens(section, slot, head):
    offset = slot * section[TOKENS_SLOT] + head * section[TOKENS_HEAD]
    return np.int64(carray(pointer(section[TOKENS] + 4 * offset), 1, np.int32)[0])


@kernel
def _finish(job, row, state):
    """Divide the outputs of one KV head by the sums of weights; write ``lse`` if given."""
    group, dim = job.group, job.dim
    out = carray(pointer(job.out + 4 * row * group * dim), group * dim, np.float32)
    for head in range(group):
        total = state[group * (dim + 1) + head]
        if job.lse:
            lse = carray(pointer(job.lse + 4 * (row * group + head)), 1, np.float32)
            lse[0] = (state[group * dim + head] + np.log2(total)) * np.float32(np.log(2.0))
        factor = np.float32(1.0) / total if total > 0 else np.float32(0.0)
        for channel in range(dim):
            out[head * dim + channel] = state[head * dim + channel] * factor


@kernel
def _merge(job, runs, partial):
    """Merge the running softmaxes of head rows that were split into several runs."""
    index = 0
    while index < len(runs):
        parts = runs[index, 3]
        for other in range(index + 1, index + parts):
            _merge_state(job.group, job.dim, partial[index], partial[other])
        if parts > 1:
            _finish(job, runs[index, 0], partial[index])
        index += parts


@kernel
def _merge_state(group, dim, state, other):
    """Merge the running softmax ``other`` into ``state``."""
    for head in range(group):
        largest_at, sum_at = group * dim + head, group * (dim + 1) + head
        largest = max(state[largest_at], other[largest_at])
        rescale = np.exp2(state[largest_at] - largest)
        other_rescale = np.exp2(other[largest_at] - largest)
        for channel in range(head * dim, (head + 1) * dim):
            state[channel] = state[channel] * rescale + other[channel] * other_rescale
        state[sum_at] = state[sum_at] * rescale + other[sum_at] * other_rescale
        state[largest_at] = largest


@job_start
def attend(address, body, team, threads):
    """Attention of all head rows; 1 if a slot, a count or a page id is out of range.

    At ``address`` are the fields of a ``Job``; those from ``runs`` on are set here. Threads take
    runs from a shared counter, which balances the load.
    """
    words = carray(pointer(address), JOB_WORDS, np.int64)
    job = _job(address)
    pages = _count_pages(job)
    total = 0
    for count in pages:
        if count < 0:
            return 1
        total += count
    if total <= SERIAL_PAGES:
        threads = 1
    runs = _cut(pages, RUN_PAGES)
    partial = np.empty((len(runs), job.group * (job.dim + 2)), np.float32)
    shared = np.zeros(2, np.int64)
    words[JOB_WORDS - 5] = runs.ctypes.data
    words[JOB_WORDS - 4] = len(runs)
    words[JOB_WORDS - 3] = partial.ctypes.data
    words[JOB_WORDS - 2] = shared[:1].ctypes.data
    words[JOB_WORDS - 1] = shared[1:].ctypes.data
    run_team(team, body, words, threads)
    if job.weight == 0:
        _merge(job, runs, partial)
    return 1 if shared[1] else 0


@job_start
def record(address, body, team, threads):
    """``record_scores``; 1 if a slot is out of range."""
    words = carray(pointer(address), RECORD_WORDS, np.int64)
    progress = carray(pointer(words[0]), words[6], np.int64)
    slots = carray(pointer(words[1]), words[3], np.int32)
    positions = carray(pointer(words[2]), words[3], np.int32)
    for row in range(len(slots)):
        if slots[row] >= len(progress):
            return 1
        if slots[row] >= 0:
            progress[slots[row]] = np.int64(positions[row]) * words[5] + words[4] + 1
    return 0


@team_body
def take_runs(address):
    """The function that each thread of ``attend`` runs."""
    _take_runs(_job(address))
