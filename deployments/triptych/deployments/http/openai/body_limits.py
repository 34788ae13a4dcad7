"""Bounds of ``ingress.limits``, checked before a body is parsed and before it is validated.

Parsing and validation hold the event loop. Their time grows with the number of JSON values, not
with bytes: 4 MiB of empty lists take 80 times as long as a text of 4 MiB.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from triptych.core.config import RequestLimitsConfig
from triptych.core.errors import RequestError

SLICE_BYTES = 64 << 10
"""Bytes that are scanned between two turns of the event loop."""
SHORT_BYTES = 256 << 10
"""Up to this size a text is not scanned if its commas, brackets and colons are few."""
MAX_DIGITS = 400
"""Digits of a number in a longer text: Python's conversion takes quadratic time."""
_DIGITS = bytes(byte if chr(byte).isdigit() and byte < 128 else 0x20 for byte in range(256))


async def check_json_size(texts: Sequence[bytes], limits: RequestLimitsConfig) -> None:
    """Check the number of values and keys of JSON texts, and the length of numbers, before parsing.

    What is in strings is not counted. Long texts are scanned in slices, so that other streams go
    on meanwhile.

    Raises: RequestError
    """
    is_short = sum(map(len, texts)) <= SHORT_BYTES
    if is_short and _fits(sum(map(_values, texts)), sum(map(_keys, texts)), limits):
        return  # even if all of them are outside of strings
    values = keys = 0
    for text in texts:
        for outside in _outside_strings(text):
            values, keys = values + _values(outside), keys + _keys(outside)
            if not _fits(values, keys, limits):
                raise RequestError(_too_large(values, limits))
            if _longest_number(outside) > MAX_DIGITS:
                raise RequestError("the body has a number that is too long")
            await asyncio.sleep(0)


def _fits(values: int, keys: int, limits: RequestLimitsConfig) -> bool:
    return values <= limits.max_json_values and keys <= limits.max_json_keys


def _too_large(values: int, limits: RequestLimitsConfig) -> str:
    if values > limits.max_json_values:
        what, most, name = "values", limits.max_json_values, "max_json_values"
    else:
        what, most, name = "keys of objects", limits.max_json_keys, "max_json_keys"
    return (
        f"the body has more than {most} JSON {what}: send less, or raise ingress.limits.{name} "
        "on the server"
    )


def _values(text: bytes) -> int:
    """An upper bound of the JSON values in a text without strings."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _keys(text: bytes) -> int:
    return text.count(b":")


def _longest_number(text: bytes) -> int:
    return max(map(len, text.translate(_DIGITS).split()), default=0)


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """The parts of a JSON text outside of string literals, in slices."""
    first = start = 0
    while start < len(text):
        part = text[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the character that it escapes is behind it
            part = text[start : start + SLICE_BYTES + 1]
        start += len(part)
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[first::2])
        # An odd number of quotes: the next slice begins on the other side.
        first = (first + len(pieces) - 1) % 2


def check_counts(data: Mapping[str, object], limits: RequestLimitsConfig) -> None:
    """Check how many items the lists and mappings of a parsed body have.

    Raises: RequestError naming the field, the count and the setting
    """
    messages = _items(data.get("messages"))
    parts = sum(len(_items(_get(one, "content"))) for one in messages)
    calls = sum(len(_items(_get(one, "tool_calls"))) for one in messages)
    outputs = data.get("structured_outputs")
    counts = (
        ("messages", len(messages), "max_messages"),
        ("messages.content", parts, "max_content_parts"),
        ("messages.tool_calls", calls, "max_tool_calls"),
        ("tools", len(_items(data.get("tools"))), "max_tools"),
        ("functions", len(_items(data.get("functions"))), "max_tools"),
        ("stop", len(_items(data.get("stop"))), "max_stops"),
        ("stop_token_ids", len(_items(data.get("stop_token_ids"))), "max_stop_token_ids"),
        ("logit_bias", _entries(data.get("logit_bias")), "max_logit_bias"),
        ("guided_choice", len(_items(data.get("guided_choice"))), "max_guided_choices"),
        ("structured_outputs.choice", len(_items(_get(outputs, "choice"))), "max_guided_choices"),
    )
    for param, count, name in counts:
        _check(param, count, limits, name)
    _check_prompts(data, limits)


def _check_prompts(data: Mapping[str, object], limits: RequestLimitsConfig) -> None:
    given = _items(data.get("prompt"))
    is_one = not given or isinstance(given[0], int)
    ids = len(given) if is_one else sum(len(_items(one)) for one in given)
    _check("prompt", ids, limits, "max_json_values")
    prompts, n = 1 if is_one else len(given), data.get("n")
    each = n if isinstance(n, int) and n > 0 else 1
    if prompts * each > limits.max_sequences:
        many = f"{prompts} prompts with n={each} are {prompts * each} sequences"
        param = "prompt" if prompts > 1 else "n"
        raise RequestError(
            f"{many}: a request has at most {limits.max_sequences} "
            "(ingress.limits.max_sequences); send several requests",
            param,
        )


def _check(param: str, count: int, limits: RequestLimitsConfig, name: str) -> None:
    most = cast("int", getattr(limits, name))
    if count > most:
        text = f"{param} has {count} entries: at most {most} (ingress.limits.{name})"
        raise RequestError(text, param)


def embedded_json(data: Mapping[str, object]) -> list[bytes]:
    """The JSON texts inside of a body: arguments of tool calls, and schemas that are texts."""
    given = [
        _get(_get(call, "function"), "arguments")
        for one in _items(data.get("messages"))
        for call in _items(_get(one, "tool_calls"))
    ]
    given += [_get(_get(one, "function_call"), "arguments") for one in _items(data.get("messages"))]
    given += [data.get("guided_json"), _get(data.get("structured_outputs"), "json")]
    return [one.encode("utf-8", "surrogatepass") for one in given if isinstance(one, str)]


def _items(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _entries(value: object) -> int:
    return len(cast("dict[str, object]", value)) if isinstance(value, dict) else 0


def _get(value: object, key: str) -> object:
    return cast("dict[str, object]", value).get(key) if isinstance(value, dict) else None
