"""The seam between transformers' models and our attention over pages.

transformers calls whatever is registered under ``ATTENTION`` in the middle of each layer.
A ragged batch is one row of tokens with explicit positions; which tokens see each other
is known to the ``Attend`` that the caller passes, so no mask is ever built.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from triptych.core.errors import ModelError

ATTENTION = "triptych"


class Attend(Protocol):
    """Stores the new keys and values and lets each query see its own sequence."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """Attention of one layer over T new tokens.

        A key is visible to a query of the same sequence if ``0 <= query position - key
        position``, and ``< window`` where the layer has a sliding window (0: none). With
        a ``softcap``, logits become ``softcap * tanh(logits / softcap)``.

        Shapes:  query (T, H, D); key, value (T, KH, D) -> (T, H, D)
        Dtypes:  all of the model's type; keys and queries are already rotated
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """How one layer's attention differs from the plain one."""

    scale: float
    window: int = 0
    """Sliding window in tokens; 0: none."""
    softcap: float = 0.0
    """Bound of the logits; 0: none."""


def run_stock(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: Attend, logits_at: Tensor
) -> Tensor:
    """Run any model through transformers' own layers.

    Shapes:  tokens, positions (T,); logits_at (N,) -> (N, vocab)
    Dtypes:  int64; float32 out
    """
    out = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logits_at,
        triptych_attend=attend,
    )
    return out.logits[0].float()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    triptych_attend: Attend,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls: (1, H, T, D) in, (1, T, H, D) out."""
    if s_aux is not None:
        raise ModelError("attention sinks are not supported")
    if not getattr(module, "is_causal", True):
        raise ModelError("attention looks ahead: this is not a causal language model")
    layer = module.layer_idx
    out = triptych_attend(
        int(layer),  # pyright: ignore[reportArgumentType]  # every attention module has one
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)  # pyright: ignore[reportUnknownMemberType]
