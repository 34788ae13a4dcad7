"""Named places in the life of a request at which the process that is there can be made to die."""

import functools
import os
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fake_driver import FakeDriver
from triptych.core.handles import LeaseId
from triptych.deployments.replicas.worker import WorkerReplica
from triptych.kvpool.rpc.calls import (
    AdoptRequest,
    AllocatePages,
    AttachLeases,
    HandOff,
    InheritFrom,
    ReleaseLeases,
)
from triptych.kvpool.rpc.local_pool import PoolCall
from triptych.kvpool.rpc.messages import PrefixBlocks
from triptych.kvpool.rpc.prefix_calls import FindPrefix, KeepSession, PinPrefix, PublishPrefix
from triptych.kvpool.rpc.stub import PoolStub
from triptych.router.events.progress import Progress
from triptych.router.events.submission import Submission
from triptych.router.passes.lowering import MemoryLowering
from triptych.workers.compress import compress_engine
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.handover import RequestHandover
from triptych.workers.decode.lowering import Lowering
from triptych.workers.decode.output_cache import OutputCache, SlotTokenSource
from triptych.workers.decode.page_growth import PageGrowth
from triptych.workers.decode.window import Window
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.prefill.chunk_pass import ChunkPass
from triptych.workers.prefill.prefill_engine import PrefillEngine

EXIT_CODE = 66
NO_LIMIT = 2**31 - 1
"""More pages than any pool has."""
TAKEOVER = "takeover worker"
POOL = "pool"

Place = tuple[Any, str] | type[PoolCall[Any]]
"""A function by its owner and name, or a call of the pool: a worker sends it, the pool runs it."""

PLACES: dict[str, dict[str, Place]] = {
    "prefill": {
        "look up the prefix": FindPrefix,
        "get pages": AllocatePages,
        "read a chunk": (ChunkPass, "__call__"),
        "draw the first token": (PrefillEngine, "_finish"),
        "commit": HandOff,
        "tell": (WorkerReplica, "_deliver"),
    },
    "compress": {
        "attach": AttachLeases,
        "pin what is shared": PinPrefix,
        "plan": (compress_engine.CompressEngine, "_classes"),
        "get pages": AllocatePages,
        "publish the prefix": PublishPrefix,
        "encode": (compress_engine, "move_tokens"),
        "commit": HandOff,
        "tell": (WorkerReplica, "_deliver"),
    },
    "decode": {
        "attach": AttachLeases,
        "fill the tables": (SectionTable, "fill"),
        "enter the checkpoint": (Checkpoint, "join"),
        "note a token": (Checkpoint, "append_token"),
        "grow": (PageGrowth, "_grow"),
        "get pages": AllocatePages,
        "compute": (DecodeEngine, "_forward"),
        "plan a retirement": (Window, "prepare"),
        "note a retirement": (Window, "_run_phases"),
        "lower": (Window, "_downgrade"),
        "move up": (Window, "_encode"),
        "close a retirement": (Window, "_commit"),
        "note an offer": (Checkpoint, "mark_preempted"),
        "put on offer": HandOff,
        "keep an answer": (OutputCache, "publish_next"),
        "find what was answered": (SlotTokenSource, "of"),
        "copy what was answered": (SlotTokenSource, "copy"),
        "publish the answer": PublishPrefix,
        "keep the session": KeepSession,
        "release": ReleaseLeases,
        "leave the checkpoint": (Checkpoint, "leave"),
        "tell": (WorkerReplica, "_deliver"),
    },
    TAKEOVER: {
        "fence": InheritFrom,
        "find": (Checkpoint, "find"),
        "adopt": AdoptRequest,
        "finish the retirement": (Window, "resume"),
        "copy the checkpoint": (Checkpoint, "copy_slot"),
    },
    "router": {
        "submit": (Submission, "submit"),
        "prefilled": (Progress, "prefilled"),
        "planned": (Progress, "planned"),
        "compressed": (Progress, "compressed"),
        "suspended": (Progress, "preempted"),
        "finished": (Progress, "finished"),
    },
    POOL: {
        "allocate": AllocatePages,
        "handoff": HandOff,
        "attach": AttachLeases,
        "release": ReleaseLeases,
        "publish": PublishPrefix,
        "keep the session": KeepSession,
    },
}
"""By role: what is done, and the function that does it. A takeover worker is the decode worker that
continues the requests of one that died."""


PARTS: dict[str, dict[str, Place]] = {
    "prefill": {
        "hand layers over": (PrefillEngine, "_hand_over_layers"),
        "hear that layers are encoded": (PrefillEngine, "_on_layers_encoded"),
    },
    "compress": {
        "take layers": (compress_engine.CompressEngine, "_take_layers"),
        "encode layers": (compress_engine.CompressEngine, "_step_early"),
        "let raw layers go": ReleaseLeases,
    },
}
"""The same where prompts are encoded layer by layer as they are read."""


LOWERING: dict[str, dict[str, Place]] = {
    "decode": {
        "plan a lowering": (Lowering, "prepare"),
        "lower pages": (Lowering, "apply"),
        "move lowered tokens": (Lowering, "_move"),
        "keep the tables before a lowering": (Checkpoint, "keep_classes"),
        "record a lowering": (Lowering, "_record_phase"),
        "renew the lease": (RequestHandover, "renew_lease"),
    },
    "router": {"lowered": (MemoryLowering, "lowered")},
}
"""The same where high tokens of running requests become low."""


