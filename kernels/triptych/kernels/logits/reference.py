"""Reference of the logits of a head."""

import torch
from torch import Tensor


def recompute_largest(logits: Tensor, hidden: Tensor, weight: Tensor, count: int) -> Tensor:
    """Logits of which at least the ``count`` largest of each row are computed again in float32.

    Shapes:  logits [N, V], may be changed in place; hidden [N, E]; weight [V, E] -> [N, V]
    Dtypes:  logits and hidden float32; weight float32, bfloat16 or float16
    """
    ids = logits.topk(min(count, logits.shape[1]), dim=-1).indices
    exact = torch.einsum("ne,nke->nk", hidden, weight[ids].float())
    return logits.scatter(1, ids, exact)
