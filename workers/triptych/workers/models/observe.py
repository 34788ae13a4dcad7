"""Observes what a model's layers hand to attention, and counts its parameters.

Imports transformers; ``facts`` imports this module only if the model's traits are not cached.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
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
from triptych.workers.models.architecture.attention_calls import observed_by
from triptych.workers.models.architecture.attention_masks import OBSERVED_ATTENTION
from triptych.workers.models.architecture.rope_limits import fix_rope
from triptych.workers.models.architecture.text_part import text_part
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.latent_attention import read_latents
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
OBSERVED_TOKENS = 4
HEAD_DIM_STEP = 16
"""Sizes of heads that kernels take are multiples of it; others are padded with zeros."""
ATTENDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, in a config, that attend to keys and values of all or of the latest tokens."""
_MIXING = re.compile("conv|linear|mamba|recurrent|lightning|delta|ssm")
"""Kinds of layers, in a config, that are no attention."""
_UNKNOWN_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class _Observed:
    """A model without weights, and what its layers pass to attention."""

    config: PreTrainedConfig
    model: PreTrainedModel
    layers: tuple[LayerTraits, ...]
    geometry: Geometry
    num_heads: int
    context_tokens: int


def observe(path: Path) -> ModelTraits:
    """Run some tokens through a model on the ``meta`` device, and record the inputs of attention.

    Raises: ModelError for what cannot be served, saying why
    """
    seen = _observe(path)
    return ModelTraits(
        geometry=seen.geometry,
        num_heads=seen.num_heads,
        layers=seen.layers,
        context_tokens=seen.context_tokens,
        eos_token_ids=read_end_tokens(path, seen.config),
        vocab_size=int(seen.config.vocab_size),
        plain=_plain(seen),
    )


def observe_shape(path: Path) -> ModelShape:
    """Geometry, context length and parameters of a model, from its config.

    Raises: ModelError for what cannot be served, saying why
    """
    seen = _observe(path)
    return ModelShape(
        geometry=seen.geometry,
        context_tokens=seen.context_tokens,
        parameters=sum(parameter.numel() for parameter in seen.model.parameters()),
        embedding_parameters=_embedding_parameters(seen.model),
    )


def _embedding_parameters(model: PreTrainedModel) -> int:
    embedding = cast("nn.Embedding", model.get_input_embeddings()).weight
    head = cast("nn.Module | None", model.get_output_embeddings())
    own_head = isinstance(head, nn.Linear) and head.weight is not embedding
    return embedding.numel() + (cast("nn.Linear", head).weight.numel() if own_head else 0)


def _plain(seen: _Observed) -> PlainTraits | None:
    """RoPE frequencies are computed on the CPU: a model on ``meta`` has no values."""
    config = seen.config
    if type(config) not in PLAIN or config.hidden_act != "silu":
        return None
    made = type(cast("Any", seen.model).model.rotary_emb)(config=config)
    frequencies = tuple(made.inv_freq.tolist())
    if 2 * len(frequencies) != seen.geometry.head_dim:  # partly rotated, or padded
        return None
    return PlainTraits(
        norm_epsilon=float(config.rms_norm_eps),
        frequencies=frequencies,
        rotary_scale=float(made.attention_scaling),
        rotary_sections=tuple(getattr(config, "rotary_sections", ())),
        is_tied=bool(config.tie_word_embeddings),
        tensors=shapes_of(seen.model),
    )


def _observe(path: Path) -> _Observed:
    try:
        config = _servable_config(path)
        model = without_weights(config, OBSERVED_ATTENTION).eval()
        has_latents = read_latents(model, OBSERVED_ATTENTION)
        _refuse_mixing(config, model)
        context = _context(config, fix_rope(model, config))
        layers, geometry, num_heads = _run(path, config, model, context or _UNKNOWN_CONTEXT)
        windows = _windows(layers, context)
        geometry = replace(geometry, has_latents=has_latents, windows=windows)
        if not context:
            raise ModelError("it states no max_position_embeddings")
    except ModelError as error:
        text = str(error)
        if "meta tensor" in text:  # without values; torch's words help nobody
            text = "its layers decide by values of their input what they compute"
        known = text if text.startswith(str(path)) else f"{path}: cannot be served: {text}"
        raise ModelError(known) from error
    return _Observed(config, model, layers, geometry, num_heads, context)


