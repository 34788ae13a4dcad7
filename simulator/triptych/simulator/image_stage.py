"""Simulated encode engine: images in batches, and their features cached by content.

The pixels are there when they are asked for: the way to the ingress and back takes no time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.images import ImageSpan
from triptych.core.messages import (
    ROUTER,
    EncodeImages,
    FeatureHandle,
    ImagesEncoded,
    ImagesRead,
    Message,
    Send,
    Stage,
)
from triptych.simulator.costs import Costs
from triptych.simulator.setup import Cluster
from triptych.simulator.work import TAKEN, NeverQuiet, Work

SIDE = 448
"""Pixels of an image in each direction."""
FEATURE_BYTES = 2304
"""Of the default model: 576 channels."""

NamedImages = Sequence[tuple[str, int]]
"""Names and tokens of images: equal names are equal images."""


def spans_of(images: NamedImages) -> tuple[ImageSpan, ...]:
    """Images that stand at the beginning of a prompt."""
    found, at = list[ImageSpan](), 0
    for name, tokens in images:
        found.append(
            ImageSpan(
                runs=((at, tokens),),
                digest=blake2b(name.encode(), digest_size=32).digest(),
                width=SIDE,
                height=SIDE,
                feature_bytes=tokens * FEATURE_BYTES,
            )
        )
        at += tokens
    return tuple(found)


@dataclass(eq=False)
class _Waiting:
    """A request whose images are not all encoded."""

    message: EncodeImages
    missing: set[bytes]
    cached: int


class EncodeSimulation(NeverQuiet):
    """Encodes images in order of arrival, as many as ``max_batch_pixels`` allow in a step."""

    stage: Stage = "encode"

    def __init__(self, cluster: Cluster, costs: Costs, *_others: object) -> None:
        self._costs, self._config = costs, cluster.encoding
        self._waiting = list[_Waiting]()
        self._queue = OrderedDict[bytes, ImageSpan]()
        self._cached = OrderedDict[bytes, int]()
        """Bytes of features by digest, the least recently used first."""

    def accept(self, message: Message, _now: float) -> Work | None:
        if isinstance(message, ImagesRead):
            return TAKEN
        if not isinstance(message, EncodeImages):
            return None
        images = {image.digest: image for image in message.images}
        missing = {digest for digest in images if digest not in self._cached}
        for digest in images.keys() - missing:
            self._cached.move_to_end(digest)
        work = _Waiting(message, missing, len(images) - len(missing))
        if not missing:
            return Work(0.0, _done(work))
        self._waiting.append(work)
        for digest in sorted(missing):
            self._queue.setdefault(digest, images[digest])
        return TAKEN

    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def due(self) -> float:
        return inf

    def step(self) -> Work:
        batch = self._batch()
        features = sum(image.features for image in batch.values())
        sends = list[Send]()
        for work in self._waiting:
            work.missing -= batch.keys()
            if not work.missing:
                sends += _done(work)
        self._waiting = [work for work in self._waiting if work.missing]
        for digest, image in batch.items():
            self._keep(digest, image.feature_bytes)
        costs = self._costs
        return Work(costs.encode_step_s + features * costs.encode_token_s, sends)

    def _batch(self) -> dict[bytes, ImageSpan]:
        """The oldest images, one at least."""
        found, left = dict[bytes, ImageSpan](), self._config.max_batch_pixels
        while self._queue:
            digest, image = next(iter(self._queue.items()))
            left -= image.pixels
            if found and left < 0:
                break
            found[digest] = self._queue.pop(digest)
        return found

    def _keep(self, digest: bytes, size: int) -> None:
        self._cached[digest] = size
        while sum(self._cached.values()) > self._config.cache_bytes:
            self._cached.popitem(last=False)


def _done(work: _Waiting) -> list[Send]:
    """The features of a request are there: for its prefill worker, and for the router."""
    handle = FeatureHandle(
        lease_ref=LeaseRef("simulated", LeaseId(0), 0),
        pages=b"",
        images=tuple(image.features for image in work.message.images),
        channels=FEATURE_BYTES // 4,
    )
    told = ImagesEncoded(request=work.message.request, handle=handle, cached=work.cached)
    return [Send(work.message.reader, told), Send(ROUTER, told)]
