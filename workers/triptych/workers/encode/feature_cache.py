"""Cache of image features by content, in pages of the encode worker."""

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from triptych.core.errors import PoolExhausted
from triptych.kvpool import WorkerPool
from triptych.workers.kv.feature_pages import Ids, pages_of_image, write_features

ImageKey = tuple[str, bytes]
"""Cache salt and digest of an image: features are never shared between salts."""


@dataclass
class FeatureCache:
    """Features of the images that were used last, up to ``capacity_pages`` pages.

    They belong to this worker: when it dies, the pool frees them.

    Source: EPD disaggregation (media-token cache)
    """

    pool: WorkerPool
    capacity_pages: int
    _pages: OrderedDict[ImageKey, Ids] = field(default_factory=OrderedDict[ImageKey, Ids])
    _used: int = 0

    def find(self, key: ImageKey) -> Ids | None:
        """Pages with the features of an image; None if they are not cached."""
        pages = self._pages.get(key)
        if pages is not None:
            self._pages.move_to_end(key)
        return pages

    def put(self, key: ImageKey, features: Tensor) -> None:
        """Cache the features of an image, if they fit.

        Shapes:  features (rows, channels) float32
        """
        rows, channels = features.shape
        count = pages_of_image(rows, channels, self.pool.page_bytes)
        if key in self._pages or count > self.capacity_pages:
            return
        while self._used + count > self.capacity_pages:
            self._evict()
        try:
            pages = self.pool.allocate(count, self.pool.arena.id)
        except PoolExhausted:
            return
        write_features(self.pool, features, pages)
        self._pages[key] = pages
        self._used += count

    def _evict(self) -> None:
        _, pages = self._pages.popitem(last=False)
        self._used -= len(pages)
        self.pool.free(pages)
