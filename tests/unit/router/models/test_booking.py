"""The need of a request over time: raw pages while they exist, then what it will book."""

import pytest

from tests.unit.router.driver import MODEL
from triptych.router.models.booking import (
    MOST_ROOMY_TOKENS,
    ROOMY_SHARE,
    ROOMY_TOKENS,
    Booking,
    BookingModel,
)
from triptych.router.models.memory_estimate import ByteModel
from triptych.router.models.overcommit import AHEAD, EXPONENTS, Need

CAPACITY = 10**8
PROMPT, MOST = 800, 3000


def booking() -> tuple[BookingModel, Booking]:
    model = BookingModel(ByteModel(MODEL.plan), CAPACITY, is_layerwise=False)
    bound = MODEL.estimate(PROMPT, MOST)
    return model, Booking(bound, PROMPT, PROMPT + MOST, tenant="", profile="p")


def logs(need: Need, ahead: int) -> tuple[int, ...]:
    at = AHEAD.index(ahead) * len(EXPONENTS)
    return need.logs[at : at + len(EXPONENTS)]


@pytest.mark.parametrize("capacity", [10**6, 10**8, 10**10])
def test_a_large_memory_is_booked_further_ahead(capacity: int) -> None:
    model = BookingModel(ByteModel(MODEL.plan), capacity, is_layerwise=False)
    bound = MODEL.estimate(PROMPT, MOST)
    one = Booking(bound, PROMPT, PROMPT + MOST, tenant="", profile="p", tokens=100, is_roomy=True)
    ahead = model.ahead(one) - one.tokens
    bytes_ahead = model.row_bytes * ahead // MODEL.plan.high.tokens
    assert ROOMY_TOKENS <= ahead <= MOST_ROOMY_TOKENS
    assert ahead == ROOMY_TOKENS or bytes_ahead <= capacity // ROOMY_SHARE
    assert ahead < MOST_ROOMY_TOKENS or bytes_ahead <= capacity // ROOMY_SHARE


def test_raw_pages_are_needed_until_the_prompt_is_compressed() -> None:
    model, one = booking()
    sizes = MODEL.estimate(PROMPT, 16)
    assert sizes.peak > sizes.grown
    raw = model.need(one, sizes)
    assert logs(raw, AHEAD[0]) == logs(Need.constant(sizes.peak, CAPACITY), AHEAD[0])
    one.is_encoded = True
    later = model.need(one, sizes)
    assert logs(later, AHEAD[0]) < logs(raw, AHEAD[0])
    assert logs(later, AHEAD[-2]) == logs(raw, AHEAD[-2])


def test_nothing_is_needed_beyond_the_limit_of_an_answer() -> None:
    model, one = booking()
    one.is_encoded = True
    need = model.need(one, MODEL.estimate(PROMPT, 16))
    assert max(logs(need, AHEAD[-2])) > 0
    one.tokens = one.most_tokens - AHEAD[1]
    near = model.need(one, MODEL.estimate(PROMPT, 16))
    assert max(logs(near, AHEAD[0])) > 0
    assert not any(logs(near, AHEAD[2]))
