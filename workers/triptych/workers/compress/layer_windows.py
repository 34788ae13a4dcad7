"""Which tokens of a prompt the head rows of layers with a sliding window keep."""

import numpy as np
from numpy.typing import NDArray

from triptych.workers.compress.job import Job, LayerGroup

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


def windows_of(job: Job, group: LayerGroup) -> Ids:
    """The sliding window of each head row of a group; 0: its layer has none."""
    kv_heads = job.plan.geometry.kv_heads
    first = job.rows_before(group) // kv_heads
    layers = job.plan.windows[first : first + len(group.raw) // kv_heads]
    return np.repeat(np.array(layers, np.int32), kv_heads)


def kept_tokens(job: Job, windows: Ids, positions: Ids, fixed: range) -> Mask:
    """Whether each head row stores the tokens at some positions as its own, [head rows, positions].

    ``fixed``: positions of the tokens in fixed pages, which only rows without a window have. Those
    with a window keep what the next token, and so any later one, can read.
    """
    kept = np.empty((len(windows), len(positions)), np.bool_)
    for window in np.unique(windows).tolist():
        if window:
            mine = positions >= job.plan.first_kept(job.tokens, window)
        else:
            mine = (positions < fixed.start) | (positions >= fixed.stop)
        kept[windows == window] = mine
    return kept
