"""Decode steps as programs: the bits of steps that run op by op, and what is no program."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tiny import DIFFKV, byte_tokenizer
from tests.unit.workers.test_local_server import config, greedy, prompt
from triptych.kernels import multiplies_bytes, multiplies_words
from triptych.workers.decode.steps import step_programs
from triptych.workers.decode.steps.step_programs import StepPrograms
from triptych.workers.local import Completion, LocalServer
from triptych.workers.models.kv_rotation import (
    BasisCoordinates,
    Coordinates,
    LatentCoordinates,
    PairCoordinates,
)
from triptych.workers.models.load import load
from triptych.workers.models.runner import ModelRunner

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": 0,
    "eos_token_id": 1, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
PROMPTS = [1, 5, 12, 33, 48, 96, 130]


def save(family: str, path: Path) -> Path:
    made: dict[str, PreTrainedModel] = {
        "Llama": LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "Mistral, window": MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=40)),
        "Qwen2, biases": Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "Qwen3, norms of heads": Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    }
    made[family].save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def answers(path: Path, **parts: dict[str, object]) -> list[Completion]:
    model: dict[str, object] = {"name": "tiny", "dtype": "bfloat16", "quantization": "int4"}
    usual: dict[str, dict[str, object]] = {"model": model, "compressor": {**DIFFKV}}
    settings = config(**usual | parts)
    with LocalServer(settings, path) as server:
        asked = [server.request(prompt(count), greedy(40)) for count in PROMPTS]
        return server.complete(asked)


def no_programs(*_given: object) -> None:
    """In the place of ``StepPrograms.of``."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that could be a program was one."""
    seen, forward = list[bool](), StepPrograms.forward

    def spied(self: StepPrograms, *given: Any) -> Any:
        logits = forward(self, *given)
        seen.append(logits is not None)
        return logits

    monkeypatch.setattr(StepPrograms, "forward", spied)
    return seen


@pytest.mark.skipif(not multiplies_words(), reason="not a processor of x86")
@pytest.mark.parametrize(("most", "parts"), [(64, 1), (64, 3), (2, 2)])
@pytest.mark.parametrize(
    "family", ["Llama", "Mistral, window", "Qwen2, biases", "Qwen3, norms of heads"]
)
def test_a_program_computes_the_bits_of_its_ops(
    family: str,
    most: int,
    parts: int,
    tmp_path: Path,
    steps: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_programs, "MOST_PARTS", most)
    monkeypatch.setattr(StepPrograms, "_parts", lambda _, requests: min(parts, requests))
    path = save(family, tmp_path)
    found = answers(path)
    assert steps
    assert all(steps)
    monkeypatch.setattr(StepPrograms, "of", no_programs)
    count = len(steps)
    expected = answers(path)
    assert len(steps) == count, "the second server has no programs"
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert [each.logprob for each in one.logprobs] == [e.logprob for e in other.logprobs]


@pytest.mark.skipif(not multiplies_bytes(), reason="products in 8 bits are no jobs here")
@pytest.mark.parametrize("family", ["Qwen2, biases", "Qwen3, norms of heads"])
def test_a_program_in_8_bits_computes_the_bits_of_its_ops(
    family: str, tmp_path: Path, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, object] = {"name": "tiny", "dtype": "bfloat16", "quantization": "int8"}
    path = save(family, tmp_path)
    found = answers(path, model=model)
    assert steps
    assert all(steps)
    monkeypatch.setattr(StepPrograms, "of", no_programs)
    for one, other in zip(found, answers(path, model=model), strict=True):
        assert one.tokens == other.tokens
        assert [each.logprob for each in one.logprobs] == [e.logprob for e in other.logprobs]


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"name": "tiny", "dtype": "float32"}},
        {"compressor": {"policy": "uniform:k8v4", "kv_rotation": "none"}},
    ],
    ids=["no weights in 4 bits", "coordinates of the model"],
)
def test_other_steps_run_op_by_op(
    parts: dict[str, dict[str, object]], tmp_path: Path, steps: list[bool]
) -> None:
    assert all(len(one.tokens) == 40 for one in answers(save("Llama", tmp_path), **parts))
    assert not steps


def test_only_plain_coordinates_are_those_of_a_program(tmp_path: Path) -> None:
    loaded = load(save("Llama", tmp_path), "bfloat16", quantization="int4")
    if not multiplies_words():
        assert ModelRunner(loaded, None).centred_blocks is None
        return
    centre = torch.zeros(3, 2, 32)
    bases = torch.eye(32).expand(2, 3, 2, 32, 32)
    assert ModelRunner(loaded, Coordinates(centre)).centred_blocks is not None
    others = BasisCoordinates(centre, bases), PairCoordinates(centre, bases[0])
    for other in (None, *others, LatentCoordinates(centre)):
        assert ModelRunner(loaded, other).centred_blocks is None
