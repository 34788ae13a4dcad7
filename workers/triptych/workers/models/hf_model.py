"""Any model through transformers' own layers, with our attention in each.

transformers calls the function registered under ``ATTENTION``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from triptych.core.config import DType
from triptych.core.errors import ModelError
from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.pretrained import read_config, read_weights

ATTENTION = "triptych"


@dataclass(frozen=True)
class HFModel:
    """A model that runs through transformers' layers."""

    model: PreTrainedModel
    can_exit = False

    @classmethod
    def read(cls, path: Path, dtype: DType, device: str) -> "HFModel":
        """Raises: ModelError for what cannot be loaded, saying why"""
        return cls(read_weights(path, read_config(path), dtype, device, ATTENTION))

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a pass reads: all but an untied embedding."""
        embedding = cast("nn.Embedding", self.model.get_input_embeddings()).weight
        head = cast("nn.Linear", self.model.get_output_embeddings()).weight
        read = [part for part in self.model.parameters() if part is head or part is not embedding]
        return sum(part.numel() * part.element_size() for part in read)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
    ) -> Tensor:
        """Logits, as ``run_hf_model``; ``exits`` is ignored."""
        return run_hf_model(self.model, tokens, positions, attend, logits_at)


def run_hf_model(
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
    """The attention function for transformers: (1, H, T, D) in, (1, T, H, D) out."""
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
