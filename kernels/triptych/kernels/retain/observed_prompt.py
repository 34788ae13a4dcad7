"""A prompt as retention rules see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych.kernels.retain.tiers import Tiers

KeyScore = Callable[[Tensor], Tensor]
"""From the keys of a layer [KH, N, d], float32, in coordinates that a rotation may have changed, to
scores [KH, N]."""


@dataclass(frozen=True, kw_only=True)
class ObservedPrompt:
    """Some layers of a prompt of N tokens: l layers, KH KV heads each."""

    tokens: int
    kv_heads: int
    layers: range
    """Those of the model that these are."""
    model_layers: int
    attention: Tensor
    """What prefill measured: sums of the attention that each token received from the queries that
    count, mean over the query heads of a KV head or over the retrieval heads of a layer, or a score
    made of moments or statistics; [l, KH, N] float32. Whatever stands there if the rule needs
    none."""
    of_keys: Callable[[KeyScore], Tensor]
    """Applies a function to the keys of each layer, [l, KH, N]: few rules need keys, and no rule
    those of all layers at once."""
    kept: int
    """Mean number of tokens of a head row that are kept."""
    head_shares: Sequence[float] = ()
    """Share of each head row of the model, if calibration has found it."""
    layer_errors: Sequence[float] = ()
    """Error of each layer of the model when it keeps few tokens, if calibration has found it."""
    tiers: Callable[[], Tiers] | None = None
    """What the classes of the policy cost and lose, of the tokens about which scores are; None: the
    policy has one class."""
