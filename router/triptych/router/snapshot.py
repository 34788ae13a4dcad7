"""What decisions may look at, and what they say about themselves: plain data, no behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from triptych.core.messages import Stage


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the waiting line."""

    id: str
    bytes: int
    """What it needs at most, in bytes of pages."""
    waited_s: float
    """Seconds since it came."""
    slack_s: float = inf
    """Seconds until it loses patience; below 0 nobody of its tenant may overtake it any more."""
    priority: int = 0
    """Lower is sooner."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one round of batching may spend."""

    free_bytes: int
    """Bytes of pages that nobody has booked."""
    max_requests: int
    """Requests that may start, because a decode slot will be free for each."""


Role = Literal["both", "prefill", "decode"]
"""What a worker of all stages is used for. One that writes reads too while it writes nothing."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker as placement sees it."""

    name: str
    address: str
    arena: str
    """Where it stores pages."""
    stages: tuple[Stage, ...]
    is_full: bool
    """It takes nothing: its last report is too old, or there was none."""
    prefill_tokens: int = 0
    """Prompt tokens that were sent to it and are not read yet."""
    queue_tokens: int = 0
    """How many of them a prompt that comes now waits for: none that are probably cached, and of a
    long prompt only half of what a worker takes at once, since short ones overtake it."""
    compress_tokens: int = 0
    """Prompt tokens that it is compressing."""
    free_slots: int = 0
    """Requests that may still join its decode batch."""
    running: int = 0
    """Requests that it decodes, or was chosen to."""
    role: Role = "both"


HeldBy = Literal[
    "",
    "no_prefill_worker",
    "prefill_busy",
    "no_compressor",
    "no_decode_slot",
    "no_bytes",
    "gathering",
]
"""Why the line waits; empty if nobody does.

``no_compressor``: the first of it is to be encoded layer by layer, and nobody does that now.

``gathering``: a batch of fixed size is not full yet.

``prefill_busy``: no prefill worker has room, or those that have are silent and so count as full.
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where one request is, and what it holds."""

    request: str
    state: str
    in_state_s: float
    worker: str
    """Address of the worker that has it; empty while it waits."""
    decode_worker: str
    """Address of the decode worker with a slot for it; empty until it is chosen."""
    booked_bytes: int
    blocked_reason: HeldBy
    """For a waiting request: what the line waits for."""


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """Everything that metrics and a person in doubt want to know."""

    requests: Mapping[str, int]
    """Requests by state."""
    booked_bytes: Mapping[str, int]
    """By arena."""
    capacity_bytes: int
    """Of all arenas together; of one while no worker is there."""
    blocked_reason: HeldBy
    oldest_waiting_s: float
    counters: Mapping[str, int]
    """Decisions and oddities by reason, since the start."""
    workers: tuple[WorkerLoad, ...]
