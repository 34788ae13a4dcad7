"""The requests of a decode batch: step options, pages and output state."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from triptych.core.config import SelectionConfig
from triptych.core.handles import LeaseRef
from triptych.core.images import rotary_offset
from triptych.core.messages import ROUTER, PageLimit, PagesWanted, Send
from triptych.core.policy import Thresholds
from triptych.workers.decode.output_cache import FinishedOutput
from triptych.workers.decode.plugins.pipeline import Chosen
from triptych.workers.device import Device
from triptych.workers.kv.device_pages import NO_PAGES
from triptych.workers.kv.method_tables import MethodTables
from triptych.workers.models.early_exit import Exits
from triptych.workers.sampling.output import OutputProcessor

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class StepOptions:
    """Step options of one request: plug-ins, page selection, early exit."""

    plugins: Chosen
    selection: SelectionConfig | None
    """Its page selection; None: it reads all pages."""
    thresholds: Thresholds
    """Of its output tokens; all 0: all of them stay high."""
    most_tokens: int
    """Tokens that a head row keeps while it generates; 0: all, or as thresholds decide."""
    exit_entropy: float
    """Entropy in nats below which its tokens exit early; 0: never."""
    exit_layers: int
    """Layers that every token goes through."""


@dataclass(eq=False)
class RunningRequest:
    """One request in the batch: its slot, its lease and its output so far."""

    slot: int
    tables: MethodTables
    """The tables of its compression method."""
    lease_ref: LeaseRef
    output: OutputProcessor
    options: StepOptions
    position: int
    """Position of the input token of the next step."""
    unused_pages: Ids = field(default_factory=lambda: NO_PAGES)
    """Empty recent pages of this request; its rows take their next ones from here first."""
    expired_pages: Ids = field(default_factory=lambda: NO_PAGES)
    """Empty pages that have left the rows of layers with a sliding window; rows take their next
    high and low pages from here first."""
    allocated_pages: list[Ids] = field(default_factory=lambda: [NO_PAGES])
    """Pages that this worker allocated for the request, in order."""
    num_pages: int = 0
    """Pages of its own that it holds, shared ones excluded."""
    limit: PageLimit | None = None
    """The most that it may hold; None: no limit."""
    is_paused: bool = False
    """Whether it waits for pages. It holds its slot and is not computed meanwhile."""
    has_asked: bool = False
    """Whether the router knows that it is near its limit."""
    token_s: float = 0.0
    """Prefill time per prompt token in seconds."""
    preempt_after_step: bool = False
    """Whether the request is preempted after its next step."""

    def __post_init__(self) -> None:
        self.rotary_offset = rotary_offset(self.output.request.images)
        """Rotary position of its new tokens, less their position."""

    @property
    def id(self) -> str:
        return self.output.request.id

    @property
    def step_pages(self) -> int:
        """The most pages that one token of the request can take."""
        plan = self.tables.plan
        return plan.geometry.head_rows * max(1, len(plan.classes))

    @property
    def spare_pages(self) -> float:
        """Pages that it may still be given; infinity without a limit."""
        return inf if self.limit is None else self.limit.pages - self.num_pages

    @property
    def spare_tokens(self) -> float:
        """Tokens that its pages may still take; infinity without a limit."""
        limit = self.limit
        return inf if limit is None or not limit.tokens else limit.tokens - self.position

    def wants_pages(self, wanted: int = 0, *, is_exhausted: bool = False) -> Send:
        """Ask the router for more pages."""
        self.has_asked = True
        message = PagesWanted(
            request=self.id,
            tokens=self.position,
            pages=self.num_pages,
            wanted=wanted,
            is_exhausted=is_exhausted,
        )
        return Send(ROUTER, message)

    @property
    def finished_output(self) -> FinishedOutput:
        """The complete output with what is needed to publish it to the prefix cache."""
        output = self.output
        return FinishedOutput(
            output.request,
            output.tokens,
            self.slot,
            self.tables,
            self.position,
            self.token_s,
        )


def exits_of(batch: Sequence[RunningRequest], device: Device) -> Exits | None:
    """Early-exit conditions of a batch; None: no request has one."""
    if not any(one.options.exit_entropy for one in batch):
        return None
    entropy = np.array([one.options.exit_entropy for one in batch], np.float32)
    layers = np.array([one.options.exit_layers for one in batch], np.int64)
    return Exits(device.put(entropy), device.put(layers))
