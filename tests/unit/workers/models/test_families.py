"""Every family answers as transformers does, or is refused; docs/models.md has them all."""

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from tests.families import FAMILIES
from tests.tiny import byte_tokenizer
from triptych.core.config import AppConfig
from triptych.core.errors import ModelError
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe
from triptych.workers.models.load import load
from triptych.workers.models.store.checkpoint_files import layers_prefix

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"
ROWS = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", DOCUMENT.read_text(), re.MULTILINE)
REFUSED = {name: reason for name, how, reason in ROWS if how == "refused"}
SERVED = {name: how for name, how, _ in ROWS if how in ("fused", "transformers")}
LENGTHS = (60, 37, 5)
ANSWER_TOKENS = 12
TIE = 2e-3
"""Logits nearer than this, of logits with a standard deviation of 1, count as equal: pages round
keys and values to 16 bits."""


def save(config: PreTrainedConfig, path: Path) -> torch.nn.Module:
    """Write a random model; weights large enough that attention matters."""
    torch.manual_seed(0)
    kind = AutoModelForCausalLM
    if config.get_text_config(decoder=True) is not config:
        kind = AutoModelForImageTextToText
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for weight in model.parameters():
        weight.data.normal_(std=0.15)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return model.eval()


def test_the_table_lists_every_family() -> None:
    assert SERVED.keys() | REFUSED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", SERVED)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save(FAMILIES[name](), tmp_path)
    assert SERVED[name] == ("fused" if describe(tmp_path).is_plain else "transformers")
    settings = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "compressor": {"policy": "uniform:fp16", "recent_window_tokens": 20},
            "prefill": {"max_num_batched_tokens": 48},
        }
    )
    draw = random.Random(name)
    prompts = [[draw.randrange(2, 258) for _ in range(count)] for count in LENGTHS]
    greedy = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    with LocalServer(settings, tmp_path) as server:
        answers = server.complete([server.request(prompt, greedy) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        own = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert ((logits.max(-1).values - own) / logits.std()).max() < TIE


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    FAMILIES[name]().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        describe(tmp_path)
    text = str(error.value)
    assert REFUSED[name].strip("`") in text
    assert "\n" not in text


LAYOUTS = {
    "Qwen3-VL": ("model.language_model.", "lm_head.weight"),
    "SmolVLM": ("model.text_model.", "lm_head.weight"),
    "Qwen2-VL": ("model.", "lm_head.weight"),
}


@pytest.mark.parametrize("name", ["Mistral 3", "Gemma 3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_part_is_found_under_any_prefix(name: str, layout: str, tmp_path: Path) -> None:
    save(FAMILIES[name](), tmp_path)
    file, (prefix, head) = tmp_path / "model.safetensors", LAYOUTS[layout]

    def logits() -> torch.Tensor:
        network = load(tmp_path, "float32").network
        ids, at = torch.arange(9) + 5, torch.tensor([8])
        with torch.inference_mode():
            return network(ids, torch.arange(9), attend, at)

    def attend(layer: int, query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return query

    before = logits()
    stored = load_file(file)
    was = layers_prefix(stored)

    def renamed(key: str) -> str:
        if key.endswith("lm_head.weight"):
            return head
        return f"{prefix}{key.removeprefix(was)}" if key.startswith(was) else f"vision.{key}"

    changed = {renamed(key): weight for key, weight in stored.items()}
    assert changed.keys() != stored.keys()
    save_file(changed, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits(), before, rtol=0, atol=0)
