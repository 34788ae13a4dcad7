"""The router: admission, scheduling and placement of requests, without clock or sockets."""

from triptych.router.events.peers import Timeouts
from triptych.router.frontend.context_windows import Windows
from triptych.router.frontend.retries import AttemptTable, RequestAttempts
from triptych.router.frontend.shards import Shards
from triptych.router.models.memory_estimate import ByteModel, ContextLimits, RequestBytes
from triptych.router.plugins import (
    BATCH_POLICIES,
    PLACEMENT_POLICIES,
    check_policies,
    schedule_named,
)
from triptych.router.queue.waiting_queue import ListedQueue, QueueView
from triptych.router.scheduler import Scheduler
from triptych.router.snapshot import Budget, Explanation, RouterSnapshot, Waiting, WorkerLoad
from triptych.router.state.history import Decision, RequestTrace

Line, ListedLine = QueueView, ListedQueue
"""Names of the release before, for policies of users; they go with the next release."""

__all__ = [
    "BATCH_POLICIES",
    "PLACEMENT_POLICIES",
    "AttemptTable",
    "Budget",
    "ByteModel",
    "ContextLimits",
    "Decision",
    "Explanation",
    "Line",
    "ListedLine",
    "ListedQueue",
    "QueueView",
    "RequestAttempts",
    "RequestBytes",
    "RequestTrace",
    "RouterSnapshot",
    "Scheduler",
    "Shards",
    "Timeouts",
    "Waiting",
    "Windows",
    "WorkerLoad",
    "check_policies",
    "schedule_named",
]
