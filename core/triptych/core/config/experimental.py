"""Settings that research on the server needs and that operators need not touch."""

from dataclasses import dataclass

from triptych.core.config.values import Auto, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentalConfig:
    """Settings for experiments. They may change or go in any release, without a warning."""

    context_window_tokens: int | Auto = "auto"
    """Tokens of a context window, where ``model.max_model_len`` exceeds the model's context;
    ``auto``: the model's context, which is also the maximum."""

    context_window_overlap_tokens: int | Auto = "auto"
    """Tokens that a context window shares with the one before; ``auto``: half of a window."""

    layers_at_once: int = 2
    """Layerwise prefill: layers of a prompt longer than ``prefill.max_num_batched_tokens`` that are
    computed, handed over and compressed at a time, so that the raw pages of all layers never exist
    at once; 0: all layers. Not used while the prefix cache is on (``pool.prefix_bytes``): a block
    of a prefix has pages of every layer."""

    def __post_init__(self) -> None:
        for name in ("context_window_tokens", "context_window_overlap_tokens"):
            tokens = getattr(self, name)
            fits = tokens == "auto" or tokens > 0
            require(fits, f"experimental.{name}", tokens, "'auto' or > 0")
        layers = self.layers_at_once
        require(layers >= 0, "experimental.layers_at_once", layers, ">= 0")
