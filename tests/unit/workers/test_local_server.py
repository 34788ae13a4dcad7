"""The three engines, the pool and the coordinator together, against the model alone."""

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from tests.unit.workers.settled import booked_in_the_end
from triptych.core.config import AppConfig
from triptych.core.errors import PoolExhausted
from triptych.core.messages import Compressed, Message, PagesWanted, Sampling, Tokens
from triptych.core.profile import Profile, Settings
from triptych.workers.local import Completion, LocalServer
from triptych.workers.models.facts import describe

VOCAB = 258


def config(**parts: dict[str, object]) -> AppConfig:
    base: dict[str, object] = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
        "compressor": {"policy": "uniform:fp16", "recent_window_tokens": 20},
        "prefill": {"max_num_batched_tokens": 48},
    }
    return AppConfig.from_mapping(base | parts)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = random.Random(tokens * 1000 + seed)
    return [generator.randrange(2, VOCAB) for _ in range(tokens)]


def greedy(max_tokens: int, **more: object) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **more)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def differences(model: LlamaForCausalLM, asked: list[int], answer: Completion) -> torch.Tensor:
    """How far each answer token's log probability is from the model's own."""
    tokens = torch.tensor([[*asked, *answer.tokens]])
    with torch.inference_mode():
        logprobs = model(tokens).logits[0, len(asked) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    ours = torch.tensor([entry.logprob for entry in answer.logprobs])
    return (own - ours).abs()


PROMPTS = [1, 2, 12, 13, 14, 33, 47, 48, 49, 96, 130, 200]


@pytest.mark.parametrize("chunk_tokens", [16, 48, 512])
def test_answers_agree_with_the_model_alone_in_16_bits(
    tiny_model: Path, reference: LlamaForCausalLM, chunk_tokens: int
) -> None:
    asked = [prompt(count) for count in PROMPTS]
    settings = config(prefill={"max_num_batched_tokens": chunk_tokens})
    with LocalServer(settings, tiny_model) as server:
        answers = server.complete([server.request(p, greedy(40)) for p in asked])
        assert server.pool.stat().request_pages == 0
    for one, answer in zip(asked, answers, strict=True):
        assert answer.finish == "length"
        assert len(answer.tokens) == 40
        assert differences(reference, one, answer).max() < 2e-2


def test_a_coarser_format_costs_more_error_and_fewer_bytes(
    tiny_model: Path, reference: LlamaForCausalLM
) -> None:
    asked = [prompt(count, seed=1) for count in (30, 150, 300)]
    errors, sizes = list[float](), list[int]()
    for form in ("fp16", "k8v8", "k8v4", "k4v2"):
        settings = config(compressor={"policy": f"uniform:{form}", "recent_window_tokens": 20})
        with LocalServer(settings, tiny_model) as server:
            answers = server.complete([server.request(p, greedy(60)) for p in asked])
        pairs = zip(asked, answers, strict=True)
        errors.append(sum(differences(reference, p, a).mean().item() for p, a in pairs))
        report = answers[-1].report
        assert report is not None
        assert report.policy == f"uniform:{form}"
        sizes.append(report.stored_bytes)
    assert errors == sorted(errors)
    assert errors[1] < 0.2
    assert sizes == sorted(sizes, reverse=True)


def test_an_answer_does_not_depend_on_what_shares_the_batch(tiny_model: Path) -> None:
    asked = [prompt(count, seed=2) for count in (5, 60, 61)]
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True)
    with LocalServer(config(), tiny_model) as server:
        together = server.complete([server.request(p, sampling) for p in asked])
        alone = [server.complete([server.request(p, sampling)])[0] for p in asked]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]


def test_leaving_a_stream_gives_every_page_back(tiny_model: Path) -> None:
    with LocalServer(config(), tiny_model) as server:
        for tokens in (1, 20):  # left during prefill or compression, and while decoding
            stream = server.stream([server.request(prompt(100), greedy(300))])
            for _ in range(tokens):
                next(stream)
            stream.close()
            server.complete([server.request(prompt(3), greedy(2))])
            assert server.pool.stat().request_pages == 0
            assert server.pool.allocated_pages == 0


def test_more_requests_than_slots_wait_and_all_finish(tiny_model: Path) -> None:
    settings = config(decode={"max_num_seqs": 2})
    with LocalServer(settings, tiny_model) as server:
        requests = [server.request(prompt(20 + i), greedy(10)) for i in range(9)]
        answers = server.complete(requests)
    assert [len(answer.tokens) for answer in answers] == [10] * 9


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(tiny_model: Path) -> None:
    settings = config(pool={"kv_cache_memory_bytes": 200_000, "extent_pages": 8})
    with LocalServer(settings, tiny_model) as server:
        big, small = server.complete(
            [server.request(prompt(400), greedy(50)), server.request(prompt(5), greedy(5))]
        )
    assert big.error is not None
    assert big.error.status == 400
    assert small.finish == "length"


