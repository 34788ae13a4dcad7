"""The router books, compresses and shares prompts by the method of each request."""

from dataclasses import replace

import pytest

from tests.unit.router.driver import MODEL, Driver, request
from triptych.core.messages import Compress, Failed, Prefill
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.policy import Policy
from triptych.router import ByteModel
from triptych.router.models.prompt_blocks import PromptToPlace

FP16, SMALL = (Policy(name=f"uniform:{form}", high_format=form) for form in ("fp16", "k4v2"))
PLAN = replace(MODEL.plan, others=(FP16, SMALL))
NAMES = ("", FP16.name, SMALL.name)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("booking", ["bounds", "forecast"])
def test_a_request_books_what_its_method_takes(method: str, booking: str) -> None:
    driver = Driver("P", "C", "D", plan=PLAN, booking=booking)
    one = replace(request(prompt=900, max_tokens=300), method=method)
    driver.bring_to("prefilling", one)
    sizes = ByteModel(PLAN.of_method(method)).estimate(900, 300)
    (booked,) = driver.router.snapshot(driver.now).booked_bytes.values()
    assert booked == sizes.peak if booking == "bounds" else booked <= sizes.peak
    alone = Driver("P", "C", "D", plan=PLAN.of_method(method), booking=booking)
    alone.bring_to("prefilling", replace(one, method=""))
    (expected,) = alone.router.snapshot(alone.now).booked_bytes.values()
    assert booked == expected


def test_methods_need_different_bytes() -> None:
    peaks = [ByteModel(PLAN).of_method(name).estimate(900, 300).grown for name in NAMES]
    assert peaks[1] > peaks[0] > peaks[2]


def test_the_compressor_is_told_the_method() -> None:
    driver = Driver("P", "C", "D", plan=PLAN)
    sends = driver.bring_to("compressing", replace(request(), method=FP16.name))
    items = [
        one for send in sends if isinstance(send.message, Compress) for one in send.message.items
    ]
    assert [item.method for item in items] == [FP16.name]


def test_prompts_that_will_be_merged_neither_use_cached_prefixes_nor_wait_for_them() -> None:
    file = LearnedFile(path="m", kind="merger", tensors="", chunk_tokens=5)
    merged = Policy(name="learned:merge", high_format="k8v4", merger=file)
    plan = replace(PLAN, prefix_bytes=1 << 24, others=(merged,))
    for method, limit in (("", None), (merged.name, 0)):
        driver = Driver("P", "C", "D", plan=plan)
        asked = replace(request(prompt=500), method=method)
        sends = driver.bring_to("prefilling", asked)
        (prefill,) = [send.message for send in sends if isinstance(send.message, Prefill)]
        assert [one.cached_at_most for one in prefill.requests] == [limit]
        keys = PromptToPlace(prefill.requests[0], 0.0, PLAN.block_tokens).block_keys()
        assert bool(keys) == (limit is None)


def test_an_unknown_method_is_refused_and_books_nothing() -> None:
    driver = Driver("P", "C", "D", plan=PLAN)
    (send,) = driver.submit(replace(request(), method="kivi"))
    assert isinstance(send.message, Failed)
    assert (send.message.status, send.message.code) == (400, "unknown_method")
    assert not any(driver.router.snapshot(driver.now).booked_bytes.values())


def test_prompts_of_different_methods_have_no_block_in_common() -> None:
    keys = [
        PromptToPlace(
            replace(request(prompt=500), method=name), 0.0, PLAN.of_method(name).block_tokens
        ).block_keys()
        for name in NAMES
    ]
    assert all(keys)
    assert not set(keys[0]) & set(keys[1]) | set(keys[1]) & set(keys[2])
