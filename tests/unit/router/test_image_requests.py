"""Requests with images: who encodes them, and what follows when that worker dies."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import MODEL, TIMEOUTS, Driver, request
from triptych.core.errors import RequestError
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.images import ImageSpan
from triptych.core.messages import (
    Cancel,
    EncodeImages,
    Failed,
    FeatureHandle,
    Finished,
    ImagesEncoded,
    ImagesRead,
    Message,
    Prefill,
    Request,
    Send,
    failed,
)

HANDLE = FeatureHandle(
    lease_ref=LeaseRef("arena", LeaseId(1), 0), pages=b"", images=(20,), channels=4
)
FEATURE_BYTES = 100_000
PLAN = replace(MODEL.plan, prefix_bytes=1 << 24)


def asks(name: str = "r", image: int = 1, pixels: int = 1000) -> Request:
    span = ImageSpan(
        runs=((5, 20),),
        digest=bytes([image]) * 32,
        width=pixels,
        height=1,
        feature_bytes=FEATURE_BYTES,
    )
    return replace(request(name), images=(span,))


def driver(*encoders: str, **settings: object) -> Driver:
    return Driver("P", "C", "D", "E", *encoders, slots=8, **settings)  # type: ignore[arg-type]


def sent(sends: list[Send], kind: type[Message]) -> list[str]:
    return [send.to for send in sends if isinstance(send.message, kind)]


def encoded(one: Driver, name: str, at: str = "I", cached: int = 0) -> list[Send]:
    return one.on(ImagesEncoded(request=name, handle=HANDLE, cached=cached), at)


def booked(one: Driver) -> int:
    return sum(one.router.snapshot(one.now).booked_bytes.values())


def test_images_go_to_an_encode_worker_beside_the_prompt_and_are_booked() -> None:
    one = driver("I")
    text = driver("I")
    assert not sent(text.submit(request()), EncodeImages)
    sends = one.submit(asks())
    assert sent(sends, Prefill) == ["P"]
    (message,) = (send.message for send in sends if isinstance(send.message, EncodeImages))
    assert (message.source, message.reader) == ("in", "P")
    assert booked(one) >= booked(text) + FEATURE_BYTES
    assert one.router.explain("r", 0.0).image_encoder == "I"
    assert [load.encode_pixels for load in one.router.snapshot(0.0).workers][-1] == 1000
    encoded(one, "r")
    assert [load.encode_pixels for load in one.router.snapshot(0.0).workers][-1] == 0
    assert sent(one.prefilled("r"), ImagesRead) == ["I"]
    assert one.router.snapshot(0.0).counters["images:encoded"] == 1
    assert [d.reason for d in one.router.decisions("r")[0].decisions if d.step == "encode"] == [
        "affinity"
    ]


def test_equal_images_go_to_the_same_worker_and_load_is_spread() -> None:
    one = driver("I", "J")
    homes = set[str]()
    for number in range(6):
        homes |= set(sent(one.submit(asks(f"same{number}", image=7)), EncodeImages))
    assert len(homes) == 1
    large = [
        sent(one.submit(asks(f"large{number}", image=7, pixels=10**7)), EncodeImages)
        for number in range(2)
    ]
    assert [homes] * 1 + [{"I", "J"} - homes] == [set(found) for found in large]


def test_a_request_waits_for_an_encode_worker_and_text_does_not_wait_for_it() -> None:
    one = driver()
    assert not sent(one.submit(asks("image")), Prefill)
    assert one.router.explain("image", 0.0).blocked_reason == "no_encoder"
    assert sent(one.submit(request("text")), Prefill) == ["P"]
    sends = one.register("I")
    assert sent(sends, Prefill) == ["P"]
    assert sent(sends, EncodeImages) == ["I"]


def test_without_an_encode_worker_a_request_fails_after_the_grace_period() -> None:
    one = driver()
    one.submit(asks())
    sends = list[Send]()
    for _ in range(int(TIMEOUTS.grace_s) + 1):
        for worker in ("P", "C", "D", "E"):
            one.report(worker)
        sends += one.tick(1.0)
    (message,) = (send.message for send in sends if isinstance(send.message, Failed))
    assert message.status == 503
    assert "encode" in message.message
    assert one.state() is None


def test_images_of_long_prompts_are_encoded_while_another_prompt_is_read() -> None:
    """Each prompt is longer than a prefill worker takes at a time; text waits for its turn."""
    one = driver("I")
    long = replace(asks("first"), prompt=(1,) * 3000)
    assert sent(one.submit(long), Prefill) == ["P"]
    encoded(one, "first")
    assert not sent(one.submit(replace(request("text"), prompt=(2,) * 3000)), Prefill)
    one.on(Cancel(requests=("text",)), "in")
    sends = one.submit(replace(long, id="second", images=asks(image=2).images))
    assert (sent(sends, Prefill), sent(sends, EncodeImages)) == (["P"], ["I"])
    (load,) = (load for load in one.router.snapshot(0.0).workers if load.address == "P")
    assert (load.prefill_tokens, load.queue_tokens) == (6000, 1024 + 512)
    third = replace(long, id="third", images=asks(image=3).images)
    assert not sent(one.submit(third), Prefill), "one is read and one is encoded"
    encoded(one, "second")
    assert not sent(one.tick(0.1), Prefill)
    assert sent(one.prefilled("first"), Prefill) == ["P"]


@pytest.mark.parametrize("is_encoded", [False, True])
def test_the_death_of_its_encode_worker_is_retried(is_encoded: bool) -> None:
    one = driver("I", "J")
    (home,) = sent(one.submit(asks()), EncodeImages)
    if is_encoded:
        encoded(one, "r", home)
    sends = one.router.lost(home, one.now)
    (message,) = (send.message for send in sends if isinstance(send.message, Failed))
    assert message.resumable
    assert sent(sends, Cancel) == ["P"]
    again = replace(asks("r~1"), attempt=1)
    assert sent(one.submit(again), EncodeImages) == [{"I": "J", "J": "I"}[home]]


def test_after_prefill_its_encode_worker_may_die() -> None:
    one = driver("I")
    one.submit(asks())
    encoded(one, "r")
    one.prefilled("r")
    assert not sent(one.router.lost("I", one.now), Failed)
    assert one.state() == "compressing"


def test_an_image_that_cannot_be_encoded_ends_its_request() -> None:
    one = driver("I")
    one.submit(asks())
    error = failed("r", RequestError("bad", "messages"))
    sends = one.on(Finished(request="r", tokens=0, error=error), "I")
    assert [send.message.status for send in sends if isinstance(send.message, Failed)] == [400]
    assert sent(sends, Cancel) == ["P"]
    one.on(Finished(request="r", tokens=0), "P")
    assert one.state() is None
    assert booked(one) == 0


def test_the_heir_of_an_equal_prompt_has_its_images_encoded() -> None:
    """It was computed by another request, which is cancelled before its images are there."""
    one = driver("I", plan=PLAN)
    one.submit(asks("first"))
    assert sent(one.submit(asks("equal")), EncodeImages) == []
    assert sent(one.submit(asks("other", image=2)), EncodeImages) == ["I"]
    sends = one.on(Cancel(requests=("first",)), "in")
    assert sent(sends, EncodeImages) == ["I"]
    assert sorted(sent(sends, Cancel)) == ["I", "P"]
