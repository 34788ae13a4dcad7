# numpy's comparisons lack types.
# pyright: reportUnknownVariableType=false
"""Prompts of which prefill has dropped tokens: rows of different lengths, all of them kept."""

import numpy as np
from numpy.typing import NDArray

from triptych.core.layout import PageLayout
from triptych.workers.compress.job import ClassPlan, Job, LayerGroup
from triptych.workers.device import Device
from triptych.workers.kv.handle_codec import pages_of

Ids = NDArray[np.int32]


def rectangular(ids: Ids, counts: Ids, layout: PageLayout) -> Ids:
    """Pages of rows of different lengths, in row order, as [head rows, most pages of a row].

    Shorter rows are filled up with their first page, which nothing reads there.
    """
    used = pages_of(counts, layout)
    ends = np.cumsum(used)
    at = np.arange(int(used.max(initial=0)))
    places = (ends - used)[:, None] + np.where(at < used[:, None], at, 0)
    return ids[places]


def classes_of_stored(job: Job, group: LayerGroup, counts: Ids, device: Device) -> list[ClassPlan]:
    """Recent pages for the sink and the newest tokens, and high ones for all others.

    ``counts``: tokens of each head row, in the order of their positions.
    """
    rows, sink = len(group.raw), group.leaving.start
    newest = job.tokens - group.leaving.stop
    recent = np.concatenate(
        [
            np.broadcast_to(np.arange(sink, dtype=np.int32), (rows, sink)),
            (counts - newest)[:, None] + np.arange(newest, dtype=np.int32),
        ],
        axis=1,
    )
    places = np.broadcast_to(np.arange(sink + newest, dtype=np.int32), recent.shape)
    full: Ids = np.full(rows, sink + newest, np.int32)
    put = device.put
    found = [ClassPlan(job.plan.recent, put(recent), put(np.ascontiguousarray(places)), full)]
    high: Ids = (counts - np.int32(sink + newest)).astype(np.int32)
    slots = np.arange(int(high.max(initial=0)), dtype=np.int32)
    in_class = np.where(slots < high[:, None], slots, np.int32(-1))
    none: Ids = np.zeros(rows, np.int32)
    for layout, mine, each in zip(
        job.plan.classes, (in_class, in_class[:, :0]), (high, none), strict=False
    ):
        tokens = put(slots[: mine.shape[1]] + np.int32(sink))
        found.append(ClassPlan(layout, tokens, put(np.ascontiguousarray(mine)), each))
    return found
