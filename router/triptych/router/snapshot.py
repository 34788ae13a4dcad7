"""Plain data that policies receive, and that the router reports about itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from triptych.core.messages import Stage
from triptych.router.state.stage_times import StageTime


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the waiting queue."""

    id: str
    bytes: int
    """Upper bound of the bytes of pages that it needs."""
    waited_s: float
    """Seconds since it arrived."""
    slack_s: float = inf
    """Seconds until it is overdue; below 0 no request of its tenant may overtake it."""
    priority: int = 0
    """Lower values start sooner."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one batch."""

    free_bytes: int
    """Bytes of pages that are not booked."""
    max_requests: int
    """Requests that may start: a decode slot will be free for each."""


Role = Literal["both", "prefill", "decode"]
"""The role of a colocated worker. One that decodes may prefill while it has no requests."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a worker."""

    name: str
    address: str
    arena: str
    """The arena where it stores pages."""
    stages: tuple[Stage, ...]
    is_full: bool
    """It gets no requests: its last report is too old, or there was none."""
    prefill_tokens: int = 0
    """Prompt tokens in its prefill queue."""
    queue_tokens: int = 0
    """Prompt tokens that a new prompt waits for: without cached ones, and of a long prompt only
    half of what a worker takes at a time, since short prompts overtake the rest."""
    compress_tokens: int = 0
    """Prompt tokens that it is compressing."""
    free_slots: int = 0
    """Requests that may join its decode batch."""
    running: int = 0
    """Requests that it decodes or was chosen for."""
    role: Role = "both"
    encode_pixels: int = 0
    """Pixels of images that it is encoding."""


HeldBy = Literal[
    "",
    "no_prefill_worker",
    "prefill_busy",
    "no_compressor",
    "no_decode_slot",
    "no_bytes",
    "gathering",
    "shared_prompt",
    "no_encoder",
]
"""Why the line waits; empty if nobody does.

``no_compressor``: the first of it is to be encoded layer by layer, and nobody does that now.

``gathering``: a batch of fixed size is not full yet.

``shared_prompt``: of one request, another one computes blocks of its prompt; the others go on.

``no_encoder``: of one request, its images need an encode worker; the others go on.

``prefill_busy``: no prefill worker has room, or those that have are silent and so count as full.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of pages of requests, in all arenas."""

    held: int
    """As the stages reported last."""
    booked: int
    """The most that the requests may hold now."""
    bound: int
    """The most that they may come to hold."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """State of one request."""

    request: str
    state: str
    in_state_s: float
    worker: str
    """Address of the worker that has it; empty while it waits."""
    decode_worker: str
    """Address of the decode worker with a slot for it; empty until it is chosen."""
    image_encoder: str
    """Address of the encode worker that has its images; empty without images, or afterwards."""
    held_bytes: int
    """Bytes of its pages, as its stage reported last."""
    booked_bytes: int
    """The most that it may hold now."""
    bound_bytes: int
    """The most that it may come to hold; 0 while it waits."""
    blocked_reason: HeldBy
    """For a waiting request: what it, or the queue, waits for."""
    waits_for: str = ""
    """The request that computes blocks of its prompt, if it waits for these."""


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """State of the router, for metrics and status."""

    requests: Mapping[str, int]
    """Requests by state."""
    booked_bytes: Mapping[str, int]
    """By arena."""
    capacity_bytes: int
    """Of all arenas together; of one arena while there is no worker."""
    blocked_reason: HeldBy
    oldest_waiting_s: float
    counters: Mapping[str, int]
    """Decisions and unexpected messages by reason, since the start."""
    workers: tuple[WorkerLoad, ...]
    held_bytes: int = 0
    """Bytes of pages of requests, as the stages reported last."""
    bound_bytes: int = 0
    """The most that the requests may come to hold; all of it is booked with ``booking: bounds``."""
    stage_times: Mapping[str, StageTime] = field(default_factory=dict[str, StageTime])
    """How long requests waited and were in each stage, since the start."""
