"""The model runner: one forward pass over a ragged batch of tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.fused.int4_block import Int4Block
from triptych.workers.models.fused.int8_block import Int8Block
from triptych.workers.models.fused.model import FusedModel, Layers
from triptych.workers.models.kv_rotation import Coordinates
from triptych.workers.models.load import LoadedModel, Network
from triptych.workers.models.vision.feature_rows import FeatureRows


class Runner(Protocol):
    """The interface between engines and a model."""

    @property
    def num_heads(self) -> int:
        """Query heads of each layer."""
        ...

    @property
    def can_exit(self) -> bool:
        """Whether ``forward`` takes exits."""
        ...

    @property
    def can_capture(self) -> bool:
        """Whether ``forward`` can be captured as a graph of the device."""
        ...

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
        given: FeatureRows | None = None,
    ) -> Tensor:
        """As ``ModelRunner.forward``."""
        ...

    def embed(self, tokens: Tensor, given: FeatureRows | None = None) -> Tensor:
        """As ``ModelRunner.embed``."""
        ...

    def through(self, layers: range, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As ``ModelRunner.through``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """As ``ModelRunner.logits``."""
        ...


class ModelRunner:
    """Runs a loaded model over ragged batches, with the caller's attention.

    A batch is flat: the new tokens of all its sequences one after another, each with its
    position. Prefill chunks and decode steps are the same call.
    """

    def __init__(self, loaded: LoadedModel, coordinates: Coordinates | None = None) -> None:
        """``coordinates``: rotation of keys and values; None: not rotated."""
        self._loaded = loaded
        self._network, self._coordinates = loaded.network, coordinates
        self.num_heads = loaded.num_heads
        """Query heads of each layer."""

    def for_prefill(self) -> "ModelRunner":
        """A runner of the same model, for prompts."""
        return self._of(self._loaded.network.for_prefill())

    def for_decode(self) -> "ModelRunner":
        """A runner of the same model, for decode steps."""
        return self._of(self._loaded.network.for_decode())

    def _of(self, network: Network) -> "ModelRunner":
        return ModelRunner(replace(self._loaded, network=network), self._coordinates)

    @property
    def can_exit(self) -> bool:
        """Whether tokens can exit before the last layer; transformers' own layers cannot."""
        return self._network.can_exit

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return self._network.step_bytes

    @property
    def can_capture(self) -> bool:
        """Whether ``forward`` only queues kernels; transformers' own layers may do more."""
        return isinstance(self._network, FusedModel)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
        given: FeatureRows | None = None,
    ) -> Tensor:
        """Run T tokens and return the logits of those that ``logits_at`` names.

        ``exits``: which of them may skip the last layers; only if ``can_exit``.
        ``given``: tokens with an input of their own, such as those of images.

        ``positions``: those of the rotation. Three for each token where those of images count time,
        row and column.

        Shapes:  tokens (T,); positions (T,) or (3, T); logits_at (N,), indices into the T
            -> (N, vocab)
        Dtypes:  int64 in; float32 out
        """
        if self._coordinates is not None:
            attend = self._coordinates.around(attend)
        with torch.inference_mode():
            return self._network(tokens, positions, attend, logits_at, exits, given)

    @property
    def centred_blocks(
        self,
    ) -> tuple[Sequence[Int4Block] | Sequence[Int8Block], Tensor] | None:
        """Blocks and the centre of keys, if a step can be a ``LayerProgram``."""
        network, coordinates = self._network, self._coordinates
        if not isinstance(network, FusedModel) or type(coordinates) is not Coordinates:
            return None
        blocks = network.program_blocks
        return None if blocks is None else (blocks, coordinates.centre)

    def run(
        self,
        layers: Layers,
        tokens: Tensor,
        positions: Tensor,
        given: FeatureRows | None = None,
    ) -> Tensor:
        """As ``FusedModel.run``."""
        with torch.inference_mode():
            return self._plain.run(layers, tokens, positions, given)

    def apply(self, layers: Layers, hidden: Tensor, positions: Tensor) -> Tensor:
        """As ``FusedModel.apply``."""
        with torch.inference_mode():
            return self._plain.apply(layers, hidden, positions)

    def embed(self, tokens: Tensor, given: FeatureRows | None = None) -> Tensor:
        """The residual stream before the first layer; plain layers only, as the next two.

        Shapes:  tokens (T,) int64 -> (T, E) float32
        """
        with torch.inference_mode():
            return self._plain.embed(tokens, given)

    def through(self, layers: range, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream after some layers.

        Shapes:  hidden (T, E) float32; positions (T,) int64 -> (T, E) float32
        """
        if self._coordinates is not None:
            attend = self._coordinates.around(attend)
        with torch.inference_mode():
            return self._plain.through(layers, hidden, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the last layer.

        Shapes:  hidden (N, E) float32 -> (N, vocab) float32
        """
        with torch.inference_mode():
            return self._plain.logits(hidden)

    @property
    def _plain(self) -> FusedModel:
        """Raises ConfigError if layers cannot be run separately."""
        if not isinstance(self._network, FusedModel):
            raise ConfigError("this model's layers cannot be run a few at a time")
        return self._network
