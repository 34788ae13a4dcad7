"""Value types that describe a model: read from its settings, or observed on its layers."""

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.workers.models.attention_interface import LayerTraits

HEAD = "lm_head.weight"
"""Name of the output projection in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTraits:
    """Settings of plain pre-norm layers for the fused forward pass, besides their weights."""

    norm_epsilon: float
    frequencies: tuple[float, ...]
    """RoPE frequency of each pair of channels, in radians per position."""
    rotary_scale: float
    """Factor on cosine and sine."""
    rotary_sections: tuple[int, ...] = ()
    """Pairs of channels that are rotated by the first, second and third of a token's positions, in
    turn; empty: a token has one."""
    is_tied: bool
    """Whether the embedding is also the head."""
    tensors: Mapping[str, tuple[int, ...]]
    """Name and shape of every weight, as in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Properties of a model: from its config, and from what its layers pass to attention."""

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
    plain: PlainTraits | None
    """Set if the layers are plain pre-norm blocks, which run fused and allow early exit."""

    @property
    def is_plain(self) -> bool:
        return self.plain is not None

    def check_heads(self, config: AppConfig) -> None:
        """Raise ConfigError if a stage computes on GPUs, whose kernels do not take these heads."""
        geometry = self.geometry
        group, dim = self.num_heads // geometry.kv_heads, geometry.head_dim
        on_gpus = [name for name, one in config.worker_groups().items() if one.actor.num_gpus]
        if on_gpus and group > geometry.gpu_group:
            raise ConfigError(
                f"{on_gpus[0]}.actor.num_gpus: this model has {group} query heads on a KV head of "
                f"{dim} numbers, and GPU kernels take up to {geometry.gpu_group}: set it to 0 (the "
                "stage computes on the CPU)"
            )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Properties of a model that determine its memory."""

    geometry: Geometry
    context_tokens: int
    parameters: int
    """Of all weights."""
    embedding_parameters: int
    """Of the embedding and, where it is another, the head."""

    def weights_bytes(self, item_bytes: float, layers_item_bytes: float | None = None) -> int:
        """Bytes of all weights; ``layers_item_bytes``: of one of those in layers, if it differs."""
        layers = self.parameters - self.embedding_parameters
        of_layers = item_bytes if layers_item_bytes is None else layers_item_bytes
        return int(self.embedding_parameters * item_bytes + layers * of_layers)
