"""Tool calls as Mistral writes them from version 11 on: ``[TOOL_CALLS]name[ARGS]{...}``.

Text may come before the first call. Each call begins with its own tag, and version 11 writes an id
between name and arguments: ``[TOOL_CALLS]name[CALL_ID]abcdefghi[ARGS]{...}``. The tags are special
tokens, which no other text of an answer has, so outputs are read with them.

Source: mistral-common, ``InstructTokenizerV11`` and ``InstructTokenizerV13``
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.core.messages import FinishReason
from triptych.workers.sampling.tool_calls import ARGS, CALL_ID, OPEN_CALLS, overlap

NamedCall = tuple[str, str, str]
"""Name, arguments as JSON, and id; an empty id: the output has none."""

_HEAD = re.compile(
    rf"{re.escape(OPEN_CALLS)}(?P<name>[^\[\]{{}}]*?)"
    rf"(?:{re.escape(CALL_ID)}(?P<id>[a-zA-Z0-9]*))?{re.escape(ARGS)}"
)


def rules(tools: Sequence[tuple[str, str]], *, once: bool) -> list[str]:
    """Rules ``calls``, at the beginning of an output, and ``free``, of any output.

    ``tools``: name of each, and the schema of its parameters in JSON.
    """
    open_calls, call_id, args = (json.dumps(tag) for tag in (OPEN_CALLS, CALL_ID, ARGS))
    named = [f"({json.dumps(name)} id? {args} %json {schema})" for name, schema in tools]
    more = "" if once else " call*"
    return [
        f"calls: call{more}",
        f"call: {open_calls} named",
        f"named: {' | '.join(named)}",
        f"id: {call_id} /[a-zA-Z0-9]{{9}}/",
        f"free: TEXT | found named{more}",
        f"found[lazy]: TEXT {open_calls}",
        "TEXT: /(.|\\n)*/",
    ]


def calls_in(text: str) -> list[NamedCall]:
    """The complete calls of a text. A tag in the arguments of a call opens no other one.

    >>> calls_in('[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}[TOOL_CALLS]time[ARGS]{}')
    [('weather', '{"city": "Ulm"}', ''), ('time', '{}', '')]
    """
    found, end = list[NamedCall](), 0
    for tag in re.finditer(re.escape(OPEN_CALLS), text):
        if tag.start() >= end and (call := _call_at(text, tag.start())) is not None:
            named, end = call
            found.append(named)
    return found


def _call_at(text: str, at: int) -> tuple[NamedCall, int] | None:
    """The call that begins at a place and where it ends; None if it is not complete."""
    head = _HEAD.match(text, at)
    if head is None:
        return None
    try:
        arguments, end = json.JSONDecoder(parse_int=float).raw_decode(text, head.end())
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    return (head["name"].strip(), text[head.end() : end], head["id"] or ""), end


@dataclass
class NamedCallScanner:
    """Separates text from calls in streamed output; how it is cut changes nothing."""

    is_cut: bool = False
    """Whether the output ended inside a call."""
    _rest: str = ""
    """Output that is not yielded yet."""
    _in_calls: bool = False

    def read(self, text: str, *, finish: FinishReason | None = None) -> Iterator[str | NamedCall]:
        """Parse the next piece: yields text before the first call, and calls once complete."""
        self._rest += text
        if not self._in_calls:
            yield from self._text(finish)
        if self._in_calls and ("}" in text or finish):
            while (call := _call_at(self._rest, 0)) is not None:
                named, end = call
                self._rest = self._rest[end:].lstrip()
                yield named
        if finish:
            self.is_cut, self._rest = bool(self._rest), ""

    def _text(self, finish: FinishReason | None) -> Iterator[str]:
        at = self._rest.find(OPEN_CALLS)
        self._in_calls = at >= 0
        is_whole = finish == "stop" and not self._in_calls
        held = 0 if is_whole else overlap(self._rest, OPEN_CALLS)
        end = at if self._in_calls else len(self._rest) - held
        before, self._rest = self._rest[:end], self._rest[end:]
        if before:
            yield before
