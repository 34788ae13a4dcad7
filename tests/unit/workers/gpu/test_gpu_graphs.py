"""Decode steps are captured as graphs where nothing is decided in them."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny import DIFFKV
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.steps.step_graphs import batch_sizes
from triptych.workers.decode.window import RetirementPlan, Window
from triptych.workers.device import CPU, Captured, Device
from triptych.workers.factory import capture_usual_steps
from triptych.workers.local import Completion, LocalServer
from triptych.workers.sampling.sampler import SamplerRow, sample

GREEDY = Sampling(temperature=0.0, max_tokens=18, ignore_eos=True)
ONLY_FAKE = pytest.mark.skipif(torch.cuda.is_available(), reason="only the fake device counts")


def config(policy: str, requests: int = 8) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 8 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "compressor": DIFFKV | {"policy": policy},
            "decode": {"max_num_seqs": requests},
        }
    )


def answers(settings: AppConfig, model: Path, device: Device, count: int = 5) -> list[Completion]:
    """Greedy answers to some prompts at once, of different lengths."""
    generator = random.Random(count)
    prompts = [[generator.randrange(2, 258) for _ in range(5 + 13 * i)] for i in range(count)]
    with LocalServer(settings, model, device=device) as server:
        return server.complete([server.request(prompt, GREEDY) for prompt in prompts])


def tokens_of(done: list[Completion]) -> list[tuple[int, ...]]:
    assert [one.error for one in done] == [None] * len(done)
    return [tuple(one.tokens) for one in done]


@contextmanager
def counted(device: Device) -> Iterator[dict[str, int]]:
    """Counts captures, replays and steps of decode engines."""
    seen = {"captures": 0, "replays": 0, "steps": 0}
    capture, forward = type(device).capture, DecodeEngine._forward

    def capturing(self: Device, work: Callable[[], Tensor], pool: object) -> Captured:
        seen["captures"] += 1
        captured = capture(self, work, pool)

        def replay() -> None:
            seen["replays"] += 1
            captured.replay()

        return Captured(replay, captured.output)

    def stepping(self: DecodeEngine, batch: list[object]) -> Tensor:
        seen["steps"] += 1
        return forward(self, batch)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device), "capture", capturing)
        patch.setattr(DecodeEngine, "_forward", stepping)
        yield seen


@pytest.mark.parametrize("policy", ["uniform:fp16", "uniform:k8v4"])
def test_every_step_without_scores_is_one_graph(
    tiny_model: Path, quick_device: Device, policy: str
) -> None:
    """Of five requests, whose rows are filled up to eight."""
    settings = config(policy)
    with counted(quick_device) as seen:
        there = answers(settings, tiny_model, quick_device)
    assert seen["replays"] == seen["steps"] >= 17
    assert 1 <= seen["captures"] <= len(batch_sizes(8))
    assert tokens_of(there) == tokens_of(answers(settings, tiny_model, CPU))


@pytest.mark.parametrize("count", [1, 5])
def test_steps_with_scores_are_graphs_too(
    tiny_model: Path, quick_device: Device, count: int
) -> None:
    """Each token at an even position adds to scores: one request has both kinds of steps."""
    settings = config("diffkv")
    with counted(quick_device) as seen:
        there = answers(settings, tiny_model, quick_device, count)
    assert seen["replays"] == seen["steps"] >= 17
    assert seen["captures"] <= 2 * len(batch_sizes(8))
    assert tokens_of(there) == tokens_of(answers(settings, tiny_model, CPU, count))


def test_usual_steps_are_captured_before_requests_come(
    tiny_model: Path, quick_device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    settings, prompt = config("diffkv"), [5, 6, 7]
    with (
        counted(quick_device) as seen,
        LocalServer(settings, tiny_model, device=quick_device) as server,
    ):
        with caplog.at_level(logging.INFO):
            capture_usual_steps(server._loop._engines)
        before = seen["captures"]
        server.complete([server.request(prompt, GREEDY) for _ in range(3)])
    assert before == seen["captures"] == 2 * len(batch_sizes(8))
    assert seen["replays"] == seen["steps"]
    assert "captured 8 decode steps of up to 8 requests as graphs in" in caplog.text


def test_steps_run_without_graphs_where_a_capture_fails(
    tiny_model: Path,
    quick_device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = list[int]()

    def refuse(self: Device, work: Callable[[], Tensor], pool: object) -> Captured:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(type(quick_device), "capture", refuse)
    settings = config("uniform:k8v4")
    with caplog.at_level(logging.WARNING):
        there = answers(settings, tiny_model, quick_device)
    assert tokens_of(there) == tokens_of(answers(settings, tiny_model, CPU))
    warnings = [one.message for one in caplog.records if "captured" in one.message]
    assert len(warnings) == len(tried) == 1
    assert "not permitted when stream is capturing" in warnings[0]


@ONLY_FAKE
@pytest.mark.parametrize("policy", ["uniform:fp16", "diffkv"])
def test_a_step_is_a_handful_of_calls(tiny_model: Path, quick_device: Device, policy: str) -> None:
    """Copies of inputs and token counts, one graph, and the wait for the sampled tokens."""
    from tests.far import PUT, REPLAY, WAIT  # noqa: PLC0415 - there is none beside a GPU

    steps, step = list[list[str]](), DecodeEngine.step
    asked: list[str] = quick_device.asked  # type: ignore[attr-defined]

    def stepping(engine: DecodeEngine) -> object:
        start = len(asked)
        sends = list(step(engine))
        steps.append(asked[start:])
        return sends

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeEngine, "step", stepping)
        answers(config(policy), tiny_model, quick_device, count=2)
    replayed = [one for one in steps if REPLAY in one]
    usual, growing = (min(replayed, key=lambda one: abs(one.count(PUT) - puts)) for puts in (3, 5))
    assert usual.count(PUT) == 3  # slots, token counts of all tables, inputs of the graph
    assert growing.count(PUT) == 3 + 2  # the page ids of the recent table, and whose they are
    for one in usual, growing:
        assert one.count(REPLAY) == 1
        assert one.count(WAIT) == 1  # the tokens
    assert len(usual) <= 9, usual


@ONLY_FAKE
def test_a_step_in_which_pages_retire_waits_twice(tiny_model: Path, quick_device: Device) -> None:
    """Once for the plan and once for the tokens: the device records when tokens are moved."""
    from tests.far import WAIT  # noqa: PLC0415 - there is none beside a GPU

    steps, retired, step, apply = list[list[str]](), list[int](), DecodeEngine.step, Window.apply
    asked: list[str] = quick_device.asked  # type: ignore[attr-defined]

    def stepping(engine: DecodeEngine) -> object:
        start = len(asked)
        retired.append(0)
        sends = list(step(engine))
        steps.append(asked[start:])
        return sends

    def applying(window: Window, plan: RetirementPlan) -> object:
        retired[-1] += 1
        emptied = apply(window, plan)
        assert window.moving.phase[plan.slots].all()  # until the tokens are there
        return emptied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeEngine, "step", stepping)
        patch.setattr(Window, "apply", applying)
        with LocalServer(config("diffkv"), tiny_model, device=quick_device) as server:
            longer = replace(GREEDY, max_tokens=60)
            tokens_of(server.complete([server.request([5, 6, 7 + at], longer) for at in range(2)]))
    for calls, count in zip(steps, retired, strict=True):
        assert calls.count(WAIT) <= (2 if count else 1), calls
    assert any(retired)


@ONLY_FAKE
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_is_sampled_in_a_few_launches_and_one_wait(
    quick_device: Device, temperature: float
) -> None:
    from tests.far import WAIT  # noqa: PLC0415 - there is none beside a GPU

    asked: list[str] = quick_device.asked  # type: ignore[attr-defined]
    rows = [
        SamplerRow(
            Sampling(temperature=temperature, top_p=0.9, top_k=i, min_p=0.01, seed=i), [], []
        )
        for i in range(32)
    ]
    logits = torch.randn(32, 300)
    there, start = quick_device.put(logits.numpy()), len(asked)
    drawn = sample(there, rows)
    calls = asked[start:]
    assert calls.count(WAIT) == 1
    assert len(calls) <= 6 + 1, calls
    assert drawn == sample(logits, rows)


@ONLY_FAKE
@pytest.mark.parametrize("asking", [1, 8])
def test_log_probabilities_come_with_the_tokens(quick_device: Device, asking: int) -> None:
    """One wait and as many calls, however many rows ask."""
    from tests.far import WAIT  # noqa: PLC0415 - there is none beside a GPU

    asked: list[str] = quick_device.asked  # type: ignore[attr-defined]
    wanted = [i % 4 if i < asking else -1 for i in range(8)]
    rows = [SamplerRow(Sampling(temperature=0.8, seed=i, logprobs=n), [], [])
            for i, n in enumerate(wanted)]  # fmt: skip
    logits = torch.randn(8, 300)
    logits[5, 0] = float("nan")
    there, start = quick_device.put(logits.numpy()), len(asked)
    drawn = sample(there, rows)
    calls = asked[start:]
    assert calls.count(WAIT) == 1
    assert len(calls) <= 24, calls
    assert drawn == sample(logits, rows)
    assert [len(one.top) for one in drawn] == [
        max(n, 0) if i != 5 else 0 for i, n in enumerate(wanted)
    ]


@ONLY_FAKE
def test_a_layer_is_twelve_launches(
    tiny_model: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of Triton and matrix products in one captured step; attention is two of them."""
    seen, capture = list[Counter[str]](), type(device).capture
    asked: list[str] = device.asked  # type: ignore[attr-defined]

    def counting(self: Device, work: Callable[[], Tensor], pool: object) -> Captured:
        start = len(asked)
        captured = capture(self, work, pool)
        seen.append(Counter(asked[start:]))
        return captured

    monkeypatch.setattr(type(device), "capture", counting)
    few = replace(GREEDY, max_tokens=2)
    with LocalServer(config("uniform:k8v4"), tiny_model, device=device) as server:
        server.complete([server.request([5, 6, 7], few)])
    of_layer = {
        "norm_rows": 2, "rotate_pairs": 1, "rotate_all": 1, "append_slots": 1,
        "attend_sections": 1, "merge_runs": 1, "gate_rows": 1, "aten.mm.default": 4,
    }  # fmt: skip
    assert sum(of_layer.values()) == 12
    layers = 2
    around = {"norm_rows": 1, "aten.mm.default": 1}  # the norm before the head, and the head
    step = {name: layers * count + around.get(name, 0) for name, count in of_layer.items()}
    views = ("view", "slice", "select", "detach", "t.default", "transpose", "alias", "empty")
    assert "rotate_outputs" not in seen[0]  # outputs are rotated where runs are merged
    launches = {name: count for name, count in seen[0].items() if not any(v in name for v in views)}
    assert {name: launches.get(name, 0) for name in step} == step
    # Embedding, angles of RoPE, the last sum, and the rows of the head.
    assert sum(launches.values()) - sum(step.values()) <= 12, launches


def test_batches_are_filled_up_by_less_than_a_half_or_eight_rows() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100]
