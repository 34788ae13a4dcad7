"""Plans the merged tokens of a prompt: which of its tokens are merged, and where they will be."""

import numpy as np
from numpy.typing import NDArray

from triptych.core.images import TEXT, all_segments
from triptych.core.policy import KeyMerging
from triptych.workers.compress.job import ClassPlan, Job, LayerGroup, MergedChunks, MergedSets
from triptych.workers.compress.learned.chunk_plan import chunk_starts
from triptych.workers.device import Device

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]


def merged_class(group: LayerGroup, job: Job, device: Device) -> ClassPlan:
    """The merged tokens, and those that are stored as they are: as many in each head row."""
    leaving: Ids64 = np.arange(group.leaving.start, group.leaving.stop, dtype=np.int64)
    rule = job.plan.policy.key_merging
    if rule is None:
        merged, others = _chunks(group, job, leaving, device)
    else:
        merged, others = _sets(rule, job, leaving, device)
    rows, count = len(group.raw), sum(one.made for one in merged)
    places: Ids = np.arange(count, count + others.size, dtype=np.int32)
    counts: Ids = np.full(rows, count + others.size, np.int32)
    return ClassPlan(
        job.plan.high,
        device.put(others.astype(np.int32)),
        device.put(places).expand(rows, others.size),
        counts,
        merged=merged,
    )


def _chunks(
    group: LayerGroup, job: Job, leaving: Ids64, device: Device
) -> tuple[tuple[MergedChunks, ...], Ids64]:
    """Chunks of each modality that a network merges, and the tokens that no chunk has.

    A chunk never crosses the border of an image.
    """
    merged, others, count = list[MergedChunks](), leaving, 0
    for modality, network in job.plan.policy.mergers.items():
        chunk = network.chunk_tokens
        starts = np.array(
            [
                start
                for segment in all_segments(job.segments, job.tokens)
                if segment.modality == modality
                for start in chunk_starts(segment, chunk, group.leaving.start, group.leaving.stop)
            ],
            np.int64,
        )
        merged.append(MergedChunks(modality, network, device.put(starts), count))
        count += starts.size
        others = np.setdiff1d(others, (starts[:, None] + np.arange(chunk)).ravel())
    return tuple(merged), others


def _sets(
    rule: KeyMerging, job: Job, leaving: Ids64, device: Device
) -> tuple[tuple[MergedSets, ...], Ids64]:
    """The text tokens that a rule merges by their keys, and the tokens of images."""
    is_image = job.is_image
    text, others = leaving[~is_image[leaving]], leaving[is_image[leaving]]
    if not text.size:
        return (), others
    runs = 1 + int(np.count_nonzero(np.diff(text) > 1))
    sets = rule.sets(int((~is_image).sum()), text.size, runs)
    return (MergedSets(TEXT, rule, device.put(text), sets, first_place=0),), others
