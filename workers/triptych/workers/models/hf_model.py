"""Any model through transformers' own layers, with our attention in each.

transformers calls the function registered under ``ATTENTION``.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from triptych.core.config import DType
from triptych.workers.models.architecture.numeric_check import check_network
from triptych.workers.models.architecture.rope_limits import fix_rope
from triptych.workers.models.architecture.text_part import renamings, text_part
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.latent_attention import on_latents, read_latents
from triptych.workers.models.pretrained import read_config, read_weights, readable
from triptych.workers.models.store.checkpoint_files import stored_weights
from triptych.workers.models.traits import ModelTraits
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.models.weights.plain_weights import open_weights
from triptych.workers.models.weights.scheme import scheme_of

ATTENTION = "triptych"

AttendLayer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Layer; query, key and value as (T, H, D); sinks (H,) -> (T, H, D of values)"""

_attend: ContextVar[AttendLayer] = ContextVar("attend")
"""Attention of the pass that runs. Not every model passes arguments on to its attention."""


@dataclass(frozen=True)
class HFModel:
    """A model that runs through transformers' layers."""

    model: PreTrainedModel
    layers: tuple[LayerTraits, ...]
    """As observed: some models have their window only in a mask."""
    head_dim: int
    """Size of keys and values in pages; zeros after smaller ones change no score."""
    has_latents: bool
    """Whether values are the first numbers of keys. Then pages store keys alone."""
    can_exit = False

    @classmethod
    def read(cls, path: Path, traits: ModelTraits, dtype: DType, device: str) -> "HFModel":
        """Raises: ModelError for what cannot be loaded, or mixes tokens outside of attention"""
        model = read_model(path, dtype, device)
        geometry = traits.geometry
        loaded = cls(model, traits.layers, geometry.head_dim, geometry.has_latents)
        with readable(path, "cannot run on a ragged batch"):
            check_network(path, loaded.model, loaded)
        return loaded

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
        given: FeatureRows | None = None,
    ) -> Tensor:
        """Run transformers' own layers. ``exits`` is ignored.

        Shapes:  tokens, positions (T,); logits_at (N,) -> (N, vocab)
        Dtypes:  int64; float32 out
        """

        def attend_padded(
            layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
        ) -> Tensor:
            stored = self._padded(key)
            mixed = attend(
                layer,
                self._padded(query),
                stored,
                stored if self.has_latents else self._padded(value),
                self.layers[layer],
                None if sinks is None else sinks.float(),
            )
            return mixed[:, :, : value.shape[2]]

        if given is None:
            inputs = {"input_ids": tokens.unsqueeze(0)}
        else:
            embedded = cast("Tensor", self.model.get_input_embeddings()(tokens))
            inputs = {"inputs_embeds": given.put_into(embedded).unsqueeze(0)}
        token = _attend.set(attend_padded)
        try:
            out = self.model(
                **inputs,
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_at,
            )
        finally:
            _attend.reset(token)
        return out.logits[0].float()

    def for_prefill(self) -> "HFModel":
        return self

    def for_decode(self) -> "HFModel":
        return self

    def _padded(self, heads: Tensor) -> Tensor:
        missing = self.head_dim - heads.shape[2]
        return F.pad(heads, (0, missing)) if missing else heads


def read_model(
    path: Path, dtype: DType, device: str, attention: str = ATTENTION
) -> PreTrainedModel:
    """Load the layers that read text, with an attention function of transformers.

    Raises: ModelError for what cannot be loaded, saying why
    """
    config = read_config(path)
    text = text_part(config)
    names = None if text is config else renamings(stored_weights(path))
    quantized = None if scheme_of(path) is None else open_weights(path)
    model = read_weights(path, text, dtype, device, attention, names, quantized)
    fix_rope(model, text)
    read_latents(model, ATTENTION)
    return model


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
    s_aux: Tensor | None = None,
    **__: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers: (1, H, T, D) in, (1, T, H, D) out.

    Its other arguments were observed before the model was loaded.
    """
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]  # every layer has one
    return _attend.get()(layer, query, key, value, s_aux).unsqueeze(0), None


AttentionInterface.register(  # pyright: ignore[reportUnknownMemberType]
    ATTENTION, on_latents(_attention)
)