def test_an_answer_ends_at_the_context_whatever_max_tokens_says(tiny_model: Path) -> None:
    with LocalServer(config(), tiny_model) as server:
        (answer,) = server.complete([server.request(prompt(505), greedy(40))])
    assert len(answer.tokens) == 512 - 505
    assert answer.finish == "length"


def served(path: Path, asked: list[list[int]], **compressor: object) -> list[Completion]:
    settings = config(compressor={"recent_window_tokens": 20, **compressor})
    with LocalServer(settings, path) as server:
        answers = server.complete([server.request(p, greedy(50)) for p in asked])
        assert server.pool.stat().request_pages == 0
    return answers


def served_one_by_one(path: Path, asked: list[list[int]], **compressor: object) -> list[Completion]:
    return [answer for one in asked for answer in served(path, [one], **compressor)]


def stored_bytes(answer: Completion) -> int:
    assert answer.report is not None
    return answer.report.stored_bytes


LONG = [prompt(count, seed=3) for count in (5, 40, 150, 400)]


def test_diffkv_that_finds_all_tokens_significant_is_uniform_bit_for_bit(tiny_model: Path) -> None:
    """One request at a time: when others come decides which chunks a prompt is read in, and later
    chunks read earlier ones rounded to 16 bits."""
    uniform = served_one_by_one(tiny_model, LONG, policy="uniform:k8v4")
    mixed = served_one_by_one(tiny_model, LONG, policy="diffkv", alpha_high=0.0)
    for one, other in zip(uniform, mixed, strict=True):
        assert one.tokens == other.tokens
        assert [e.logprob for e in one.logprobs] == [e.logprob for e in other.logprobs]
        assert stored_bytes(one) == stored_bytes(other)


@pytest.mark.parametrize("chunk_tokens", [48, 512])
def test_diffkv_trades_error_for_bytes(
    tiny_model: Path, reference: LlamaForCausalLM, chunk_tokens: int
) -> None:
    """More low tokens, then dropped ones: fewer bytes each time, and never worse than all low."""
    asked = LONG[2:]
    sizes, errors = list[int](), list[float]()
    policies: list[dict[str, object]] = [
        {"policy": "diffkv", "alpha_high": high, "alpha_low": low}
        for high, low in ((0.0, 0.0), (1.0, 0.0), (1e9, 0.0), (1e9, 0.9))
    ]
    for policy in [*policies, {"policy": "uniform:k4v2"}]:
        settings = config(
            compressor={"recent_window_tokens": 20, "high_window_tokens": 0, **policy},
            prefill={"max_num_batched_tokens": chunk_tokens},
        )
        with LocalServer(settings, tiny_model) as server:
            answers = server.complete([server.request(p, greedy(50)) for p in asked])
            assert server.pool.stat().request_pages == 0
        sizes.append(sum(stored_bytes(answer) for answer in answers))
        pairs = zip(asked, answers, strict=True)
        errors.append(sum(differences(reference, p, a)[:13].mean().item() for p, a in pairs))
    high, mixed, low, _dropped, uniform_low = errors
    assert high < mixed < low
    assert low == pytest.approx(uniform_low, rel=0.2), (
        "new tokens age into high pages, not low ones"
    )
    assert sizes[:4] == sorted(sizes[:4], reverse=True)
    assert sizes[3] < sizes[2] < sizes[0]
    assert sizes[2] == sizes[4]


def test_significance_is_the_same_however_the_prompt_is_cut(tiny_model: Path) -> None:
    sizes = set[int]()
    for chunk_tokens in (37, 512):
        settings = config(
            compressor={"policy": "diffkv", "recent_window_tokens": 20},
            prefill={"max_num_batched_tokens": chunk_tokens},
        )
        with LocalServer(settings, tiny_model) as server:
            answers = server.complete([server.request(p, greedy(3)) for p in LONG])
        sizes.add(sum(stored_bytes(answer) for answer in answers))
    assert len(sizes) == 1


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_rotated_keys_and_values_give_the_same_answers(
    tiny_model: Path, reference: LlamaForCausalLM, chunk_tokens: int
) -> None:
    settings = config(
        compressor={"policy": "uniform:fp16", "kv_rotation": "hadamard"},
        prefill={"max_num_batched_tokens": chunk_tokens},
    )
    with LocalServer(settings, tiny_model) as server:
        answers = server.complete([server.request(p, greedy(40)) for p in LONG])
    for one, answer in zip(LONG, answers, strict=True):
        assert differences(reference, one, answer).max() < 2e-2


