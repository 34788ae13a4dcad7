"""Plain data in, frozen dataclass out: strict, with errors that name the field.

One builder serves the configuration file and the messages between processes, so that
neither an unknown key nor a wrong type passes silently anywhere.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class SchemaError(ValueError):
    """A value does not fit its field. The caller turns this into its own error."""


class PackedField:
    """A field of a message that is an object in a process and bytes on the wire, such as an array.

    The bytes of a peer are kept unchecked; the subclass checks them when they are used.
    """

    __slots__ = ()

    def pack(self) -> bytes:
        """The bytes on the wire."""
        raise NotImplementedError

    @classmethod
    def of_peer(cls, packed: bytes) -> Self:
        """The field for the bytes of a peer, which are not checked yet."""
        raise NotImplementedError


@lru_cache(maxsize=256)
def _shape(cls: type) -> dict[str, tuple[Any, bool]]:
    """The type hint of each field of a dataclass, and whether the field has a default."""
    hints = get_type_hints(cls)
    known = [field for field in fields(cast("Any", cls)) if field.init]
    return {field.name: (hints[field.name], _has_default(field)) for field in known}


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def build(cls: type[T], data: object, path: str = "") -> T:
    """Make a ``cls`` from a mapping, checking every key and type.

    Raises: SchemaError naming the dotted path, the value and what was expected
    """
    if not isinstance(data, Mapping):
        raise SchemaError(f"{path or cls.__name__}={data!r}: expected a mapping")
    given, shape = cast("Mapping[object, object]", data), _shape(cls)
    for key in given:
        if key not in shape:
            raise SchemaError(_unknown_key(str(key), list(shape), path))
    values = dict[str, Any]()
    for name, (hint, _) in shape.items():
        if name in given:
            value = given[name]
            fits = type(value) is hint and hint in _PLAIN  # most values of messages
            values[name] = value if fits else convert(hint, value, _join(path, name))
    if len(values) < len(shape):
        _check_missing(shape, values, path)
    return cls(**values)


def _check_missing(
    shape: Mapping[str, tuple[Any, bool]], values: Mapping[str, Any], path: str
) -> None:
    for name, (_, has_default) in shape.items():
        if name not in values and not has_default:
            raise SchemaError(f"{_join(path, name)}: missing")


def convert(hint: Any, value: object, path: str) -> Any:
    """Check one value against a type hint; the only conversion is int to float."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, path)
    if origin is Literal:
        return _one_of(get_args(hint), value, path)
    if origin in (tuple, list):
        return _convert_sequence(hint, value, path)
    if origin in (dict, Mapping):
        return _convert_mapping(hint, value, path)
    if is_dataclass(hint):
        return (
            value
            if isinstance(value, cast("type", hint))
            else build(cast("type[Any]", hint), value, path)
        )
    return _convert_scalar(hint, value, path)


def _convert_scalar(hint: Any, value: object, path: str) -> Any:
    if hint is Any or hint is object:
        return value
    if hint is float and type(value) is int:
        return float(value)
    wanted = type(None) if hint is None else hint
    supertype = getattr(wanted, "__supertype__", wanted)  # NewType
    if type(value) is not supertype:
        if type(value) is bytes and isinstance(hint, type) and issubclass(hint, PackedField):
            return hint.of_peer(value)
        raise SchemaError(f"{path}={_show(value)}: expected {_name(hint)}")
    return value


def _convert_union(hint: Any, value: object, path: str) -> Any:
    options, reasons = get_args(hint), list[str]()
    if type(value) in _PLAIN_OR_NONE and type(value) in options:
        return value
    for option in options:
        try:
            return convert(option, value, path)
        except SchemaError as error:
            reasons.append(str(error))
    if isinstance(value, Mapping):
        raise SchemaError(reasons[0])
    names = " or ".join(_name(option) for option in options)
    raise SchemaError(f"{path}={_show(value)}: expected {names}")


_PLAIN = {int, float, str, bool, bytes}
_PLAIN_OR_NONE = _PLAIN | {type(None)}


def _convert_sequence(hint: Any, value: object, path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise SchemaError(f"{path}={_show(value)}: expected a list")
    items = cast("list[object]", value)
    args = get_args(hint)
    # Long sequences of plain values, such as the ids of a prompt, are checked at once.
    types_given = set(map(type, items))
    if len(args) == 1 or args[-1] is Ellipsis:
        if args[0] in _PLAIN and types_given == {args[0]}:
            return tuple(items) if get_origin(hint) is tuple else list(items)
    elif types_given <= _PLAIN and tuple(map(type, items)) == args:
        return tuple(items)
    if get_origin(hint) is tuple and args[-1] is not Ellipsis:
        if len(args) != len(items):
            raise SchemaError(f"{path}: expected {len(args)} values, not {len(items)}")
        return tuple(
            convert(arg, item, f"{path}[{i}]")
            for i, (arg, item) in enumerate(zip(args, items, strict=True))
        )
    made = [convert(args[0], item, f"{path}[{i}]") for i, item in enumerate(items)]
    return tuple(made) if get_origin(hint) is tuple else made


def _convert_mapping(hint: Any, value: object, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{path}={_show(value)}: expected a mapping")
    key_hint, item_hint = get_args(hint)
    items = cast("Mapping[object, object]", value).items()
    return {
        convert(key_hint, key, f"{path} key"): convert(item_hint, item, f"{path}[{key!r}]")
        for key, item in items
    }


def _one_of(options: tuple[object, ...], value: object, path: str) -> object:
    if value in options:
        return value
    near = get_close_matches(str(value), [str(o) for o in options], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    names = " or ".join(repr(o) for o in options)
    raise SchemaError(f"{path}={_show(value)}: expected {names}{hint}")


def _unknown_key(key: str, known: list[str], path: str) -> str:
    near = get_close_matches(key, known, n=1)
    hint = f"; did you mean {_join(path, near[0])!r}?" if near else ""
    return f"{_join(path, key)}: unknown key{hint} (known: {', '.join(sorted(known))})"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(o) for o in get_args(hint))
    return getattr(hint, "__name__", str(hint))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