def _servable_config(path: Path) -> PreTrainedConfig:
    """The config of the layers that read text."""
    config = read_config(path)
    text = text_part(config)
    reasons = {
        "it is an encoder-decoder model": bool(config.is_encoder_decoder),
        "it reads more than text": "vision_config" in text or "audio_config" in text,
        "layers share their keys and values": bool(getattr(text, "num_kv_shared_layers", 0)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(reason)
    return text


def _context(config: PreTrainedConfig, rope_limit: int | None) -> int:
    """The longest sequence that is computed as the model was made for it; 0 if it states none.

    Attention in chunks is causal within the first chunk.
    """
    stated = getattr(config, "max_position_embeddings", None)
    chunk = getattr(config, "attention_chunk_size", None)
    limits = [limit for limit in (stated, chunk, rope_limit) if limit]
    return min(map(int, limits)) if stated else 0


def _windows(layers: tuple[LayerTraits, ...], context: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 where it holds the whole context; empty: all do."""
    windows = tuple(layer.window if layer.window < context else 0 for layer in layers)
    return windows if any(windows) else ()


def _refuse_mixing(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Convolutions and state-space layers read the tokens before in a flat batch."""
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if mixing := sorted(filter(_MIXING.search, kinds)):
        raise ModelError(f"layers of kind {', '.join(mixing)} are not supported")
    has_convolutions = any(isinstance(module, nn.Conv1d) for module in model.modules())
    if has_convolutions or any(name.endswith("A_log") for name, _ in model.named_parameters()):
        raise ModelError("it has convolutions or state-space layers, which are not supported")


def _run(
    path: Path, config: PreTrainedConfig, model: PreTrainedModel, context: int
) -> tuple[tuple[LayerTraits, ...], Geometry, int]:
    """Run some tokens without weights, and record the inputs of each layer's attention."""
    traits = dict[int, LayerTraits]()
    shapes = set[tuple[int, int, int, int]]()

    def note(
        layer: int, query: Tensor, key: Tensor, value: Tensor, of_layer: LayerTraits
    ) -> Tensor:
        if layer in traits:
            raise ModelError(f"layer {layer} attends more than once")
        traits[layer] = of_layer
        shapes.add((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    tokens = torch.zeros(1, OBSERVED_TOKENS, dtype=torch.int64, device="meta")
    with (
        readable(path, "cannot run on a ragged batch"),
        torch.inference_mode(),
        observed_by(note, context),
    ):
        # With a mask of padding, transformers does not look for packed sequences, which needs
        # values of positions.
        out = model(
            input_ids=tokens,
            position_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
            logits_to_keep=tokens[0, :1],
        )
        if out.logits.shape[:2] != (1, 1):
            raise ModelError("it computes the logits of all tokens, not of some")
    return _uniform(config, traits, shapes)


def _uniform(
    config: PreTrainedConfig,
    traits: dict[int, LayerTraits],
    shapes: set[tuple[int, int, int, int]],
) -> tuple[tuple[LayerTraits, ...], Geometry, int]:
    """The geometry that all layers share, or a ModelError."""
    layers = int(config.num_hidden_layers)
    if not traits:
        raise ModelError(
            "its layers compute attention on their own, not through transformers' attention "
            "interface"
        )
    if sorted(traits) != list(range(layers)):
        kinds = set(getattr(config, "layer_types", None) or ()) - set(ATTENDS)
        others = f" ({', '.join(sorted(kinds))})" if kinds else ""
        raise ModelError(
            f"{len(traits)} of {layers} layers have attention of the usual kind{others}"
        )
    if len(shapes) != 1:
        raise ModelError(f"layers differ in query heads, KV heads, dims: {sorted(shapes)}")
    heads, kv_heads, key_dim, value_dim = shapes.pop()
    dim = -(-max(key_dim, value_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP
    geometry = Geometry(layers=layers, kv_heads=kv_heads, head_dim=dim)
    return tuple(traits[layer] for layer in range(layers)), geometry, heads
