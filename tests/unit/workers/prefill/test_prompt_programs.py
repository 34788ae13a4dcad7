"""Prefill steps as programs: the bits of steps that run op by op, and what is no program."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import DIFFKV
from tests.unit.workers.decode.test_step_programs import no_programs, save
from tests.unit.workers.test_local_server import config, greedy, prompt
from triptych.kernels import multiplies_bytes, multiplies_words
from triptych.workers.local import Completion, LocalServer
from triptych.workers.prefill import prompt_programs
from triptych.workers.prefill.prompt_programs import PromptPrograms

MODEL: dict[str, object] = {"name": "tiny", "dtype": "bfloat16", "quantization": "int4"}
IN_8_BITS: dict[str, object] = {**MODEL, "quantization": "int8"}
CACHED: dict[str, object] = {
    "kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 4 << 20,
}  # fmt: skip
PROMPTS = [1, 5, 33, 48, 96, 131, 290]


def answers(path: Path, prompts: list[list[int]], **parts: dict[str, object]) -> list[Completion]:
    usual: dict[str, dict[str, object]] = {"model": MODEL, "compressor": {**DIFFKV}}
    with LocalServer(config(**usual | parts), path) as server:
        asked = [server.request(each, greedy(12)) for each in prompts]
        return [answer for half in (asked[:3], asked[3:]) for answer in server.complete(half)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that could be a program was one."""
    seen, forward = list[bool](), PromptPrograms.forward

    def spied(self: PromptPrograms, *given: Any) -> Any:
        logits = forward(self, *given)
        seen.append(logits is not None)
        return logits

    monkeypatch.setattr(PromptPrograms, "forward", spied)
    return seen


def check_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.cached_tokens == other.cached_tokens
        assert one.tokens == other.tokens
        assert [each.logprob for each in one.logprobs] == [e.logprob for e in other.logprobs]


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
@pytest.mark.parametrize(("most", "model"), [(16, MODEL), (1, MODEL), (16, IN_8_BITS)])
@pytest.mark.parametrize(
    "family", ["Llama", "Mistral, window", "Qwen2, biases", "Qwen3, norms of heads"]
)
def test_a_program_computes_the_bits_of_its_ops(
    family: str,
    most: int,
    model: dict[str, object],
    tmp_path: Path,
    steps: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks of several prompts and of a long one, with tokens of the prefix cache before."""
    monkeypatch.setattr(prompt_programs, "MOST_PROGRAMS", most)
    path = save(family, tmp_path)
    prompts = [prompt(count) for count in PROMPTS]
    prompts = [*prompts[:3], *prompts[3:], prompts[-1][:200] + prompts[-1][:40]]
    if model is IN_8_BITS and not multiplies_bytes():
        pytest.skip("products in 8 bits are no jobs here")
    found = answers(path, prompts, model=model, pool=CACHED)
    assert steps
    assert all(steps)
    monkeypatch.setattr(PromptPrograms, "of", no_programs)
    count = len(steps)
    expected = answers(path, prompts, model=model, pool=CACHED)
    assert len(steps) == count, "the second server has no programs"
    check_same(found, expected)


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
def test_an_output_does_not_depend_on_where_chunks_begin(tmp_path: Path, steps: list[bool]) -> None:
    path, prompts = save("Llama", tmp_path), [prompt(count) for count in PROMPTS]
    fp16: dict[str, object] = {"policy": "uniform:k8v4", "recent_window_tokens": 20}
    by_size = [
        answers(path, prompts, compressor=fp16, prefill={"max_num_batched_tokens": size})
        for size in (17, 512)
    ]
    assert all(steps)
    check_same(*by_size)


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
@pytest.mark.parametrize("family", ["Llama", "Mistral, window", "Qwen3, norms of heads"])
def test_layers_in_parts_have_the_bits_of_chunks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more than a step, one layer at a time, beside those of a step."""
    path, prompts = save(family, tmp_path), [prompt(count) for count in PROMPTS]
    parts, through = list[int](), PromptPrograms.through

    def spied(self: PromptPrograms, *given: Any) -> Any:
        after = through(self, *given)
        assert after is not None
        parts.append(len(after))
        return after

    monkeypatch.setattr(PromptPrograms, "through", spied)
    pool: dict[str, object] = {"kv_cache_memory_bytes": 16 << 20, "prefix_bytes": 0}
    step: dict[str, object] = {"max_num_batched_tokens": 80}
    whole, in_parts = (
        answers(path, prompts, pool=pool, prefill=step, experimental={"layers_at_once": layers})
        for layers in (0, 1)
    )
    assert 96 in parts  # not the last layer
    assert 1 in parts  # the last one, of which one token is needed
    check_same(in_parts, whole)


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
def test_methods_that_measure_queries_run_op_by_op(tmp_path: Path, steps: list[bool]) -> None:
    method: dict[str, object] = {"policy": "expected_attention", "kv_rotation": "hadamard"}
    found = answers(save("Llama", tmp_path), [prompt(40)], compressor=method)
    assert len(found[0].tokens) == 12
    assert steps
    assert not any(steps)


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"name": "tiny", "dtype": "float32"}},
        {"compressor": {"policy": "uniform:k8v4", "kv_rotation": "none"}},
    ],
    ids=["no weights in 4 bits", "coordinates of the model"],
)
def test_other_models_have_no_programs(
    parts: dict[str, dict[str, object]], tmp_path: Path, steps: list[bool]
) -> None:
    found = answers(save("Llama", tmp_path), [prompt(96)], **parts)
    assert len(found[0].tokens) == 12
    assert not steps