REVOKING: dict[str, dict[str, Place]] = {POOL: {"revoke a dead worker": (FakeDriver, "revoke")}}
"""What else is done where pages are on devices. A decode worker dies first."""
NOT_ON_DEVICES = "pin what is shared"
"""What is not done there: requests copy prefixes, and read none in place."""


@dataclass(frozen=True)
class Point:
    """A moment right before or after a call."""

    role: str
    edge: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.role}: {self.edge} {self.place}"

    @property
    def is_second(self) -> bool:
        """Whether the process comes there after the death of a decode worker."""
        return self.role == TAKEOVER or self.place in REVOKING[POOL]


def points_of(places: dict[str, dict[str, Place]]) -> list[Point]:
    return [
        Point(role, edge, place)
        for role, done in places.items()
        for place in done
        for edge in ("before", "after")
    ]


WHOLE_POINTS, PART_POINTS = points_of(PLACES), points_of(PARTS)
LOWERING_POINTS = points_of(LOWERING)
REVOKING_POINTS = points_of(REVOKING)
DEVICE_POINTS = [
    *(point for point in WHOLE_POINTS if point.place != NOT_ON_DEVICES),
    *REVOKING_POINTS,
]
POINTS = [*WHOLE_POINTS, *PART_POINTS, *LOWERING_POINTS, *REVOKING_POINTS]
FIRST_DEATH = Point("decode", "before", "compute")
"""Where a decode worker dies before a takeover worker, or the pool that revokes it."""

LAST_ACTS = list[Callable[[], None]]()
"""What this process does before it dies at a point."""


@dataclass(frozen=True)
class GivenUp:
    """What the pool took over from this process in a call, after which the process may die.

    It waits for its device before such a call, so nothing that is queued there writes to these
    pages.
    """

    leases: Sequence[LeaseId] = ()
    """Leases that ended."""
    pages: Sequence[int] = ()
    """Pages of blocks that the prefix cache added."""


LAST_GIVEN_UP = [GivenUp()]
"""That of the last call."""

Counters = MutableSequence[int]
"""One number for each of ``POINTS``, shared by all processes."""


@dataclass(frozen=True)
class Board:
    """What all processes share: how often each point was passed, and where one of them dies."""

    passed: Counters
    left: Counters
    """Passes until a process dies there, itself included; 0: it does not."""

    def arm(self, point: Point, count: int) -> None:
        """Let whoever passes the point for the so many-th time from now on die there."""
        self.left[POINTS.index(point)] = count

    def disarm(self) -> list[Point]:
        """Take all that is armed back, and return the points at which nobody died."""
        unused = [point for point, left in zip(POINTS, self.left, strict=True) if left]
        self.left[:] = [0] * len(POINTS)
        return unused

    def passes(self, point: Point) -> int:
        return self.passed[POINTS.index(point)]

    def hit(self, index: int) -> None:
        """A process passes a point."""
        self.passed[index] += 1
        if self.left[index]:
            self.left[index] -= 1
            if not self.left[index]:
                for act in LAST_ACTS:
                    act()
                os._exit(EXIT_CODE)


def watch_points(role: str, board: Board) -> None:
    """From now on this process counts what it passes, and dies where it is told to."""
    for index, point in enumerate(POINTS):
        if point.role == role and point.edge == "before":
            kinds = (PLACES, PARTS, LOWERING, REVOKING)
            every = {name: place for kind in kinds for name, place in kind.get(role, {}).items()}
            place = every[point.place]
            owner, name, sent = function_of(role, place)
            setattr(owner, name, _watched(getattr(owner, name), board, index, sent))


def function_of(role: str, place: Place) -> tuple[Any, str, type[object] | None]:
    """Owner and name of the function at a place, and the one call of a stub that is meant."""
    if isinstance(place, tuple):
        return *place, None
    return (place, "run", None) if role == POOL else (PoolStub, "call", place)


def _watched(
    work: Callable[..., Any], board: Board, index: int, sent: type[object] | None
) -> Callable[..., Any]:
    """``work`` that hits a point before and after; of a stub only when it sends such a call."""

    @functools.wraps(work)
    def watched(*args: object, **kwargs: object) -> object:
        if sent and not isinstance(args[1], sent):
            return work(*args, **kwargs)
        board.hit(index)
        result = work(*args, **kwargs)
        LAST_GIVEN_UP[0] = given_up_by(args[1], result) if sent else GivenUp()
        board.hit(index + 1)
        return result

    return watched


def given_up_by(call: object, result: object) -> GivenUp:
    """What is no longer the worker's when the pool has run a call."""
    match call, result:
        case HandOff(), _:
            return GivenUp(leases=call.releases)
        case ReleaseLeases(), _:
            return GivenUp(leases=call.leases)
        case PublishPrefix(), PrefixBlocks(blocks=added):
            blocks = call.blocks[len(call.blocks) - added :]
            return GivenUp(
                pages=[page for block in blocks for page in block.ids(NO_LIMIT).tolist()]
            )
        case _:
            return GivenUp()
