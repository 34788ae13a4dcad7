"""Finds tool calls in streamed output, for the worker's stop strings and for the ingress."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""The tags around a call, as in Hermes and Qwen."""
OPEN_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
"""Tags in the calls of Mistral: special tokens there, which texts of answers lack."""
MISTRAL_TAGS = OPEN_CALLS, ARGS, CALL_ID

_STRING_CHARS = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""Characters of a JSON string up to its closing quote, or up to an incomplete escape."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the output that lies whole outside or whole inside of a call."""

    text: str
    in_call: bool
    """Whether the text is part of a call; its tags are, too."""
    ends_call: bool = False
    """Whether the call is complete with this piece."""


class ToolCallScanner:
    """Divides streamed output into text and tool calls.

    Text that may begin a tag is held back until more text decides it, so the segments do not
    depend on how the output is split into deltas. A closing tag inside a JSON string is part of
    that string.
    """

    def __init__(self, *, calls_first: bool = False) -> None:
        """``calls_first``: output that does not begin with a call is text, tags included."""
        self._rest = ""
        """Text that no segment has yet."""
        self._may_call: bool | None = None if calls_first else True
        """Whether a tag opens a call; None: the beginning of the output decides it."""
        self._in_call = False
        self._in_string = False

    @property
    def in_call(self) -> bool:
        """Whether the output so far ends inside a call, a complete opening tag included."""
        return self._in_call

    def push(self, text: str) -> Iterator[Segment]:
        """Add output; the segments that it completes."""
        self._rest += text
        while self._rest:
            segment = self._call() if self._in_call else self._text()
            if segment is None:
                return
            yield segment

    def flush(self) -> Segment | None:
        """The text that is held back at the end of the output."""
        rest, self._rest = self._rest, ""
        return Segment(rest, self._in_call) if rest else None

    def _text(self) -> Segment | None:
        if self._may_call is None:
            if overlap(self._rest, OPEN) == len(self._rest):
                return None
            self._may_call = self._rest.startswith(OPEN)
        if not self._may_call:
            return self._take(len(self._rest), in_call=False)
        found = self._rest.find(OPEN)
        if found == 0:
            self._in_call, self._in_string = True, False
            return self._take(len(OPEN), in_call=True)
        end = found if found > 0 else len(self._rest) - overlap(self._rest, OPEN)
        return self._take(end, in_call=False)

    def _call(self) -> Segment | None:
        if self._in_string:
            end = _end_of_string(self._rest)
            if self._rest[end : end + 1] == '"':
                self._in_string, end = False, end + 1
            return self._take(end, in_call=True)
        quote, close = self._rest.find('"'), self._rest.find(CLOSE)
        if close >= 0 and not 0 <= quote < close:
            self._in_call = False
            return self._take(close + len(CLOSE), in_call=True, ends_call=True)
        if quote >= 0:
            self._in_string = True
            return self._take(quote + 1, in_call=True)
        return self._take(len(self._rest) - overlap(self._rest, CLOSE), in_call=True)

    def _take(self, end: int, *, in_call: bool, ends_call: bool = False) -> Segment | None:
        text, self._rest = self._rest[:end], self._rest[end:]
        return Segment(text, in_call, ends_call) if text else None


def _end_of_string(text: str) -> int:
    found = _STRING_CHARS.match(text)
    return found.end() if found else 0


def overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of ``tag`` that ``text`` ends with."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
