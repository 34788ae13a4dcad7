# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Records the messages and decisions of a live router, and replays them from the file."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

import msgpack

from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError, MessageError
from triptych.core.messages import Message, Send, pack, unpack
from triptych.core.pages import PagePlan
from triptych.core.schema import SchemaError, build
from triptych.router.events.peers import Timeouts
from triptych.router.scheduler import Scheduler

VERSION = 4
BOUNDS_VERSION = 2
"""Recordings of this version were made when all bookings were bounds."""
MAX_RECORD_BYTES = 128 << 20
DIGEST_BYTES = 16

Kind = Literal["receive", "lost", "tick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The configuration of a router at its start."""

    version: int
    config: RouterConfig
    plan: PagePlan
    capacity_bytes: int
    timeouts: Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the scheduler: its input, and a digest of each message that it sent."""

    kind: Kind
    now: float
    sender: str
    frame: bytes
    """The messages, packed as on the wire; empty unless they were received."""
    sent: tuple[tuple[str, str, bytes], ...]
    """Address, name and digest."""


class RecordingScheduler(Scheduler):
    """A scheduler that records every call, prompts included, in a private file."""

    def __init__(
        self,
        path: Path,
        config: RouterConfig,
        plan: PagePlan,
        capacity_bytes: int,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Append to ``path``.

        Raises: ConfigError if it cannot be written
        """
        timeouts = timeouts or Timeouts()
        super().__init__(config, plan, capacity_bytes, timeouts)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"router.record={str(path)!r}: cannot be written: {error}") from error
        self._file = os.fdopen(file, "ab")
        beginning = Beginning(
            version=VERSION,
            config=config,
            plan=plan,
            capacity_bytes=capacity_bytes,
            timeouts=timeouts,
        )
        self._write(asdict(beginning))

    def receive(self, messages: Sequence[Message], sender: str, now: float) -> list[Send]:
        sends = super().receive(messages, sender, now)
        return self._note("receive", now, sender, pack(messages), sends)

    def lost(self, address: str, now: float) -> list[Send]:
        return self._note("lost", now, address, b"", super().lost(address, now))

    def tick(self, now: float) -> list[Send]:
        sends = self._note("tick", now, "", b"", super().tick(now))
        self._file.flush()
        return sends

    def close(self) -> None:
        """End the recording."""
        self._file.close()

    def _note(
        self, kind: Kind, now: float, sender: str, frame: bytes, sends: list[Send]
    ) -> list[Send]:
        call = Call(kind=kind, now=now, sender=sender, frame=frame, sent=digests(sends))
        self._write(asdict(call))
        return sends

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(cast("bytes", msgpack.packb(record)))


def open_scheduler(
    config: RouterConfig, plan: PagePlan, capacity_bytes: int, timeouts: Timeouts
) -> Scheduler:
    """A scheduler; with ``router.record``, one that records.

    Raises: ConfigError if the recording cannot be written
    """
    if config.record:
        return RecordingScheduler(Path(config.record), config, plan, capacity_bytes, timeouts)
    return Scheduler(config, plan, capacity_bytes, timeouts)


def end_recording(scheduler: Scheduler) -> None:
    """Close the file of a recording scheduler."""
    if isinstance(scheduler, RecordingScheduler):
        scheduler.close()


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay, with the first difference in decisions, if any."""

    starts: int
    """Number of starts of the router."""
    calls: int
    sent: int
    """Messages that the router decided to send."""
    difference: str
    """The first difference; empty: all decisions were the same."""


def replay(path: Path, around: Callable[[Call], None] = lambda _: None) -> Replay:
    """Give the recorded input to a new scheduler, and compare the messages that it sends.

    ``around`` is called before each call.

    Raises: ConfigError if the file is no recording
    """
    scheduler: Scheduler | None = None
    starts = calls = sent = 0
    for record in read_recording(path):
        if isinstance(record, Beginning):
            starts += 1
            scheduler = Scheduler(
                record.config, record.plan, record.capacity_bytes, record.timeouts
            )
            continue
        if scheduler is None:
            raise ConfigError(f"{path}: no beginning in front of the first call")
        around(record)
        found = digests(_repeat(scheduler, record, path))
        calls, sent = calls + 1, sent + len(found)
        if found != record.sent:
            difference = f"call {calls} ({record.kind} {record.sender} at {record.now:.3f} s)"
            outcome = f"recorded {_in_words(record.sent)}, replayed {_in_words(found)}"
            return Replay(starts, calls, sent, f"{difference}: {outcome}")
    return Replay(starts, calls, sent, "")


def read_recording(path: Path) -> Iterator[Beginning | Call]:
    """The records of a file; one that was cut off at its end is left out.

    Raises: ConfigError naming the file if something in it is no record
    """
    try:
        with path.open("rb") as file:
            reader: Any = msgpack.Unpacker(file, max_buffer_size=MAX_RECORD_BYTES)
            for number, record in enumerate(cast("Iterator[object]", reader), 1):
                yield _record(record, f"{path}: record {number}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, msgpack.UnpackException) as error:
        raise ConfigError(f"{path}: not a recording of a router: {error}") from error


def digests(sends: Sequence[Send]) -> tuple[tuple[str, str, bytes], ...]:
    """Address, name and digest of each message."""
    return tuple(
        (
            send.to,
            type(send.message).__name__,
            blake2b(pack([send.message]), digest_size=DIGEST_BYTES).digest(),
        )
        for send in sends
    )


def _record(record: object, where: str) -> Beginning | Call:
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a mapping, not {type(record).__name__}")
    kind = Beginning if "version" in record else Call
    try:
        found = build(kind, cast("dict[str, object]", record), where)
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    if isinstance(found, Beginning):
        if found.version == BOUNDS_VERSION:
            return replace(found, config=replace(found.config, booking="bounds"))
        if found.version != VERSION:
            raise ConfigError(f"{where}: version {found.version}: expected {VERSION}")
    return found


def _repeat(scheduler: Scheduler, call: Call, path: Path) -> list[Send]:
    if call.kind == "lost":
        return scheduler.lost(call.sender, call.now)
    if call.kind == "tick":
        return scheduler.tick(call.now)
    try:
        return scheduler.receive(unpack(call.frame), call.sender, call.now)
    except MessageError as error:
        raise ConfigError(f"{path}: a frame in it is none: {error}") from error


def _in_words(sent: Sequence[tuple[str, str, bytes]]) -> str:
    return ", ".join(f"{name} to {to}" for to, name, _ in sent) or "nothing"
