"""Observes what a model's layers hand to attention, and counts its parameters.

Imports transformers; ``facts`` imports this module only if the model's traits are not cached.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from triptych.core.errors import ModelError
from triptych.core.layout import Geometry
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.hf_model import ATTENTION, run_hf_model
from triptych.workers.models.pretrained import (
    read_config,
    read_end_tokens,
    readable,
    shapes_of,
    without_weights,
)
from triptych.workers.models.traits import ModelShape, ModelTraits, PlainTraits

PLAIN = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
"""Configs of models whose layers are plain pre-norm blocks."""
_BATCH_ROPE = ("dynamic", "longrope")


def observe(path: Path) -> ModelTraits:
    """Run one token through a model on the ``meta`` device, and record the inputs of attention.

    Raises: ModelError for what cannot be served, saying why
    """
    config = _servable_config(path)
    model = without_weights(config, ATTENTION).eval()
    layers, geometry, num_heads = _observe(path, config, model)
    is_plain = type(config) in PLAIN and config.hidden_act == "silu"
    return ModelTraits(
        geometry=geometry,
        num_heads=num_heads,
        layers=layers,
        context_tokens=int(config.max_position_embeddings),
        eos_token_ids=read_end_tokens(path, config),
        vocab_size=int(config.vocab_size),
        plain=_plain(config, model) if is_plain else None,
    )


def observe_shape(path: Path) -> ModelShape:
    """Geometry, context length and parameters of a model, from its config.

    Raises: ModelError for what cannot be served, saying why
    """
    config = _servable_config(path)
    model = without_weights(config, ATTENTION).eval()
    _, geometry, _ = _observe(path, config, model)
    return ModelShape(
        geometry=geometry,
        context_tokens=int(config.max_position_embeddings),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _plain(config: PreTrainedConfig, model: PreTrainedModel) -> PlainTraits:
    """RoPE frequencies are computed on the CPU: a model on ``meta`` has no values."""
    made = type(cast("Any", model).model.rotary_emb)(config=config)
    return PlainTraits(
        norm_epsilon=float(config.rms_norm_eps),
        frequencies=tuple(made.inv_freq.tolist()),
        rotary_scale=float(made.attention_scaling),
        is_tied=bool(config.tie_word_embeddings),
        tensors=shapes_of(model),
    )


def _servable_config(path: Path) -> PreTrainedConfig:
    config = read_config(path)
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    kind = str(rope.get("rope_type", "default"))
    quantization = _quantization(config)
    reasons = {
        "it is an encoder-decoder model": bool(config.is_encoder_decoder),
        "it reads more than text": "vision_config" in config or "audio_config" in config,
        "it states no max_position_embeddings": "max_position_embeddings" not in config,
        "layers share their keys and values": bool(getattr(config, "num_kv_shared_layers", 0)),
        f"its weights are quantized by {quantization}, which is not read: take the unquantized "
        "checkpoint, or a .gguf file": bool(quantization),
        f"{kind} rotary embeddings change with what shares the batch": kind in _BATCH_ROPE,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(f"{path}: cannot be served: {reason}")
    return config


def _quantization(config: PreTrainedConfig) -> str:
    """The quantization method of a checkpoint; empty without one."""
    found: object = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    settings = cast("dict[str, object]", found if isinstance(found, dict) else vars(found))
    return str(settings.get("quant_method", "of an unknown kind"))


def _observe(
    path: Path, config: PreTrainedConfig, model: PreTrainedModel
) -> tuple[tuple[LayerTraits, ...], Geometry, int]:
    """Run one token without weights, and record the inputs of each layer's attention."""
    traits = dict[int, LayerTraits]()
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
        traits[layer] = LayerTraits(scale=scale, window=window, softcap=softcap)
        shapes.add((query.shape[1], key.shape[1], key.shape[2], value.shape[2]))
        return torch.empty_like(query)

    token = torch.zeros(1, dtype=torch.int64, device="meta")
    with readable(path, "cannot run on a ragged batch"), torch.inference_mode():
        run_hf_model(model, token, token, note, token)
    return _uniform(path, int(config.num_hidden_layers), traits, shapes)


def _uniform(
    path: Path,
    layers: int,
    traits: dict[int, LayerTraits],
    shapes: set[tuple[int, int, int, int]],
) -> tuple[tuple[LayerTraits, ...], Geometry, int]:
    """The geometry that all layers share, or a ModelError."""
    if sorted(traits) != list(range(layers)):
        raise ModelError(
            f"{path}: {len(traits)} of {layers} layers have attention of the usual kind"
        )
    if len(shapes) != 1:
        raise ModelError(f"{path}: layers differ in query heads, KV heads, dims: {sorted(shapes)}")
    heads, kv_heads, key_dim, value_dim = shapes.pop()
    if key_dim != value_dim:
        raise ModelError(f"{path}: keys have {key_dim} dimensions, values {value_dim}")
    geometry = Geometry(layers=layers, kv_heads=kv_heads, head_dim=key_dim)
    return tuple(traits[layer] for layer in range(layers)), geometry, heads
