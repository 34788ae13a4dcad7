"""The encode stage: computes features of images, and hands them to prefill in pages of the pool."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from triptych.core.errors import MessageError, RequestError, StageLost, TriptychError
from triptych.core.images import Image, ImageLayout, ImageSpan
from triptych.core.messages import (
    ROUTER,
    EncodeImages,
    ImageData,
    ImagesEncoded,
    ImagesRead,
    Message,
    Send,
    Stage,
    WantImages,
)
from triptych.kvpool import About, WorkerPool
from triptych.workers.core_scheduler import CoreUse
from triptych.workers.encode.feature_cache import FeatureCache, ImageKey
from triptych.workers.kv.feature_pages import (
    Ids,
    copy_features,
    feature_handle,
    label_of,
    pages_of_image,
    write_features,
)
from triptych.workers.stage import refuse

logger = logging.getLogger(__name__)

ASK_AHEAD = 2
"""Pixels that are asked for or wait here, in units of a step's. The rest stays at the ingress."""
PIXELS_WAIT_S = 30.0
"""Time for which a request waits for its pixels."""


class Tower(Protocol):
    """``VisionTower``, as far as the engine uses it."""

    @property
    def layout(self) -> ImageLayout: ...
    @property
    def channels(self) -> int: ...
    def encode(self, images: Sequence[Image]) -> Sequence[Tensor]: ...


@dataclass
class _Work:
    """A request, and the pages of those of its images that are encoded."""

    message: EncodeImages
    until: float
    """When it has waited too long for pixels."""
    pages: dict[bytes, Ids] = field(default_factory=dict[bytes, Ids])
    """By digest."""
    cached: int = 0

    def key(self, digest: bytes) -> ImageKey:
        return (self.message.cache_salt, digest)

    @property
    def rows(self) -> dict[bytes, int]:
        """Features of each image, by digest."""
        return {image.digest: image.features for image in self.message.images}

    @property
    def missing(self) -> list[bytes]:
        """Digests of images without features, each once."""
        return [digest for digest in self.rows if digest not in self.pages]


