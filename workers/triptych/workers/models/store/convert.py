"""Converts a GGUF file to a directory in Hugging Face format, weights in bfloat16.

transformers reads the GGUF's settings and vocabulary. The weights are dequantized here, one tensor
at a time, so that the model is in memory only once and no tensor of the file is left out. bfloat16
is half the size of float32, can be memory-mapped and shared by all workers of a machine, and rounds
far less than the quantization of the file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from triptych.core.errors import ModelError
from triptych.workers.models.pretrained import (
    read_config,
    read_tokenizer,
    shapes_of,
    without_weights,
    write_settings,
)
from triptych.workers.models.store.gguf import GgufHeader, GgufTensor, read_header
from triptych.workers.models.store.safe_files import Progress

Fix = Callable[[np.ndarray, str, PreTrainedConfig], np.ndarray]
"""Reverts the change of llama.cpp's converter to a tensor, given its transformers name."""

SHARD_BYTES = 2 << 30
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the RoPE frequencies, in files of Llama 3.1 and later."""
ROPE_THETA = 10_000.0
"""Where a file has no ``rope.freq_base``."""


def _as_stored(weight: np.ndarray, name: str, config: PreTrainedConfig) -> np.ndarray:
    return weight


def _unpermute_rope(weight: np.ndarray, name: str, config: PreTrainedConfig) -> np.ndarray:
    """llama.cpp interleaves the two halves of each head of Llama's query and key."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if f".{part}." in name:
            halves = weight.reshape(count, -1, 2, *weight.shape[1:])
            return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def _subtract_one(weight: np.ndarray, name: str, config: PreTrainedConfig) -> np.ndarray:
    """Gemma scales by ``1 + weight``; llama.cpp stores the sum."""
    return weight - 1 if name.endswith("norm.weight") else weight


ARCHITECTURES: dict[str, Fix] = {
    "llama": _unpermute_rope,
    "qwen2": _as_stored,
    "qwen3": _as_stored,
    "gemma2": _subtract_one,
    "gemma3": _subtract_one,
}

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
"""Where transformers drops the GGUF's ``tokenizer.ggml.pre``: SmolLM splits off every digit."""


def convert(gguf: Path, target: Path, progress: Progress) -> None:
    """Write config, tokenizer and safetensors of ``gguf`` into the existing ``target``.

    Raises: ModelError for a file that cannot be converted completely
    """
    header = read_header(gguf)
    _refuse_split(gguf, header)
    architecture = header.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{gguf}: architecture {architecture!r} (have {sorted(ARCHITECTURES)})")
    _refuse_scaled_rope(gguf, header, architecture)
    config, tokenizer = read_config(gguf), read_tokenizer(gguf)
    _correct(tokenizer, config, header)
    _set_rope_factors(gguf, header, config)
    _write_weights(gguf, header, config, target, progress)
    write_settings(target, config, tokenizer)
    _complete_config(target / "config.json")


def _correct(
    tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, header: GgufHeader
) -> None:
    """Apply settings of the file that transformers ignores."""
    head_dim = header.metadata.get(f"{header.text('general.architecture')}.attention.key_length")
    if head_dim is not None and hasattr(config, "head_dim"):
        config.head_dim = head_dim
    pre = header.text("tokenizer.ggml.pre")
    if pre in PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.model_max_length = int(config.max_position_embeddings)
    for ours, theirs in _SPECIAL_TOKENS.items():
        token = header.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(token, int):
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(token))
            setattr(config, f"{ours}_token_id", token)


def _refuse_split(gguf: Path, header: GgufHeader) -> None:
    files = header.metadata.get("split.count", 1)
    if isinstance(files, int) and files > 1:
        raise ModelError(
            f"{gguf}: one of {files} files of a split model: join them with llama.cpp's "
            "'llama-gguf-split --merge'"
        )


def _refuse_scaled_rope(gguf: Path, header: GgufHeader, architecture: str) -> None:
    scaling = header.text(f"{architecture}.rope.scaling.type")
    if scaling not in ("", "none"):
        raise ModelError(
            f"{gguf}: rotary embeddings with {scaling} scaling are lost when read from GGUF; "
            "use the model's safetensors form"
        )