def pages_after(
    path: Path, answer_tokens: int, *, policy: str = "diffkv", **compressor: object
) -> int:
    """Pages that one request holds after so many tokens of its answer."""
    settings = config(
        compressor={"policy": policy, "recent_window_tokens": 20, **compressor},
    )
    with LocalServer(settings, path) as server:
        events = server.stream([server.request(prompt(60), greedy(answer_tokens + 30))])
        for _ in range(answer_tokens):
            next(events)
        held = server.pool.stat().request_pages + server.pool.allocated_pages
        events.close()
    return held


def test_tokens_of_an_answer_are_told_apart_too(tiny_model: Path) -> None:
    """All high, some low, all low: fewer pages each time, though the prompt is short."""
    high = pages_after(tiny_model, 400, alpha_high=0.0)
    frozen = pages_after(tiny_model, 400, alpha_high=1e9, score_every_tokens=0)
    mixed = pages_after(tiny_model, 400, alpha_high=1.0, score_every_tokens=4)
    low = pages_after(tiny_model, 400, alpha_high=1e9, score_every_tokens=4)
    assert low < mixed < high
    assert low < frozen <= high


def test_leankv_classifies_tokens_of_answers_by_shares_too(tiny_model: Path) -> None:
    """The larger the share that may go, the fewer the pages; without scores all stay high."""
    high = pages_after(tiny_model, 400, policy="leankv", score_every_tokens=4, mass_high=0.0)
    frozen = pages_after(
        tiny_model, 400, policy="leankv", score_every_tokens=0, mass_high=0.9, mass_low=0.5
    )
    some = pages_after(tiny_model, 400, policy="leankv", score_every_tokens=4, mass_high=0.05)
    most = pages_after(tiny_model, 400, policy="leankv", score_every_tokens=4, mass_high=0.9)
    dropped = pages_after(
        tiny_model, 400, policy="leankv", score_every_tokens=4, mass_high=0.9, mass_low=0.5
    )
    assert dropped < most < some < high
    assert most < frozen <= high


