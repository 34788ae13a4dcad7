"""Windows on sequences that are longer than a model's context."""

from random import Random
from typing import Literal

import pytest

from triptych.core.config import AppConfig, ExperimentalConfig, ModelConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import Failed, Request, Sampling, Tokens
from triptych.router import AttemptTable, Windows
from triptych.router.frontend.retries import MAX_ATTEMPTS

SIZES = [(2048, 1024), (8, 3), (8, 7), (8, 1), (2, 1)]


@pytest.mark.parametrize(("size", "overlap"), SIZES)
def test_each_token_is_in_a_window_and_neighbours_share_just_the_overlap(
    size: int, overlap: int
) -> None:
    windows, starts = Windows(size, overlap), [0]
    for tokens in range(4 * size):
        start = windows.begin(tokens)
        assert start <= tokens < start + size  # the next token has its place
        if start != starts[-1]:
            assert starts[-1] + size - start == overlap
            assert tokens - start == overlap  # it sees so many before it
            starts.append(start)
    assert len(starts) > 4


def request(prompt: int, answer: int) -> Request:
    sampling = Sampling(max_tokens=answer)
    return Request(id="r", prompt=tuple(range(prompt)), sampling=sampling, reply_to="ingress")


def test_what_fits_a_window_is_left_as_it_is() -> None:
    assert Windows(8, 3).cut(request(5, 3)) == request(5, 3)


def test_a_long_prompt_is_read_from_where_its_last_window_begins() -> None:
    cut = Windows(8, 3).cut(request(14, 20))
    assert (cut.skipped, cut.known, cut.known_tokens) == (10, (10, 11, 12, 13), 4)
    assert (cut.goes_on, cut.sampling.max_tokens) == (True, 4)
    assert not Windows(8, 3).cut(request(14, 4)).goes_on


def played(windows: Windows, prompt: int, answer: int, losses: Random | None) -> list[Tokens]:
    """A worker that says each token's place; ``losses`` has it die now and then."""
    record_report, journeys = list[Tokens | Failed](), AttemptTable(windows)
    journey, done = journeys.start(request(prompt, answer), record_report.append), False
    while not done:
        asked = journey.present()
        assert 0 < asked.known_tokens < windows.size
        first, last = len(asked.output_tokens), asked.sampling.max_tokens
        assert asked.known_tokens + last - first <= windows.size
        end = last if losses is None or losses.random() < 0.8 else losses.randrange(first, last)
        for index in range(first, end):
            finish = "length" if index == last - 1 else None
            place = len(asked.prompt) + index
            item = Tokens(request=asked.id, index=index, tokens=(place,), text="", finish=finish)
            done |= journey.hear(item)
        if done:
            break
        if not journeys.again(journey):
            pytest.fail("too many attempts")
    return [item for item in record_report if isinstance(item, Tokens)]


@pytest.mark.parametrize("prompt", [1, 7, 8, 20])
def test_an_answer_goes_on_window_after_window(prompt: int) -> None:
    items = played(Windows(8, 3), prompt, 100, None)
    assert [item.tokens for item in items] == [(prompt + n,) for n in range(100)]
    assert [item.finish for item in items] == [None] * 99 + ["length"]


def test_losses_between_windows_lose_nothing() -> None:
    draw = Random(5)
    for _ in range(50):
        items = played(Windows(8, 3), 5, 12, draw)
        assert [item.tokens for item in items] == [(5 + n,) for n in range(12)]


def test_windows_are_no_failures() -> None:
    journeys = AttemptTable(Windows(8, 3))
    journey = journeys.start(request(7, 900), lambda _: None)
    for number in range(3 * MAX_ATTEMPTS):
        asked = journey.present()
        for index in range(len(asked.output_tokens), asked.sampling.max_tokens):
            is_last = index == asked.sampling.max_tokens - 1
            finish = "length" if is_last else None
            journey.hear(Tokens(request=asked.id, index=index, tokens=(1,), text="", finish=finish))
        assert journey.is_at_window_end
        assert journeys.again(journey)
        assert (journey.attempt, journey.lost, journey.delay_s) == (number + 1, 0, 0.0)


def test_an_answer_that_ends_by_itself_ends_in_any_window() -> None:
    journeys = AttemptTable(Windows(8, 3))
    journey = journeys.start(request(20, 100), lambda _: None)
    asked = journey.present()
    item = Tokens(request=asked.id, index=0, tokens=(2,), text="", finish="stop", stop=2)
    assert journey.hear(item)
    assert not journey.is_at_window_end


def settings(longest: int | Literal["auto"], overlap: int | Literal["auto"] = "auto") -> AppConfig:
    return AppConfig(
        model=ModelConfig(max_model_len=longest),
        experimental=ExperimentalConfig(context_window_overlap_tokens=overlap),
    )


def test_windows_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match="window_overlap_tokens=512"):
        Windows.of(settings(2048, 512), 512)


def test_an_overlap_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_overlap_tokens=0"):
        settings(2048, 0)


@pytest.mark.parametrize("longest", ["auto", 100, 512])
def test_what_fits_the_context_has_no_windows(longest: int | Literal["auto"]) -> None:
    assert Windows.of(settings(longest), 512) is None


def test_half_of_the_context_overlaps_unless_the_settings_say_more() -> None:
    assert Windows.of(settings(600), 512) == Windows(512, 256)
    assert Windows.of(settings(600, 100), 512) == Windows(512, 100)