def _set_rope_factors(gguf: Path, header: GgufHeader, config: PreTrainedConfig) -> None:
    """Write the file's RoPE factors into the config, as ``longrope`` that never grows long."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return
    file = np.memmap(gguf, dtype=np.uint8, mode="r")
    factors = _dequantize(file, tensor).reshape(-1).astype(np.float64)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    if len(factors) != head_dim // 2 or not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"{gguf}: {ROPE_FACTORS}: expected {head_dim // 2} positive numbers")
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": float(header.metadata.get(_rope_base(header), ROPE_THETA)),
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _rope_base(header: GgufHeader) -> str:
    return f"{header.text('general.architecture')}.rope.freq_base"


def _complete_config(path: Path) -> None:
    """Add the dtype of the weights, remove the author's ``name_or_path``."""
    body = json.loads(path.read_text(encoding="utf-8"))
    fields = {key: value for key, value in body.items() if not key.endswith("name_or_path")}
    text = json.dumps(fields | {"dtype": "bfloat16"}, indent=2, sort_keys=True)
    path.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------ weights


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor to write: its name in transformers and its place in the GGUF."""

    name: str
    source: GgufTensor

    @property
    def size_bytes(self) -> int:
        return 2 * int(np.prod(self.source.shape))


def _write_weights(
    gguf: Path, header: GgufHeader, config: PreTrainedConfig, target: Path, progress: Progress
) -> None:
    fix = ARCHITECTURES[header.text("general.architecture")]
    shards = _shards(_plan(gguf, header, config))
    total = sum(entry.size_bytes for shard in shards for entry in shard)
    file = np.memmap(gguf, dtype=np.uint8, mode="r")
    done, index = 0, dict[str, str]()
    for number, shard in enumerate(shards, 1):
        tensors = dict[str, torch.Tensor]()
        for entry in shard:
            weight = fix(_dequantize(file, entry.source), entry.name, config)
            tensors[entry.name] = _as_bfloat16(weight, entry.name)
            done += entry.size_bytes
            progress("convert", done, total)
        name = f"model-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "model"
        save_file(tensors, target / f"{name}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
    if len(shards) > 1:
        body = {"metadata": {"total_size": total}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(body), encoding="utf-8")


def _plan(gguf: Path, header: GgufHeader, config: PreTrainedConfig) -> list[_Entry]:
    """Map tensors of the file to those of the model, one to one, without remainder."""
    model = without_weights(config)
    config.architectures = [type(model).__name__]
    names = _name_map(header.text("general.architecture"), config.num_hidden_layers)
    tied = set[str](["lm_head.weight"]) if config.tie_word_embeddings else set[str]()
    entries, used = list[_Entry](), set[str]()
    for name, expected in shapes_of(model).items():
        if name in tied:
            continue
        source = header.tensors.get(_gguf_name(names, name))
        if source is None or source.shape != expected:
            found = source.shape if source else "nothing"
            raise ModelError(f"{gguf}: {name} should be {expected}, found {found}")
        entries.append(_Entry(name, source))
        used.add(source.name)
    if unused := sorted(header.tensors.keys() - used - {ROPE_FACTORS}):
        raise ModelError(f"{gguf}: tensors without a place in {type(model).__name__}: {unused[:5]}")
    return entries


def _name_map(architecture: str, layers: int) -> TensorNameMap:
    by_name = {name: MODEL_ARCH(key) for key, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(by_name[architecture], layers)


def _gguf_name(names: TensorNameMap, name: str) -> str:
    return names.get_name(name, try_suffixes=(".weight", ".bias")) or ""


def _shards(entries: list[_Entry]) -> list[list[_Entry]]:
    shards, size = [list[_Entry]()], 0
    for entry in entries:
        if shards[-1] and size + entry.size_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size_bytes
    return shards


def _dequantize(file: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    raw = file[tensor.offset : tensor.offset + tensor.size_bytes]
    rows = raw.reshape(*tensor.shape[:-1], -1)
    if tensor.type.name in ("F32", "F16"):
        return rows.view(np.dtype(tensor.type.name.lower().replace("f", "float"))).astype(
            np.float32
        )
    return dequantize(rows, tensor.type)


def _as_bfloat16(weight: np.ndarray, name: str) -> torch.Tensor:
    if not np.isfinite(weight).all():
        raise ModelError(f"{name} holds values that are not finite numbers")
    return torch.as_tensor(np.ascontiguousarray(weight)).to(torch.bfloat16)
