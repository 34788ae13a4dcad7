"""The encode engine alone, with a tower that adds pixels up."""

import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from triptych.core.images import Fixed, Image, ImageLayout, ImageSpan
from triptych.core.messages import (
    ROUTER,
    EncodeImages,
    Finished,
    ImageData,
    ImagesEncoded,
    ImagesRead,
    Send,
    WantImages,
)
from triptych.kvpool import LocalPool
from triptych.workers.encode.encode_engine import PIXELS_WAIT_S, EncodeEngine
from triptych.workers.encode.feature_cache import FeatureCache
from triptych.workers.kv.feature_pages import read_features

LAYOUT = ImageLayout(placeholder=9, feature_bytes=16, rule=Fixed(tokens=(9, 9, 9)))
BATCH_PIXELS = 10


class SumTower:
    """Features of an image: its sum, in each of 4 channels of 3 tokens."""

    layout, channels = LAYOUT, 4

    def __init__(self) -> None:
        self.batches = list[int]()

    def encode(self, images: Sequence[Image]) -> Sequence[Tensor]:
        self.batches.append(len(images))
        if len({one.width for one in images}) > 1 or images[0].width == 7:
            raise RuntimeError("these cannot be encoded")
        sums = torch.tensor([float(sum(one.rgb)) for one in images])
        return list(sums[:, None, None].expand(-1, 3, 4))


def image(seed: int, width: int = 2) -> Image:
    return Image.of(width, 2, random.Random(seed).randbytes(3 * 2 * width))


class Bench:
    """An engine, and an ingress that has every image."""

    def __init__(self, cache_pages: int = 2) -> None:
        self.pool = LocalPool(64, 32, "worker")
        self.tower, self.now = SumTower(), 0.0
        cache = FeatureCache(self.pool, cache_pages)
        self.engine = EncodeEngine(
            self.tower, self.pool, cache, BATCH_PIXELS, clock=lambda: self.now
        )
        self.images = dict[bytes, Image]()
        self.asked = list[bytes]()
        self.done = dict[str, ImagesEncoded]()
        self.refused = dict[str, str]()

    def begin(self, name: str, *images: Image, salt: str = "", answers: bool = True) -> None:
        self.images |= {one.digest: one for one in images} if answers else {}
        spans = tuple(
            ImageSpan(
                runs=((3 * at, 3),),
                digest=one.digest,
                width=one.width,
                height=one.height,
                feature_bytes=48,
            )
            for at, one in enumerate(images)
        )
        message = EncodeImages(
            request=name, images=spans, cache_salt=salt, tenant="", source="ingress", reader="read"
        )
        self.deliver(self.engine.accept(message) or ())

    def deliver(self, sends: Iterable[Send]) -> None:
        for send in sends:
            match send.message:
                case WantImages(request=name, digests=digests):
                    self.asked += digests
                    for one in (self.images[d] for d in digests if d in self.images):
                        data = ImageData(
                            request=name,
                            digest=one.digest,
                            width=one.width,
                            height=one.height,
                            rgb=one.rgb,
                        )
                        self.deliver(self.engine.accept(data) or ())
                case ImagesEncoded() as message if send.to == ROUTER:
                    self.done[message.request] = message
                case Finished(request=name, error=error):
                    self.refused[name] = "" if error is None else error.message
                case _:
                    pass

    def run(self) -> None:
        while self.engine.has_work():
            self.deliver(self.engine.step())

    def features(self, name: str) -> list[float]:
        """The first channel of all tokens, after which the pages are free."""
        return read_features(self.pool, self.done.pop(name).handle)[:, 0].tolist()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.pool.close()


def sums(*images: Image) -> list[float]:
    return [float(sum(one.rgb)) for one in images for _ in range(3)]


def test_images_are_batched_by_pixels_and_each_is_encoded_once(bench: Bench) -> None:
    one, two, three = image(1), image(2), image(3)
    bench.begin("a", one, two, one)
    bench.begin("b", two, three)
    bench.run()
    assert bench.tower.batches == [2, 1]  # 8 pixels, then what is left
    assert bench.features("a") == sums(one, two)  # an image that comes twice has one set
    assert bench.features("b") == sums(two, three)
    bench.begin("c", three)
    assert bench.features("c") == sums(three)
    assert sum(bench.tower.batches) == 3


def test_the_cache_is_bounded_and_salts_share_nothing() -> None:
    bench = Bench(cache_pages=4)  # two images of 48 bytes in pages of 32
    for number, seed in enumerate((1, 2, 3, 1)):
        bench.begin(f"r{number}", image(seed))
        bench.run()
        bench.features(f"r{number}")
    assert bench.engine.encoded == 4
    bench.begin("other", image(1), salt="other")
    bench.run()
    assert bench.engine.encoded == 5
    bench.features("other")
    assert bench.pool.allocated_pages == 4
    bench.pool.close()


def test_one_image_that_fails_ends_its_own_requests_alone(bench: Bench) -> None:
    good, bad = image(1), image(2, width=7)
    bench.begin("good", good)
    bench.begin("bad", bad)
    bench.begin("both", good, bad)
    bench.run()
    assert bench.features("good") == sums(good)
    assert set(bench.refused) == {"bad", "both"}
    assert bench.pool.stat().request_pages == 0


def test_pixels_that_do_not_come_end_the_request_and_others_wait_for_room(bench: Bench) -> None:
    bench.begin("lost", image(1), answers=False)
    for number in range(12):  # more than may be asked for at once
        bench.begin(f"r{number}", image(10 + number))
    bench.now = PIXELS_WAIT_S + 1
    bench.run()
    assert "encode" in bench.refused.pop("lost")
    assert not bench.refused
    assert len(bench.done) == 12


@pytest.mark.parametrize("when", ["asked", "handed"])
def test_a_cancelled_request_leaves_no_page(bench: Bench, when: str) -> None:
    bench.begin("a", image(1), image(2), answers=when == "handed")
    bench.run()
    if when == "handed":
        assert bench.pool.stat().request_pages > 0
        bench.engine.accept(ImagesRead(request="a"))
    bench.engine.cancel(["a"])
    assert bench.pool.stat().request_pages == 0
    assert not bench.engine.requests()


def test_pixels_of_another_image_are_refused(bench: Bench) -> None:
    bench.begin("a", image(1), answers=False)
    data = ImageData(request="a", digest=image(1).digest, width=2, height=2, rgb=bytes(12))
    bench.deliver(bench.engine.accept(data) or ())
    assert "another image" in bench.refused["a"]
