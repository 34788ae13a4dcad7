"""Kinds of workloads: what they share, how long they are, and that the seed fixes them."""

import base64
import io
from itertools import pairwise
from statistics import fmean, median, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from triptych.cli.measure.load_options import LoadOptions
from triptych.core.errors import ConfigError
from triptych.loadgen.workload.arrivals import arrivals_s
from triptych.loadgen.workload.load import Load
from triptych.loadgen.workload.openai_requests import Workload
from triptych.loadgen.workload.shapes import SHAPES
from triptych.loadgen.workload.simulated import jobs_of
from triptych.loadgen.workload.turns import Session, requests_of


def keys(session: Session, turn: int = 0) -> list[str]:
    return [segment.key for segment in session.turns[turn].segments]


@pytest.mark.parametrize("shape", [*SHAPES])
@given(seed=st.integers(0, 99), requests=st.integers(1, 40), scope=st.integers(0, 3))
def test_the_seed_fixes_a_load_and_it_makes_the_requests_that_were_asked_for(
    shape: str, seed: int, requests: int, scope: int
) -> None:
    load = LoadOptions(shape=shape, seed=seed).resolve()
    sessions = load.sessions(requests, rate_per_s=3.0, scope=scope)
    assert sessions == load.sessions(requests, rate_per_s=3.0, scope=scope)
    assert requests_of(sessions) == requests
    starts = [session.start_s for session in sessions]
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    turns = [turn for session in sessions for turn in session.turns]
    assert all(turn.prompt_tokens >= 1 and turn.output_tokens >= 1 for turn in turns)


@pytest.mark.parametrize(
    ("shape", "prompt", "answer"), [("chat", 98, 205), ("reasoning", 187, 875)]
)
def test_lengths_have_the_medians_of_their_source(shape: str, prompt: int, answer: int) -> None:
    load = LoadOptions(shape=shape, seed=1).resolve()
    turns = [turn for session in load.sessions(20_000) for turn in session.turns]
    assert median(turn.prompt_tokens for turn in turns) == pytest.approx(prompt, rel=0.05)
    assert median(turn.output_tokens for turn in turns) == pytest.approx(answer, rel=0.05)


@pytest.mark.parametrize("shape", ["mixed", "chat", "burstgpt", "long-document"])
def test_lengths_have_the_means_that_were_asked_for(shape: str) -> None:
    load = Load(shape=shape, prompt_tokens=300, output_tokens=60, seed=1)
    turns = [turn for session in load.sessions(20_000) for turn in session.turns]
    assert fmean(turn.prompt_tokens for turn in turns) == pytest.approx(300, rel=0.1)
    assert fmean(turn.output_tokens for turn in turns) == pytest.approx(60, rel=0.1)


def test_each_turn_of_a_conversation_begins_with_all_that_was_before() -> None:
    sessions = LoadOptions(shape="conversations", seed=4).resolve().sessions(200)
    longer = [session for session in sessions if len(session.turns) > 2]
    assert len(longer) > 10
    for session in longer:
        for before, after in pairwise(session.turns):
            assert after.segments[: len(before.segments)] == before.segments
            assert after.segments[len(before.segments)].tokens == before.output_tokens
            assert after.pause_s > 0
    assert len({keys(session)[0] for session in sessions}) == 1


def test_agents_share_their_tools_and_wait_for_them() -> None:
    sessions = LoadOptions(shape="agents", seed=4).resolve().sessions(100)
    assert {keys(session)[0] for session in sessions} == {"0/tools"}
    pauses = [turn.pause_s for session in sessions for turn in session.turns[1:]]
    assert fmean(pauses) == pytest.approx(1.0, rel=0.6)
    assert all(session.turns[0].pause_s == 0 for session in sessions)


def test_shared_prefixes_are_few_and_the_first_is_the_most_popular() -> None:
    load = LoadOptions(shape="shared-prefix", seed=4).resolve()
    chosen = [keys(session)[0] for session in load.sessions(800)]
    counts = [chosen.count(f"0/prefix{rank}") for rank in range(8)]
    assert sum(counts) == 800
    assert counts[0] == max(counts)
    assert all(counts)
    other = [keys(session)[0] for session in load.sessions(800, scope=1)]
    assert not set(chosen) & set(other)


