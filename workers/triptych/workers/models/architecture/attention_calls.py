"""Checks what a model's layers pass to attention, on an observed model without weights.

transformers calls the function registered under ``OBSERVED_ATTENTION``. What attention over pages
does not compute is refused, never left out.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from transformers import AttentionInterface

from triptych.core.errors import ModelError
from triptych.workers.models.architecture.attention_masks import OBSERVED_ATTENTION, window_of
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.latent_attention import on_latents

AttentionCall = Callable[[int, Tensor, Tensor, Tensor, LayerTraits], Tensor]
"""Layer; query, key and value as (1, H, T, D); traits -> (1, T, H, D of values)"""

WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "dropout",
    "head_mask",
    "input_ids",
    "is_causal",
    "layer_idx",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "target_dtype",
    "training",
    "use_cache",
}
"""Arguments of attention functions that change no score. Positions are in queries and keys."""

_SINKS = ("sinks", "learnable_sink")
"""Names that no model of transformers passes; ``s_aux`` is taken."""

_current: ContextVar[tuple[AttentionCall, int]] = ContextVar("observed_attention")


@contextmanager
def observed_by(call: AttentionCall, context: int) -> Generator[None]:
    """Pass every attention of models that run meanwhile to ``call``."""
    token = _current.set((call, context))
    try:
        yield
    finally:
        _current.reset(token)


def _observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    call, context = _current.get()
    _refuse_others(others)
    if query.ndim != 4 or key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
        raise ModelError("a layer attends to other tokens than those of its input")
    if isinstance(scaling, Tensor) or isinstance(softcap, Tensor):
        raise ModelError("its scale of attention scores depends on the input")
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise ModelError(f"attention sinks {tuple(s_aux.shape)}: expected one for each query head")
    window = _window(module, attention_mask, sliding_window, query.shape[1], context)
    traits = LayerTraits(
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        window=window,
        softcap=float(softcap or 0.0),
    )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} does not number its layer")
    return call(layer, query, key, value, traits), None


def _refuse_others(others: dict[str, object]) -> None:
    for name, value in others.items():
        if name in _SINKS and value is not None:
            raise ModelError(f"attention sinks ({name}) are not supported")
        if name == "is_causal" and value is False:
            raise ModelError("attention looks ahead: this is not a causal language model")
        if name not in WITHOUT_EFFECT and value is not None and value is not False:
            raise ModelError(f"attention has an argument that is not supported: {name}")


def _window(
    module: nn.Module, mask: Tensor | None, given: int | None, heads: int, context: int
) -> int:
    """The window that the mask has; that of the argument if there is no mask."""
    if mask is not None:
        return window_of(mask, heads, context)
    if not getattr(module, "is_causal", False):
        raise ModelError("attention looks ahead: this is not a causal language model")
    return given or 0


AttentionInterface.register(  # pyright: ignore[reportUnknownMemberType]
    OBSERVED_ATTENTION, on_latents(_observed_attention)
)
