"""What runs next, where, and whether at all: pure policies over snapshots, exact bookings."""

from triptych.router.frontend.context_windows import Windows
from triptych.router.frontend.retries import AttemptTable, RequestAttempts
from triptych.router.frontend.shards import Cells
from triptych.router.models.memory_estimate import ByteModel, RequestBytes
from triptych.router.plugins import (
    BATCH_POLICIES,
    PLACEMENT_POLICIES,
    check_policies,
    schedule_named,
)
from triptych.router.queue.waiting_queue import Line, ListedQueue
from triptych.router.scheduler import Patience, Scheduler
from triptych.router.snapshot import Budget, Explanation, RouterSnapshot, Waiting, WorkerLoad
from triptych.router.state.history import Decision, RequestTrace

__all__ = [
    "BATCH_POLICIES",
    "PLACEMENT_POLICIES",
    "AttemptTable",
    "Budget",
    "ByteModel",
    "Cells",
    "Decision",
    "Explanation",
    "Line",
    "ListedQueue",
    "Patience",
    "RequestAttempts",
    "RequestBytes",
    "RequestTrace",
    "RouterSnapshot",
    "Scheduler",
    "Waiting",
    "Windows",
    "WorkerLoad",
    "check_policies",
    "schedule_named",
]
