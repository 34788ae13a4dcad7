# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""Features of images that prompts wait for, and their places in the steps of prefill."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import MessageError
from triptych.core.messages import FeatureHandle, ImagesEncoded, Request
from triptych.kvpool import WorkerPool
from triptych.workers.device import Device
from triptych.workers.kv.feature_pages import read_features
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.prefill.prompt_batch import PrefillChunk

MOST_UNREAD = 4096
"""Handles that are kept. One whose request never comes here was cancelled: the encode worker frees
its pages."""


@dataclass
class ImageFeatures:
    """Handles of features by request. Pages are attached only when a prompt starts."""

    pool: WorkerPool
    _unread: OrderedDict[str, FeatureHandle] = field(
        default_factory=OrderedDict[str, FeatureHandle]
    )

    def add(self, message: ImagesEncoded) -> None:
        """The encode stage is done with a request; the request itself may come later."""
        self._unread[message.request] = message.handle
        while len(self._unread) > MOST_UNREAD:
            self._unread.popitem(last=False)

    def are_there(self, requests: Sequence[Request]) -> bool:
        """Whether a prompt can start, for which one of these requests may have features."""
        return not requests[0].images or any(one.id in self._unread for one in requests)

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._unread.pop(request, None)

    def read(self, requests: Sequence[Request]) -> Tensor | None:
        """Features of the images of a prompt, in order; None: no images.

        The pages are free afterwards.

        Shapes:  -> (features of all images, channels) float32
        Raises:  StaleHandle, MessageError, PoolUnavailable, NotRegistered
        """
        images = requests[0].images
        if not images:
            return None
        request = next(one.id for one in requests if one.id in self._unread)
        handle = self._unread.pop(request)
        read = read_features(self.pool, handle)
        rows = cast("tuple[Tensor, ...]", read.split(list(handle.images)))
        digests = list(dict.fromkeys(image.digest for image in images))
        by_digest = dict(zip(digests, rows, strict=False))
        given = [len(by_digest.get(one.digest, ())) for one in images]
        if given != [one.features for one in images]:
            raise MessageError(f"{request}: features of other images")
        return torch.cat([by_digest[image.digest] for image in images])


def rows_of(chunks: Sequence[PrefillChunk], device: Device) -> FeatureRows | None:
    """The tokens of images in a step, and their features; None: there are none."""
    places, features, first = list[np.ndarray](), list[Tensor](), 0
    for chunk in chunks:
        prompt = chunk.prompt
        if prompt.features is not None:
            low, high = np.searchsorted(prompt.image_positions, (chunk.start, chunk.end))
            if low < high:
                places.append(prompt.image_positions[low:high] - chunk.start + first)
                features.append(prompt.features[int(low) : int(high)])
        first += chunk.tokens
    if not places:
        return None
    return FeatureRows(
        device.put(np.concatenate(places).astype(np.int64)),
        torch.cat(features).to(device.name),
    )
