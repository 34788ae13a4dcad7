"""What runs next, where, and whether at all: pure policies over snapshots, exact bookings."""

from triptych.router.cells import Cells
from triptych.router.coordinator import Coordinator, Patience
from triptych.router.estimate import ByteModel, RequestBytes
from triptych.router.history import Decision, Life
from triptych.router.journey import Journey, Journeys
from triptych.router.line import Line, ListedLine
from triptych.router.plugins import (
    BATCH_POLICIES,
    PLACEMENT_POLICIES,
    check_policies,
    schedule_named,
)
from triptych.router.snapshot import Budget, Explanation, RouterSnapshot, Waiting, WorkerLoad
from triptych.router.windows import Windows

__all__ = [
    "BATCH_POLICIES",
    "PLACEMENT_POLICIES",
    "Budget",
    "ByteModel",
    "Cells",
    "Coordinator",
    "Decision",
    "Explanation",
    "Journey",
    "Journeys",
    "Life",
    "Line",
    "ListedLine",
    "Patience",
    "RequestBytes",
    "RouterSnapshot",
    "Waiting",
    "Windows",
    "WorkerLoad",
    "check_policies",
    "schedule_named",
]
