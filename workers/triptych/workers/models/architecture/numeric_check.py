# transformers and torch leave some methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Compares a loaded model once with its own attention.

Observation without weights finds what layers pass to attention. This finds tokens that are mixed
elsewhere: neighbours of a ragged batch would change an answer.
"""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from triptych.core.errors import ModelError
from triptych.kernels.prefill.reference import prefill_attention
from triptych.workers.models.attention_interface import Attend, LayerTraits

Network = Callable[[Tensor, Tensor, Attend, Tensor], Tensor]
"""Tokens, positions, attention and indices of tokens -> logits of these"""

LENGTHS = (7, 5)
"""Tokens of the sequences of the batch."""
LEAST_SIMILARITY = {torch.float32: 0.9999, torch.bfloat16: 0.9, torch.float16: 0.9}
"""Least cosine between logits of the batch and those that a sequence has alone."""


def check_network(path: Path, model: PreTrainedModel, network: Network) -> None:
    """Raise ModelError if a ragged batch gives other logits than each sequence alone."""
    vocab = int(model.config.get_text_config().vocab_size)
    device = next(model.parameters()).device
    ids = (torch.arange(sum(LENGTHS), device=device) * 7919 + 11) % vocab
    positions = torch.cat([torch.arange(count, device=device) for count in LENGTHS])
    every = torch.arange(len(ids), device=device)
    with torch.inference_mode():
        found = network(ids, positions, _causal_attention, every)
        expected = torch.cat(_alone(model, ids))
    similarity = F.cosine_similarity(found.float(), expected.float(), dim=-1).min()
    if not similarity >= LEAST_SIMILARITY[model.dtype]:  # NaN too
        raise ModelError(
            f"{path}: cannot be served: its layers give other results in a batch than alone "
            f"(similarity {float(similarity):.3f}), so they mix tokens outside of attention"
        )


def _alone(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Logits of each sequence by transformers' own attention."""
    ours = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    model.set_attn_implementation("eager")
    try:
        return [model(one[None], use_cache=False).logits[0] for one in torch.split(ids, [*LENGTHS])]
    finally:
        model.set_attn_implementation(str(ours))


def _causal_attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    traits: LayerTraits,
    sinks: Tensor | None = None,
) -> Tensor:
    """An ``Attend`` of whole sequences of these lengths."""
    ends = (0, *accumulate(LENGTHS))
    return prefill_attention(
        query,
        key,
        value,
        ends,
        scale=traits.scale,
        window=traits.window,
        softcap=traits.softcap,
        sinks=sinks,
    )
