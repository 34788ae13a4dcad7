"""Merges neighbouring tokens of prompts by their keys, without a network (``kvmerger``)."""

import torch
from torch import Tensor

from triptych.core.pages import PagePlan
from triptych.kernels.retain import alike_sets, merge_sets
from triptych.workers.compress.job import MergedSets
from triptych.workers.compress.prompt_merger import MergedPrompt, store_merged
from triptych.workers.compress.raw_tokens import RawTokens
from triptych.workers.device import Device
from triptych.workers.models.kv_rotation import Coordinates


class KeyMerger:
    """The rule of a method, applied to one layer of one prompt at a time.

    So a prompt has the same bytes alone and in a batch, and the keys and values of one layer are in
    memory.
    """

    def __init__(self, plan: PagePlan, device: Device) -> None:
        self._layout, self._layers = plan.high, plan.geometry.layers
        rotation = Coordinates.of(plan.policy.kv_rotation, plan.geometry, device.name)
        self._centre = None if rotation is None else rotation.centre

    def merge(self, prompt: MergedPrompt[MergedSets]) -> None:
        """Write the merged tokens of a prompt into its pages.

        Raw pages hold rotated, centred keys. A rotation changes neither cosines nor distances, and
        the centre only cosines.
        """
        for layer in range(self._layers):
            self._merge_layer(prompt, layer)

    def _merge_layer(self, prompt: MergedPrompt[MergedSets], layer: int) -> None:
        merged, raw = prompt.merged, prompt.raw
        rows = slice(layer * raw.kv_heads, (layer + 1) * raw.kv_heads)
        of_layer = RawTokens(raw.arena, raw.layout, raw.kv_heads, raw.pages[rows])
        keys, values, attention = (part[0] for part in of_layer.read(merged.positions))
        may_join = merged.positions[1:] == merged.positions[:-1] + 1
        set_of = alike_sets(self._uncentred(keys, layer), may_join, merged.sets)
        found = merge_sets(keys, values, attention, set_of, merged.sets)
        places = merged.first_place + torch.arange(merged.sets, device=keys.device)
        store_merged(
            raw.arena,
            self._layout,
            found.keys.flatten(0, 1)[:, None],
            found.values.flatten(0, 1)[:, None],
            prompt.pages[rows, places // self._layout.tokens].reshape(-1, 1),
            places.repeat(raw.kv_heads),
            merged.positions[found.pivots].flatten(),
            found.bias.reshape(-1, 1),
        )

    def _uncentred(self, keys: Tensor, layer: int) -> Tensor:
        return keys if self._centre is None else keys + self._centre[layer, :, None]
