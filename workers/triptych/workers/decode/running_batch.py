"""The requests of a decode batch: what each wants of a step, and what it has."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.core.config import SelectionConfig
from triptych.core.handles import Claim
from triptych.workers.decode.output_cache import FinishedOutput
from triptych.workers.decode.plugins.pipeline import Chosen
from triptych.workers.device import Device
from triptych.workers.kv.device_pages import NO_PAGES
from triptych.workers.models.early_exit import Exits
from triptych.workers.sampling.output import OutputProcessor

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class StepOptions:
    """What one request has of what a step can do."""

    plugins: Chosen
    selection: SelectionConfig | None
    """Which pages it reads; None: all."""
    alpha_low: float
    """Tokens of its answer below this are dropped, if the policy has no higher limit."""
    exit_entropy: float
    """Nats below which its tokens skip the last layers; 0: they never do."""
    exit_layers: int
    """Layers that they all go through."""


@dataclass(eq=False)
class RunningRequest:
    """One request in the batch: where its pages are, and what it said so far."""

    slot: int
    claim: Claim
    output: OutputProcessor
    options: StepOptions
    position: int
    """Position of the token that the next step reads."""
    unused_pages: Ids = field(default_factory=lambda: NO_PAGES)
    """Pages of this request that hold nothing at present; its next pages come from here."""
    allocated_pages: list[Ids] = field(default_factory=lambda: [NO_PAGES])
    """Pages that came from this worker's own stock, as they came."""
    token_s: float = 0.0
    """Seconds that a token of its prompt took to compute."""
    preempt_after_step: bool = False
    """Whether it is put on offer after the next step."""

    @property
    def id(self) -> str:
        return self.output.request.id

    @property
    def finished_output(self) -> FinishedOutput:
        """What there is to keep, once the answer is complete."""
        output = self.output
        return FinishedOutput(output.request, output.tokens, self.slot, self.position, self.token_s)


def exits_of(batch: Sequence[RunningRequest], device: Device) -> Exits | None:
    """When the tokens of a step may skip the last layers; None: no request wants that."""
    if not any(one.options.exit_entropy for one in batch):
        return None
    entropy = np.array([one.options.exit_entropy for one in batch], np.float32)
    layers = np.array([one.options.exit_layers for one in batch], np.int64)
    return Exits(device.put(entropy), device.put(layers))
