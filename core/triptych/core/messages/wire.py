# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""Encodes messages as msgpack frames, and checks every field of what comes in."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgpack

from triptych.core.errors import MessageError
from triptych.core.schema import PackedField, SchemaError, build

WIRE_VERSION = 14
"""Changes whenever a message gets another name, shape or default: 2 renamed messages of preemption,
checkpoints and borrowed cache memory; 3 added the epoch of a registration; 4 the children of a
``Submit``; 5 page limits, evictions, and the prompt's length of a ``Prefix``; 6 small pages; 7
floors of requests, and tokens that are lowered; 8 compression methods of requests; 9
images of requests, and messages of the encode stage; 10 segments of prompts; 11 left out fields
with their default; 12 limits of KL, chosen methods, and the speed of links; 13 shares of token
classes; 14 where the raw pages of a prompt are stored."""
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
    """Encode messages into one frame: ``[version, [tag, fields], ...]``.

    Fields that have their default are left out: most messages are tokens, which set four of eleven.
    """
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
_COMPARED = {int, str, bool, tuple}
"""Types of defaults that are left out if the value is equal; others if it is the same object."""


@lru_cache(maxsize=256)
def _defaults(cls: type) -> tuple[tuple[str, object], ...]:
    """The names of a dataclass's fields, and the default of each; ``MISSING`` if it has none."""
    return tuple((field.name, field.default) for field in fields(cast("Any", cls)))


def _plain(value: object) -> object:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if is_dataclass(value):
        given = ((name, getattr(value, name), default) for name, default in _defaults(kind))
        return {
            name: _plain(item) for name, item, default in given if not _is_default(item, default)
        }
    if isinstance(value, tuple | list):
        if set(map(type, cast("list[object]", value))) <= _SCALARS:  # such as the ids of a prompt
            return cast("object", value)
        return [_plain(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[Any, object]", value).items()}
    return value


def _is_default(value: object, default: object) -> bool:
    if value is default:
        return True
    kind = type(value)
    return kind is type(default) and kind in _COMPARED and value == default
