# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""Encodes messages as msgpack frames, and checks every field of what comes in."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast

import msgpack

from triptych.core.errors import MessageError
from triptych.core.schema import PackedField, SchemaError, build

WIRE_VERSION = 11
"""Changes whenever a message gets another name or shape: 2 renamed the messages of preemption,
checkpoints and borrowed cache memory; 3 added the epoch of a registration; 4 the children of a
``Submit``; 5 page limits, evictions, and the prompt's length of a ``Prefix``; 6 small pages; 7
floors of requests, and tokens that are lowered; 8 compression methods of requests; 9
images of requests, and messages of the encode stage; 10 segments of prompts."""
MAX_FRAME_BYTES = 64 << 20

Message = Any
"""An instance of a class decorated with ``@message``."""

_KINDS: dict[str, type] = {}
C = TypeVar("C", bound=type)


ROUTER = "router"
"""The address of the router, wherever it runs."""

POOL = "pool"
"""The pool's address; the router sends it ``Expel`` and ``BorrowCacheMemory``."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message and its destination; the caller of the state machine delivers it."""

    to: str
    message: Message


def message(cls: C) -> C:
    """Register a dataclass as a message; its class name is its tag on the wire."""
    if cls.__name__ in _KINDS:
        raise TypeError(f"two messages are called {cls.__name__}")
    _KINDS[cls.__name__] = cls
    return cls


def pack(messages: Sequence[Message]) -> bytes:
    """Encode messages into one frame: ``[version, [tag, fields], ...]``."""
    frame = [WIRE_VERSION, *([type(item).__name__, _plain(item)] for item in messages)]
    return cast("bytes", msgpack.packb(frame, default=_pack_field))


def _pack_field(value: object) -> bytes:
    if isinstance(value, PackedField):
        return value.pack()
    raise TypeError(f"{type(value).__name__} is not a type of messages")


def unpack(frame: bytes) -> list[Message]:
    """Decode a frame, trusting nothing in it.

    Raises: MessageError for a wrong version, an unknown tag, a missing, unknown or
        ill-typed field, or bytes that are not msgpack
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(f"frame of {len(frame)} bytes: the limit is {MAX_FRAME_BYTES}")
    try:
        body = cast("object", msgpack.unpackb(frame, strict_map_key=True, raw=False))
    except Exception as error:  # msgpack raises several unrelated types
        raise MessageError(f"not a msgpack frame: {error}") from error
    items = cast("list[object]", body) if isinstance(body, list) else []
    if not items or items[0] != WIRE_VERSION:
        sent = f"wire version {items[0]!r:.20}" if items else "no wire version"
        expected = f"this process reads version {WIRE_VERSION}"
        raise MessageError(f"{sent}: {expected}; run one release of Triptych in all processes")
    return [_revive(item) for item in items[1:]]


def _revive(item: object) -> Message:
    if not (isinstance(item, list) and len(cast("list[object]", item)) == 2):
        raise MessageError("expected [tag, fields]")
    tag, data = cast("list[object]", item)
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise MessageError(f"unknown message {tag!r}")
    try:
        return cast("Message", build(kind, data, cast("str", tag)))
    except (SchemaError, ValueError) as error:
        raise MessageError(str(error)) from error


_SCALARS = {int, float, str, bool, bytes, type(None)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        if set(map(type, cast("list[object]", value))) <= _SCALARS:  # such as the ids of a prompt
            return cast("object", value)
        return [_plain(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[Any, object]", value).items()}
    return value
