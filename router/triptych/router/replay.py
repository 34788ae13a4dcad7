# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a live router heard and decided, written down, and the same done again from the file."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

import msgpack

from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError, MessageError
from triptych.core.messages import Message, Send, pack, unpack
from triptych.core.pages import PagePlan
from triptych.core.schema import SchemaError, build
from triptych.router.scheduler import Scheduler, Timeouts

VERSION = 1
MAX_RECORD_BYTES = 128 << 20
DIGEST_BYTES = 16

Kind = Literal["receive", "lost", "tick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """With what a router started; it starts anew when its process does."""

    version: int
    config: RouterConfig
    plan: PagePlan
    capacity_bytes: int
    timeouts: Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the coordinator: what came in, and a digest of each message that went out."""

    kind: Kind
    now: float
    sender: str
    frame: bytes
    """The messages, packed as on the wire; empty unless they were received."""
    sent: tuple[tuple[str, str, bytes], ...]
    """Address, name and digest."""


class RecordingScheduler(Scheduler):
    """A coordinator that writes down every call, prompts included, in a file of its user's only."""

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
    """A coordinator; if ``router.record`` says so, one that is recorded.

    Raises: ConfigError if the recording cannot be written
    """
    if config.record:
        return RecordingScheduler(Path(config.record), config, plan, capacity_bytes, timeouts)
    return Scheduler(config, plan, capacity_bytes, timeouts)


def end_recording(coordinator: Scheduler) -> None:
    """Close the file of one that is recorded."""
    if isinstance(coordinator, RecordingScheduler):
        coordinator.close()


@dataclass(frozen=True, slots=True)
class Replay:
    """How far a recording was followed, and where the decisions parted, if they did."""

    starts: int
    """How often the router began."""
    calls: int
    sent: int
    """Messages that the router decided to send."""
    difference: str
    """The first; empty: all decisions were the same."""


def replay(path: Path, around: Callable[[Call], None] = lambda _: None) -> Replay:
    """Give a new coordinator what the recorded one got, and compare what each of them sends.

    ``around`` is told of each call before it is made.

    Raises: ConfigError if the file is no recording
    """
    coordinator: Scheduler | None = None
    starts = calls = sent = 0
    for record in read_recording(path):
        if isinstance(record, Beginning):
            starts += 1
            coordinator = Scheduler(
                record.config, record.plan, record.capacity_bytes, record.timeouts
            )
            continue
        if coordinator is None:
            raise ConfigError(f"{path}: no beginning in front of the first call")
        around(record)
        found = digests(_repeat(coordinator, record, path))
        calls, sent = calls + 1, sent + len(found)
        if found != record.sent:
            difference = f"call {calls} ({record.kind} {record.sender} at {record.now:.3f} s)"
            said = f"recorded {_in_words(record.sent)}, replayed {_in_words(found)}"
            return Replay(starts, calls, sent, f"{difference}: {said}")
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
    if isinstance(found, Beginning) and found.version != VERSION:
        raise ConfigError(f"{where}: version {found.version}: expected {VERSION}")
    return found


def _repeat(coordinator: Scheduler, call: Call, path: Path) -> list[Send]:
    if call.kind == "lost":
        return coordinator.lost(call.sender, call.now)
    if call.kind == "tick":
        return coordinator.tick(call.now)
    try:
        return coordinator.receive(unpack(call.frame), call.sender, call.now)
    except MessageError as error:
        raise ConfigError(f"{path}: a frame in it is none: {error}") from error


def _in_words(sent: Sequence[tuple[str, str, bytes]]) -> str:
    return ", ".join(f"{name} to {to}" for to, name, _ in sent) or "nothing"