def test_equal_keys_are_equal_tokens_and_a_prompt_has_its_length() -> None:
    load = LoadOptions(shape="shared-prefix", seed=4, prompt_tokens=40).resolve()
    workload = Workload(model="m", shape=load.shape, prompt_tokens=40, seed=4)
    by_prefix = dict[str, list[int]]()
    for session in workload.sessions(60):
        (turn,) = session.turns
        prompt = workload.body(turn)["prompt"]
        assert isinstance(prompt, list)
        assert len(prompt) == turn.prompt_tokens
        common = prompt[: turn.segments[0].tokens]
        assert by_prefix.setdefault(turn.segments[0].key, common) == common
    assert len(by_prefix) > 1


@given(prompt=st.integers(1, 300), output=st.integers(1, 40), seed=st.integers(0, 9))
def test_limits_cut_prompts_at_their_end(prompt: int, output: int, seed: int) -> None:
    options = LoadOptions(shape="agents", seed=seed)
    limited = LoadOptions(
        shape="agents", seed=seed, max_prompt_tokens=prompt, max_output_tokens=output
    )
    pairs = zip(options.resolve().sessions(20), limited.resolve().sessions(20), strict=True)
    for whole, cut in pairs:
        for turn, short in zip(whole.turns, cut.turns, strict=True):
            assert short.prompt_tokens == min(prompt, turn.prompt_tokens)
            assert short.output_tokens == min(output, turn.output_tokens)
            assert [s.key for s in short.segments] == keys(whole, whole.turns.index(turn))[
                : len(short.segments)
            ]


@pytest.mark.parametrize("burstiness", [1.0, 0.5, 4.0])
def test_gaps_have_the_rate_and_the_variance_of_their_shape(burstiness: float) -> None:
    times = arrivals_s(20_000, 5.0, 1, burstiness)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times == sorted(times)
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.15)
    assert times == arrivals_s(20_000, 5.0, 1, burstiness)
    assert times != arrivals_s(20_000, 5.0, 2, burstiness)


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(shape="conversation"),
        LoadOptions(speed=0.0),
        LoadOptions(speed=2.0),
        LoadOptions(burstiness=-1.0),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(options: LoadOptions) -> None:
    with pytest.raises(ConfigError, match="expected"):
        options.resolve()


def image_chats(**settings: str) -> Workload:
    given = {"endpoint": "chat", "form": "text"} | settings
    return Workload(model="m", shape="image-chat", prompt_tokens=422, seed=3, **given)


def test_an_image_chat_has_fifteen_images_between_its_words() -> None:
    """The shape of MileBench; equal seeds give equal bodies."""
    workload = image_chats()
    turns = [session.turns[0] for session in workload.sessions(2)]
    first, second = (workload.body(turn)["messages"][0]["content"] for turn in turns)
    kinds = [part["type"] for part in first]
    assert kinds == ["text", "image_url"] * 15
    words = " ".join(part["text"] for part in first if part["type"] == "text").split()
    assert len(words) == 422
    urls = [part["image_url"]["url"] for part in first + second if part["type"] == "image_url"]
    assert len(set(urls)) == 30
    assert workload.body(turns[0]) == image_chats().body(turns[0])
    encoded = urls[0].partition("base64,")[2]
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert (image.format, image.size) == ("PNG", (224, 224))


@pytest.mark.parametrize("settings", [{"endpoint": "completions"}, {"form": "tokens"}])
def test_images_need_chats_in_text(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="images are parts of chats"):
        image_chats(**settings)


def test_simulated_prompts_have_the_tokens_of_their_images_too() -> None:
    ((job,),) = jobs_of(image_chats().sessions(1), image_tokens=10)
    assert len(job.images) == 15
    assert len({name for name, _ in job.images}) == 15
    assert job.prompt_tokens == sum(tokens for _, tokens in job.segments) + 150
