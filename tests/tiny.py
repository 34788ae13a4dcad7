"""A tiny random model with a byte-level tokenizer, as a directory in Hugging Face's form."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CONTEXT_TOKENS = 512

DIFFKV = {
    "policy": "diffkv",
    "high_format": "k8v4",
    "low_format": "k4v2",
    "alpha_high": 1.0,
    "alpha_low": 0.2,
    "recent_window_tokens": 4,
    "high_window_tokens": 8,
    "score_every_tokens": 2,
    "sink_tokens": 1,
}
"""Compressor settings by which every class of tokens occurs within a few tokens."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def save_tiny_model(path: Path, layers: int = 2) -> Path:
    """Four query heads on two KV heads, head_dim 32."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def save_tiny_qwen3(
    path: Path, *, layers: int = 2, head_dim: int = 32, context_tokens: int = CONTEXT_TOKENS
) -> Path:
    """A random Qwen3: norms of queries and keys, and four query heads for each of two KV heads."""
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context_tokens,
        eos_token_id=1,
        initializer_range=0.2,
    )
    torch.manual_seed(11)
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
