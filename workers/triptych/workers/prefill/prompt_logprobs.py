# torch leaves some of its functions partly untyped.
# pyright: reportUnknownMemberType=false
"""Prompt logprobs, computed chunk by chunk during prefill."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.messages import PromptLogprobs

SCORED_TOKENS = 128
"""Tokens with prompt logprobs in one step: their logits stay in memory until it ends, 25 MB for a
vocabulary of 49,152."""

_SLICE_ROWS = 16
"""Rows that are processed together, so that no second copy of all logits is made."""


class PromptLogprobRows:
    """Log probabilities of one prompt's tokens, given those before each.

    Shapes:  one row for each token but the first, which has no distribution
    """

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        """``top``: number of alternatives to report for each token."""
        rows = len(tokens) - 1
        self._tokens = torch.tensor(tokens[1:], dtype=torch.int64)
        self._top = top
        self._ids: NDArray[np.int32] = np.zeros((rows, top), np.int32)
        self._logprobs: NDArray[np.float32] = np.zeros((rows, 1 + top), np.float32)
        self._ranks: NDArray[np.int32] = np.zeros(rows, np.int32)

    def add(self, start: int, logits: Tensor) -> None:
        """Add the logits of the tokens from position ``start`` on; each predicts the next token.

        Shapes:  logits (N, vocab)
        Dtypes:  float32; left unchanged
        """
        for first in range(0, len(logits), _SLICE_ROWS):
            self._add(start + first, logits[first : first + _SLICE_ROWS])

    def _add(self, start: int, logits: Tensor) -> None:
        rows = slice(start, start + len(logits))
        own = logits.gather(1, self._tokens[rows, None].to(logits.device))
        total = logits.logsumexp(dim=-1, keepdim=True)
        values, ids = logits.topk(min(self._top, logits.shape[1]), dim=-1)
        width = ids.shape[1]
        self._logprobs[rows, :1] = (own - total).cpu().numpy()
        self._logprobs[rows, 1 : 1 + width] = (values - total).cpu().numpy()
        self._logprobs[rows, 1 + width :] = -np.inf  # if the vocabulary has fewer tokens
        self._ids[rows, :width] = ids.cpu().numpy()
        self._ranks[rows] = (logits > own).sum(dim=-1).add(1).cpu().numpy()

    def packed(self) -> PromptLogprobs:
        """The message for the ingress."""
        return PromptLogprobs(
            top=self._top,
            ids=self._ids.astype("<i4").tobytes(),
            logprobs=self._logprobs.astype("<f4").tobytes(),
            ranks=self._ranks.astype("<i4").tobytes(),
        )
