"""Tiny random models of every family, and a tokenizer made on the spot."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

TINY = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama, tied, llama3 rope": LlamaConfig(
        **TINY,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama, yarn rope": LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**TINY),
    "qwen2, windows above layer 0": Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "mistral": MistralConfig(**TINY, sliding_window=7),
    "gemma": GemmaConfig(**TINY, head_dim=16),
    "gemma2": Gemma2Config(
        **TINY,
        head_dim=16,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=9.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": Gemma3TextConfig(**TINY, head_dim=16, sliding_window=6, sliding_window_pattern=2),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> PreTrainedConfig:
    """The config of each family in turn."""
    return deepcopy(request.param)


@pytest.fixture
def llama() -> PreTrainedConfig:
    return deepcopy(FAMILIES["llama"])


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and that was that"] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


SaveModel = Callable[[PreTrainedConfig], Path]


@pytest.fixture
def save_model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> SaveModel:
    """Writes a random model of a config; weights large enough that attention matters."""

    def save(config: PreTrainedConfig) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            weight.data.normal_(std=0.2)
        target = tmp_path / "model"
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        return target

    return save
