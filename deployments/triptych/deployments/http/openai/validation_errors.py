"""Messages about wrong bodies in our own words, and warnings about unknown fields."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import cast, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

MAX_VALUE_CHARS = 200
MAX_WARNINGS = 5
MAX_COMPARED = 20
"""Unknown names that are compared with known ones; each takes a fraction of a millisecond."""
MAX_FIELD_CHARS = 64
NEAR = 0.8
"""Share of equal characters from which a name counts as a misspelt one."""

Path = tuple[int | str, ...]

EXPECTED: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 64 bits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "at least {min_length} {items}",
    "too_long": "at most {max_length} {items}",
    "string_too_short": "at least {min_length} {items}",
    "string_too_long": "at most {max_length} {items}",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_unicode": "a text without lone surrogates",
}
"""What pydantic's errors expect, by its names of them."""


def describe(fault: ErrorDetails, data: Mapping[str, object]) -> str:
    """One error of ``validate`` in a sentence, with the value that was sent if it is short."""
    return f"{dotted(fault['loc'])}: {_sentence(fault, data)}{_given(fault['input'])}"


def _sentence(fault: ErrorDetails, data: Mapping[str, object]) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    match kind:
        case "missing":
            return _missing(fault["loc"], data)
        case "value_error" | "assertion_error":
            return str(context.get("error", "this value is not valid"))[:MAX_VALUE_CHARS]
        case "extra_forbidden":
            return "there is no such field"
        case _ if kind in EXPECTED:
            return f"expected {EXPECTED[kind].format_map(_counts(fault))}"
        case _:
            return "this value is not valid"


def _counts(fault: ErrorDetails) -> dict[str, object]:
    """Values for the templates of ``EXPECTED``."""
    context = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in fault.get("ctx", {}).items()
    }
    # pydantic counts the characters of a text as items if the text has a validator of its own.
    noun = "character" if isinstance(fault["input"], str) else "item"
    is_one = 1 in (context.get("min_length"), context.get("max_length"))
    return {**context, "items": noun if is_one else f"{noun}s"}


def _missing(path: Path, data: Mapping[str, object]) -> str:
    """Whether the field is absent or null, which pydantic does not see."""
    *parents, name = path
    holder: object = data
    for step in parents:
        match holder:
            case list() if isinstance(step, int):
                holder = cast("list[object]", holder)[step]
            case dict() if not str(step).startswith("@"):
                holder = cast("dict[int | str, object]", holder).get(step)
            case _:
                pass
    if isinstance(holder, dict) and name in holder:
        return "a value is required, not null"
    names = cast("dict[str, object]", holder) if isinstance(holder, dict) else {}
    compared = islice(names, MAX_COMPARED)
    near = next((one for one in compared if nearest_field(one, [str(name)])), None)
    hint = "" if near is None else f"; the request has {near[:MAX_FIELD_CHARS]!r} instead"
    return f"this field is required{hint}"


def dotted(path: Path) -> str:
    """A path of an error as OpenAI's ``param``, without the tags of unions."""
    steps = [str(step)[:256] for step in path if not str(step).startswith("@")]
    return ".".join(steps)[:MAX_VALUE_CHARS]


def _given(value: object) -> str:
    """The invalid value for an error message, if it is short."""
    match value:
        case str() if value:
            return f" (got {value[:MAX_VALUE_CHARS]!r})"
        case bool() | float() if not (isinstance(value, float) and math.isnan(value)):
            return f" (got {value!r})"
        case int() if value.bit_length() <= 128:
            return f" (got {value})"
        case _:
            return ""


# ---------------------------------------------------------------- unknown fields


def misspelt_fields(
    kind: type[BaseModel], data: Mapping[str, object], ignored: Iterable[str] = ()
) -> list[str]:
    """A warning for each unknown field whose name is near a known one, in objects inside too."""
    return list(islice(_misspelt(kind, data, frozenset(ignored), ""), MAX_WARNINGS))


def _misspelt(
    kind: type[BaseModel], data: Mapping[str, object], ignored: frozenset[str], prefix: str
) -> Iterator[str]:
    fields = {info.alias or name: info for name, info in kind.model_fields.items()}
    unknown = (name for name in data if name not in fields and name not in ignored)
    for name in islice(unknown, MAX_COMPARED):
        if near := nearest_field(name, fields):
            yield f"{prefix + name!a} is ignored: did you mean {near!r}?"
    for name, info in fields.items():
        inner, value = _model_of(info.annotation), data.get(name)
        if inner is not None and isinstance(value, dict):
            part = cast("dict[str, object]", value)
            yield from _misspelt(inner, part, frozenset(), f"{prefix}{name}.")


def nearest_field(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` may stand for; None if none is near."""
    if len(name) > MAX_FIELD_CHARS:
        return None
    plain = {_plain(one): one for one in known}
    found = get_close_matches(_plain(name), plain, n=1, cutoff=NEAR)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    """``maxTokens`` and ``max-tokens`` are ``max_tokens``."""
    return re.sub(r"[-_ ]", "", name).lower()


def _model_of(annotation: object) -> type[BaseModel] | None:
    options = [annotation, *get_args(annotation)]
    return next(
        (one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None
    )
