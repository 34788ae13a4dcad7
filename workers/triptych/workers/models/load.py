"""A model directory turned into a module, its tokenizer and the facts the engine needs."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from triptych.core.config import DType
from triptych.core.errors import ModelError
from triptych.core.layout import Geometry
from triptych.workers.models.attention import ATTENTION, LayerTraits, run_stock
from triptych.workers.models.files import MANIFEST, file_hashes
from triptych.workers.models.pretrained import (
    read_config,
    read_end_tokens,
    read_tokenizer,
    read_weights,
    readable,
    without_weights,
)

PLAIN = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
"""Of models whose layers are the plain pre-norm block."""
_SAMPLE_BYTES, _SAMPLES = 4096, 64
_BATCH_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the engine must know of a model, beside its weights."""

    geometry: Geometry
    num_heads: int
    """Query heads of each layer."""
    layers: tuple[LayerTraits, ...]
    """Scale, sliding window and softcap of each layer's attention."""
    context_tokens: int
    """Longest sequence the model was made for."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Length of a row of logits; may exceed the tokenizer's vocabulary."""
    revision: str
    """Changes with config, tokenizer or weights: part of the key of anything cached."""
    weights: str
    """Changes with the weights alone: what a profile belongs to."""
    is_plain: bool
    """Whether its layers are the plain pre-norm block, which runs fused, and can be left early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelFacts):
    """A decoder-only language model, ready to run; weights are read-only, mapped where possible."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a forward pass reads: all, but an embedding that is no head."""
        embedding = cast("nn.Embedding", self.model.get_input_embeddings()).weight
        head = cast("nn.Linear", self.model.get_output_embeddings()).weight
        read = [part for part in self.model.parameters() if part is head or part is not embedding]
        return sum(part.numel() * part.element_size() for part in read)


def describe(path: Path) -> ModelFacts:
    """Read a model's facts without its weights.

    One token is run through a model without memory, to learn what its layers really hand
    to attention: the geometry is observed, not guessed from the config.

    Raises: ModelError for what cannot be served, saying why
    """
    config = _servable_config(path)
    layers, geometry, num_heads = _observe(path, config)
    return ModelFacts(
        geometry=geometry,
        num_heads=num_heads,
        layers=layers,
        context_tokens=int(config.max_position_embeddings),
        eos_token_ids=read_end_tokens(path, config),
        vocab_size=int(config.vocab_size),
        revision=revision_of(path),
        weights=weights_of(path),
        is_plain=type(config) in PLAIN and config.hidden_act == "silu",
    )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how much memory it takes."""

    geometry: Geometry
    context_tokens: int
    parameters: int


def shape_of(path: Path) -> ModelShape:
    """Read a model's shape from its ``config.json`` alone: its weights need not be there.

    Raises: ModelError for what cannot be served, saying why
    """
    config = _servable_config(path)
    _, geometry, _ = _observe(path, config)
    model = without_weights(config, ATTENTION)
    return ModelShape(
        geometry=geometry,
        context_tokens=int(config.max_position_embeddings),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def load(path: Path, dtype: DType, device: str = "cpu") -> LoadedModel:
    """Load a directory in Hugging Face's form; only safetensors, never code from the directory.

    Raises: ModelError for what cannot be served, saying why
    """
    facts = describe(path)
    model = read_weights(path, read_config(path), dtype, device, ATTENTION)
    known = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return LoadedModel(model=model, tokenizer=read_tokenizer(path), **known)


def _servable_config(path: Path) -> PreTrainedConfig:
    config = read_config(path)
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    kind = str(rope.get("rope_type", "default"))
    reasons = {
        "it is an encoder-decoder model": bool(config.is_encoder_decoder),
        "it reads more than text": "vision_config" in config or "audio_config" in config,
        "it states no max_position_embeddings": "max_position_embeddings" not in config,
        "layers share their keys and values": bool(getattr(config, "num_kv_shared_layers", 0)),
        f"{kind} rotary embeddings change with what shares the batch": kind in _BATCH_ROPE,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(f"{path}: cannot be served: {reason}")
    return config


def _observe(path: Path, config: PreTrainedConfig) -> tuple[tuple[LayerTraits, ...], Geometry, int]:
    """Run one token without weights and note what each layer gives to attention."""
    seen = dict[int, LayerTraits]()
    shapes = set[tuple[int, int, int, int]]()

    def note(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        seen[layer] = LayerTraits(scale=scale, window=window, softcap=softcap)
        shapes.add((query.shape[1], key.shape[1], key.shape[2], value.shape[2]))
        return torch.empty_like(query)

    model = without_weights(config, ATTENTION).eval()
    token = torch.zeros(1, dtype=torch.int64, device="meta")
    with readable(path, "cannot run on a ragged batch"), torch.inference_mode():
        run_stock(model, token, token, note, token)
    return _uniform(path, int(config.num_hidden_layers), seen, shapes)


def _uniform(
    path: Path,
    layers: int,
    seen: dict[int, LayerTraits],
    shapes: set[tuple[int, int, int, int]],
) -> tuple[tuple[LayerTraits, ...], Geometry, int]:
    """One geometry for all layers, or an error that says what is in the way."""
    if sorted(seen) != list(range(layers)):
        raise ModelError(f"{path}: {len(seen)} of {layers} layers have attention of the usual kind")
    if len(shapes) != 1:
        raise ModelError(f"{path}: layers differ in query heads, KV heads, dims: {sorted(shapes)}")
    heads, kv_heads, key_dim, value_dim = shapes.pop()
    if key_dim != value_dim:
        raise ModelError(f"{path}: keys have {key_dim} dimensions, values {value_dim}")
    geometry = Geometry(layers=layers, kv_heads=kv_heads, head_dim=key_dim)
    return tuple(seen[layer] for layer in range(layers)), geometry, heads


def revision_of(path: Path) -> str:
    """Hash what decides the model's answers: settings, tokenizer and weights."""
    if (path / MANIFEST).is_file():
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()[:16]
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.json")):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(weights_of(path).encode())
    return digest.hexdigest()[:16]


def weights_of(path: Path) -> str:
    """Hash the weights.

    A converted model has a manifest with full hashes. Of any other weight file the size and 64
    samples of 4 KiB count, header first: fine-tuned weights of the same shape differ in nearly
    every sample.
    """
    digest = hashlib.sha256()
    known = file_hashes(path)
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        if file.name in known:
            digest.update(known[file.name].encode())
            continue
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(sample * size // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
