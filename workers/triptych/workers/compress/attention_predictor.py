# pyright: reportUnknownMemberType=false
# torch leaves Tensor.expand and others untyped in part.
"""Predicts the attention that prompt tokens receive by a learned scorer, from their raw pages.

Where prefill writes the sums of attention into raw pages, the scorer writes what it predicts, so
all that reads scores is the same. A prompt is scored in tiles of a fixed number of tokens, so its
scores do not depend on the batch, and a token's not on those behind it.
"""

import torch

from triptych.core.pages import PagePlan
from triptych.workers.compress.learned.artefact import load_scorer
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.raw_tokens import ModelCoordinates, RawTokens
from triptych.workers.device import Device

TILE_TOKENS = 256
"""Tokens that the network scores at a time."""


class AttentionPredictor:
    """The learned scorer of one method."""

    def __init__(self, plan: PagePlan, device: Device) -> None:
        """Raises: ModelError if the file was replaced since the start, or is torn"""
        file = plan.policy.scorer
        assert file is not None
        self._network = load_scorer(file).to(device.name)
        self._network.frame = RopeFrame(RopeFrame.of_file(file).frequencies.to(device.name))
        self._coordinates = ModelCoordinates.of(plan.policy.kv_rotation, plan.geometry, device.name)

    def write(self, raw: RawTokens, tokens: int, first_layer: int) -> None:
        """Write the predicted sums of a prompt of ``tokens`` tokens into its raw pages.

        ``first_layer``: that of the first head row of ``raw``. A sum is the mean attention from the
        token itself and all later ones, times their number.
        """
        layers = slice(first_layer, first_layer + len(raw.pages) // raw.kv_heads)
        there = raw.pages.device
        for start in range(0, tokens, TILE_TOKENS):
            positions = torch.arange(start, start + TILE_TOKENS, device=there)
            inside = positions.clamp(max=tokens - 1)
            keys, values, _ = raw.read(inside)
            keys, values = self._coordinates.of_stored(keys, values, layers)
            mean = self._network(keys, values, positions, layers).exp() / tokens
            count = min(TILE_TOKENS, tokens - start)
            sums = mean[..., :count] * (tokens - positions[:count])
            raw.set_scores(positions[:count], sums)
