# Protocol buffers come without type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false
"""Converts messages of ``triptych.proto`` to the JSON bodies of HTTP, and responses back.

Fields have the names of OpenAI's JSON, and are found by the descriptors: a new field in the schema
needs no line here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from triptych.core.errors import RequestError

if TYPE_CHECKING:
    from google._upb._message import FieldDescriptor as FastField
    from google.protobuf.descriptor import FieldDescriptor as PlainField

    FieldDescriptor = FastField | PlainField

STRUCT = "google.protobuf.Struct"
EXACT = 2**53
"""Integers below this are exact in a ``Struct``, whose numbers are doubles."""

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Decode a request.

    Raises: RequestError if the bytes are no such message
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise RequestError(f"the message is no {name} of triptych.proto") from error


def body_of(message: Message) -> dict[str, object]:
    """The JSON body of a request message.

    Raises: RequestError if a field is given twice
    """
    body = _fields(message)
    extra = cast("dict[str, object]", body.pop("extra", {}))
    known = message.DESCRIPTOR.fields_by_name
    for name in extra:
        if name in known or name == "stream":
            what = "the method says it" if name == "stream" else "it has a field of its own"
            raise RequestError(f"extra.{name[:64]}: {what}", f"extra.{name[:64]}")
    if "prompt_token_ids" in body:
        if "prompt" in body:
            text = "give either prompt or prompt_token_ids"
            raise RequestError(text, "prompt_token_ids")
        prompts = cast("list[dict[str, object]]", body.pop("prompt_token_ids"))
        body["prompt"] = [prompt.get("ids", []) for prompt in prompts]
    return extra | body


def fill_message(message: M, data: Mapping[str, object]) -> M:
    """Copy a JSON response into a message; keys without a field go into ``extra``."""
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in data.items():
        if value is None or name == "object":  # the message type tells
            continue
        if name in fields:
            _set(message, fields[name], value)
        elif "extra" in fields:
            cast("Any", message).extra.update({name: value})
    return message


def _set(message: Message, field: "FieldDescriptor", value: object) -> None:
    if field.message_type is None:
        if field.is_repeated:
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    elif field.message_type.full_name == STRUCT:
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        for item in cast("list[dict[str, object]]", value):
            fill_message(getattr(message, field.name).add(), item)
    else:
        part = getattr(message, field.name)
        part.SetInParent()
        fill_message(part, cast("dict[str, object]", value))


def _fields(message: Message) -> dict[str, object]:
    return {field.name: _plain(field, value) for field, value in message.ListFields()}


def _plain(field: "FieldDescriptor", value: Any) -> object:
    kind = field.message_type
    if kind is None:
        return list(value) if field.is_repeated else value
    if kind.GetOptions().map_entry:
        return {str(key): entry for key, entry in value.items()}
    if kind.full_name == STRUCT:
        return _mapping(value)
    return [_fields(item) for item in value] if field.is_repeated else _fields(value)


def _mapping(struct: Struct) -> dict[str, object]:
    return {name: _value(value) for name, value in struct.fields.items()}


def _value(value: Value) -> object:
    match value.WhichOneof("kind"):
        case "number_value":
            number: float = value.number_value
            # JSON does not distinguish 1 from 1.0, and neither does a Struct.
            return int(number) if abs(number) < EXACT and number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _mapping(value.struct_value)
        case "list_value":
            items: ListValue = value.list_value
            return [_value(item) for item in items.values]
        case _:
            return None
