"""Tiny random models with sliding windows, of the families that have them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.families import TINY
from tests.tiny import byte_tokenizer

WINDOW = 24


def _of(kind: str, **settings: object) -> Callable[..., PreTrainedConfig]:
    return lambda **others: AutoConfig.for_model(kind, **{**TINY, **settings, **others})


WITH_WINDOWS: Mapping[str, Callable[..., PreTrainedConfig]] = {
    "Mistral": _of("mistral", sliding_window=WINDOW),
    "Gemma 2": _of("gemma2", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
    "Gemma 3": _of("gemma3_text", head_dim=32, sliding_window=WINDOW, sliding_window_pattern=2),
    "GPT-OSS": _of("gpt_oss", head_dim=32, num_local_experts=4, sliding_window=WINDOW),
    "Qwen2": _of("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
}


def save_sliding(name: str, path: Path, **settings: object) -> torch.nn.Module:
    """Write a random model; weights large enough that attention matters."""
    torch.manual_seed(0)
    config = WITH_WINDOWS[name](**settings)
    kind = AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for weight in model.parameters():
        weight.data.normal_(std=0.15)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return model.eval()