def test_leankv_goes_by_the_share_of_attention(tiny_model: Path) -> None:
    """The larger the share that may go, the fewer the bytes; none: uniform, bit for bit."""
    asked = LONG[2:]
    sizes = [
        sum(
            stored_bytes(answer)
            for answer in served(tiny_model, asked, policy="leankv", mass_high=high, mass_low=low)
        )
        for high, low in ((0.0, 0.0), (0.2, 0.0), (0.9, 0.0), (0.9, 0.5))
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    uniform = served(tiny_model, asked, policy="uniform:k8v4")
    assert sizes[0] == sum(stored_bytes(answer) for answer in uniform)


SIXTEEN = {"high_format": "fp16", "low_format": "k8v4"}


def test_sixteen_bits_may_be_the_high_class(tiny_model: Path) -> None:
    """All high: the tokens of uniform:fp16. All low: fewer bytes than some low ones."""
    exact = served_one_by_one(tiny_model, LONG, policy="uniform:fp16", kv_rotation="hadamard")
    high = served_one_by_one(tiny_model, LONG, policy="diffkv", alpha_high=0.0, **SIXTEEN)
    assert [one.tokens for one in high] == [one.tokens for one in exact]
    asked = LONG[2:]
    sizes = [
        sum(map(stored_bytes, served(tiny_model, asked, **SIXTEEN, **settings)))
        for settings in (
            {"policy": "uniform:fp16"},
            {"policy": "diffkv", "alpha_high": 1.0},
            {"policy": "leankv", "mass_high": 0.6},
            {"policy": "diffkv", "alpha_high": 1e9},
        )
    ]
    assert sizes[0] > max(sizes[1:3]) > min(sizes[1:3]) > sizes[3]


def test_an_answer_is_lowered_from_sixteen_bits(tiny_model: Path) -> None:
    high = pages_after(tiny_model, 400, alpha_high=0.0, **SIXTEEN)
    mixed = pages_after(tiny_model, 400, alpha_high=1.0, score_every_tokens=4, **SIXTEEN)
    low = pages_after(tiny_model, 400, alpha_high=1e9, score_every_tokens=4, **SIXTEEN)
    assert low < mixed < high


def test_thresholds_of_a_prompt_are_scaled_by_head_row(tiny_model: Path, tmp_path: Path) -> None:
    """A scale of 0 keeps all tokens of a head row high, and a large one makes all of them low."""
    facts = describe(tiny_model)
    rows = facts.geometry.head_rows
    profile = Profile(
        model="tiny",
        weights=facts.weights,
        config=facts.config,
        geometry=facts.geometry,
        settings=Settings(policy="diffkv", alpha_high=1.0, recent_window_tokens=20),
    )
    low = list[NDArray[np.int32]]()
    for one in (profile, profile.with_alpha_scales([6e4] + [0.0] * (rows - 1))):
        one.write(tmp_path / "profile.json")
        low.append(low_tokens(tiny_model, tmp_path / "profile.json"))
    even, scaled = low
    assert even[1:].any()
    assert not scaled[1:].any()
    assert scaled[0] > even.max()


def low_tokens(path: Path, profile: Path) -> NDArray[np.int32]:
    """Low tokens of a prompt by head row."""
    handles = list[Compressed]()

    def watch(message: Message) -> None:
        if isinstance(message, Compressed):
            handles.append(message)

    settings = config(compressor={"policy": "diffkv", "profile": str(profile)})
    with LocalServer(settings, path, watch=watch) as server:
        server.complete([server.request(prompt(400), greedy(5))])
    runs = {run.format: np.frombuffer(run.tokens, "<i4") for run in handles[0].handle.runs}
    return runs["k4v2"]


def take_all(server: LocalServer) -> Iterator[NDArray[np.int32]]:
    """Every page that nobody has."""
    with contextlib.suppress(PoolExhausted):
        while True:
            yield server.pool.allocate(1)


@pytest.mark.parametrize("asked", [60, 66])
@pytest.mark.parametrize("booking", ["forecast", "bounds"])
def test_a_pool_that_runs_dry_pauses_the_request_and_it_goes_on(
    tiny_model: Path, asked: int, booking: str
) -> None:
    """Wherever the next page is missed: for a raw page, or for tokens that leave the window."""
    settings = config(compressor={"policy": "uniform:k8v4"}, router={"booking": booking})
    with LocalServer(settings, tiny_model) as server:
        (undisturbed,) = server.complete([server.request(prompt(asked), greedy(300))])
        stream = server.stream([server.request(prompt(asked), greedy(300))])
        tokens = [*next(stream).tokens, *next(stream).tokens]
        hoard = list(take_all(server))
        timer = threading.Timer(0.3, lambda: [server.pool.free(pages) for pages in hoard])
        timer.start()
        for event in stream:
            assert isinstance(event, Tokens)
            tokens += event.tokens
        assert tuple(tokens) == tuple(undisturbed.tokens)
        assert server.counters["pool_exhausted"] >= 1
        timer.join()
        (answer,) = server.complete([server.request(prompt(5), greedy(3))])
        assert len(answer.tokens) == 3
        assert server.pool.stat().request_pages == 0


@pytest.mark.parametrize(
    ("policy", "kib"), [("uniform:fp16", 1024), ("uniform:k8v4", 520), ("diffkv", 460)]
)
def test_requests_that_outgrow_the_pool_make_room_for_older_ones_and_all_end(
    tiny_model: Path, policy: str, kib: int
) -> None:
    """Every answer is longer than forecast: some requests are computed again, and none fails."""
    heard = list[PagesWanted]()

    def watch(message: Message) -> None:
        if isinstance(message, PagesWanted):
            heard.append(message)

    settings = config(
        compressor={"policy": policy, "recent_window_tokens": 20},
        pool={"kv_cache_memory_bytes": kib << 10, "extent_pages": 1, "prefix_bytes": 0},
        router={"overcommit_risk": 0.5},
    )
    with LocalServer(settings, tiny_model, watch=watch) as server:
        asked = [server.request(prompt(20, seed), greedy(250)) for seed in range(8)]
        answers = server.complete(asked)
        assert [len(answer.tokens) for answer in answers] == [250] * 8
        assert [len(answer.logprobs) for answer in answers] == [250] * 8
        assert {answer.finish for answer in answers} == {"length"}
        assert server.counters["growth:booked"] > 0
        assert server.counters["recomputed"] > 0
        assert "pool_exhausted" not in server.counters
        assert "failed" not in server.counters
        assert len(heard) < 8 * 60
        assert booked_in_the_end(server) == {}
        assert server.pool.stat().request_pages == 0


def test_old_tokens_lose_precision_while_memory_is_short_but_not_below_a_floor(
    tiny_model: Path,
) -> None:
    """Half of the requests have a floor; every answer says how many of its tokens were lowered."""
    settings = config(
        compressor={"policy": "diffkv", "recent_window_tokens": 20, "alpha_high": 0.05},
        pool={"kv_cache_memory_bytes": 560 << 10, "extent_pages": 1, "prefix_bytes": 0},
        router={"overcommit_risk": 0.5},
    )
    with LocalServer(settings, tiny_model) as server:
        asked = [server.request(prompt(20, seed), greedy(250)) for seed in range(8)]
        asked = [replace(one, floor=("low", "high")[n % 2]) for n, one in enumerate(asked)]
        answers = server.complete(asked)
        assert [len(answer.tokens) for answer in answers] == [250] * 8
        lowered = [answer.report.lowered_tokens for answer in answers if answer.report]
        assert len(lowered) == 8
        assert any(lowered[::2])
        assert not any(lowered[1::2])
        assert server.counters["growth:lowered"] > 0
        assert server.counters["lowered_bytes"] > 0