@dataclass
class EncodeEngine:
    """The engine of the encode stage: encodes images in batches of ``max_batch_pixels`` pixels.

    The ingress sends pixels when they are asked for, so images whose features are cached are not
    sent at all. An image that several requests need, or that a request has twice, is encoded once.
    Each request gets pages of its own, so that it shares no page with another tenant's.

    Source: EPD disaggregation (encode stage)
    """

    tower: Tower
    pool: WorkerPool
    cache: FeatureCache
    max_batch_pixels: int
    clock: Callable[[], float] = time.monotonic
    stage: Stage = "encode"
    encoded: int = 0
    """Images encoded so far."""
    _work: dict[str, _Work] = field(default_factory=dict[str, _Work])
    _unasked: deque[tuple[str, bytes]] = field(default_factory=deque[tuple[str, bytes]])
    """Requests and digests of pixels that are still to be asked for."""
    _asked: dict[tuple[str, bytes], int] = field(default_factory=dict[tuple[str, bytes], int])
    """Pixels that were asked for, by request and digest."""
    _queue: OrderedDict[ImageKey, Image] = field(default_factory=OrderedDict[ImageKey, Image])
    """Images to encode, in order of arrival."""
    _handed: set[str] = field(default_factory=set[str])
    """Requests whose features are under a lease for prefill."""

    # ---------------------------------------------------------------- the Engine protocol

    def accept(self, message: Message) -> Iterable[Send] | None:
        match message:
            case EncodeImages():
                return self._begin(message)
            case ImageData():
                return self._take(message)
            case ImagesRead():
                self.cancel([message.request])
                return ()
            case _:
                return None

    def has_work(self) -> bool:
        return bool(self._queue) or any(work.until <= self.clock() for work in self._work.values())

    def wait_s(self) -> float | None:
        due = min((work.until for work in self._work.values()), default=None)
        return None if due is None else max(0.0, due - self.clock())

    def is_late(self) -> bool:
        return False

    def core_use(self) -> CoreUse:
        return CoreUse.TEAM

    def requests(self) -> list[str]:
        return list(self._work)

    def cancel(self, requests: Sequence[str]) -> None:
        for request in requests:
            self._drop(request)
        handed = [request for request in requests if request in self._handed]
        if handed:
            self._handed.difference_update(handed)
            self.pool.withdraw([label_of(request) for request in handed])

    def abandon(self) -> None:
        self.cancel([*self._work, *self._handed])
        self._queue.clear()

    def step(self) -> Iterable[Send]:
        sends = self._refuse_late()
        batch = self._batch()
        if not batch:
            return sends
        for key, features in self._encode(batch, sends):
            self.encoded += 1
            self.cache.put(key, features)
            for work in self._waiting(key):
                self._give(work, key[1], features, sends)
        return [*sends, *self._ask()]

    # ---------------------------------------------------------------- a request

    def _begin(self, message: EncodeImages) -> list[Send]:
        work = _Work(message, self.clock() + PIXELS_WAIT_S)
        if message.request in self._work or message.request in self._handed:
            return []
        try:
            self._check(message.images)
        except TriptychError as error:
            return [refuse(message.request, error)]
        self._work[message.request] = work
        for digest in work.missing:
            cached = self.cache.find(work.key(digest))
            if cached is None:
                self._unasked.append((message.request, digest))
                continue
            count = pages_of_image(work.rows[digest], self.tower.channels, self.pool.page_bytes)
            try:
                work.pages[digest] = self.pool.allocate(count, self.pool.arena.id)
            except TriptychError as error:
                self._drop(message.request)
                return [refuse(message.request, error)]
            copy_features(self.pool, cached, work.pages[digest])
            work.cached += 1
        return self._hand_off(work) if not work.missing else self._ask()

    def _check(self, images: Iterable[ImageSpan]) -> None:
        """Raises: RequestError or MessageError for an image that has other features here"""
        for image in images:
            expected = self.tower.layout.features(image.width, image.height)
            if image.features != expected:
                size = f"{image.width} x {image.height} pixels"
                raise MessageError(f"an image of {size} has {expected} features here")

    def _ask(self) -> list[Send]:
        """Ask for pixels, as many as may wait here."""
        sends, most = list[Send](), ASK_AHEAD * self.max_batch_pixels
        here = sum(image.width * image.height for image in self._queue.values())
        while self._unasked:
            request, digest = self._unasked[0]
            work = self._work.get(request)
            if work is None or digest in work.pages or work.key(digest) in self._queue:
                self._unasked.popleft()
                continue
            pixels = next(one.pixels for one in work.message.images if one.digest == digest)
            busy = here + sum(self._asked.values())
            if busy and busy + pixels > most:
                break
            self._unasked.popleft()
            self._asked[request, digest] = pixels
            work.until = self.clock() + PIXELS_WAIT_S
            sends.append(Send(work.message.source, WantImages(request=request, digests=(digest,))))
        return sends

    def _take(self, message: ImageData) -> list[Send]:
        """Pixels have arrived; they are nobody's if their request has ended."""
        self._asked.pop((message.request, message.digest), None)
        work = self._work.get(message.request)
        if work is None or message.digest in work.pages:
            return self._ask()
        try:
            image = Image.of(message.width, message.height, message.rgb)
        except ValueError as error:
            self._drop(message.request)
            return [refuse(message.request, MessageError(str(error)))]
        if image.digest != message.digest:
            self._drop(message.request)
            return [refuse(message.request, MessageError("pixels of another image"))]
        self._queue.setdefault(work.key(image.digest), image)
        work.until = self.clock() + PIXELS_WAIT_S
        return self._ask()

    def _refuse_late(self) -> list[Send]:
        """Refuse requests whose pixels were asked for and have not come."""
        now = self.clock()
        late = [
            name
            for name, work in self._work.items()
            if work.until <= now and any((name, one) in self._asked for one in work.missing)
        ]
        for work in self._work.values():
            work.until = max(work.until, now + 1.0)  # looked at again then
        for name in late:
            logger.warning("%s: the pixels of its images have not come", name)
            self._drop(name)
        return [refuse(name, StageLost("encode")) for name in late]

    def _drop(self, request: str) -> None:
        work = self._work.pop(request, None)
        if work is None:
            return
        for digest in work.missing:
            self._asked.pop((request, digest), None)
        if work.pages and not self.pool.is_lost:
            self.pool.free(np.concatenate(list(work.pages.values())))
        needed = {one.key(digest) for one in self._work.values() for digest in one.missing}
        for key in [key for key in self._queue if key not in needed]:
            del self._queue[key]

    # ---------------------------------------------------------------- one step

    def _batch(self) -> list[tuple[ImageKey, Image]]:
        """The next images, up to ``max_batch_pixels``; one that is larger comes alone."""
        batch, pixels = list[tuple[ImageKey, Image]](), 0
        for key, image in self._queue.items():
            pixels += self.tower.layout.rule.pixels(image.width, image.height)
            if batch and pixels > self.max_batch_pixels:
                break
            batch.append((key, image))
        return batch

    def _encode(
        self, batch: list[tuple[ImageKey, Image]], sends: list[Send]
    ) -> Iterable[tuple[ImageKey, Tensor]]:
        """Features of the images of a batch; one that fails ends its own requests only."""
        for key, _ in batch:
            del self._queue[key]
        try:
            features = self.tower.encode([image for _, image in batch])
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    self._queue[one[0]] = one[1]
                    yield from self._encode([one], sends)
                return
            logger.exception("an image cannot be encoded")
            cause = error if isinstance(error, TriptychError) else _unusable(error)
            for work in self._waiting(batch[0][0]):
                self._drop(work.message.request)
                sends.append(refuse(work.message.request, cause))
            return
        yield from zip((key for key, _ in batch), features, strict=True)

    def _waiting(self, key: ImageKey) -> list[_Work]:
        """Requests that need an image and have no features of it."""
        salt, digest = key
        return [
            work
            for work in self._work.values()
            if work.message.cache_salt == salt and digest in work.missing
        ]

    def _give(self, work: _Work, digest: bytes, features: Tensor, sends: list[Send]) -> None:
        """Write the features of an image into pages of a request; hand them off if they are all."""
        rows, channels = features.shape
        count = pages_of_image(rows, channels, self.pool.page_bytes)
        try:
            work.pages[digest] = self.pool.allocate(count, self.pool.arena.id)
        except TriptychError as error:
            self._drop(work.message.request)
            sends.append(refuse(work.message.request, error))
            return
        write_features(self.pool, features, work.pages[digest])
        if not work.missing:
            sends += self._hand_off(work)

    def _hand_off(self, work: _Work) -> list[Send]:
        """Put the features of all images of a request under a lease for prefill."""
        message = work.message
        request, rows = message.request, work.rows
        pages = [work.pages[digest] for digest in rows]
        (lease_ref,) = self.pool.handoff(
            [(label_of(request), np.concatenate(pages))], about=[About(message.tenant)]
        )
        del self._work[request]
        self._handed.add(request)
        done = ImagesEncoded(
            request=request,
            handle=feature_handle(lease_ref, pages, list(rows.values()), self.tower.channels),
            cached=work.cached,
        )
        return [Send(message.reader, done), Send(ROUTER, done)]


def _unusable(error: Exception) -> TriptychError:
    return RequestError(f"an image cannot be processed for this model: {error}", "messages")
