"""Incremental detokenization: whole characters only, and no text past a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.messages import Sampling
from triptych.workers.models.tokenizer import FastTokenizer
from triptych.workers.sampling.token_bytes import incomplete_character, piece_bytes
from triptych.workers.sampling.tool_calls import ToolCallScanner, overlap

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 16
_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Final text that a token added, and the stop string that ended the output."""

    text: str
    stop: str | None = None


class IncrementalDetokenizer:
    """Detokenizes one output incrementally.

    All deltas and ``finish`` together are the decoded output without an incomplete character at
    its end, cut at the first stop string that is completed. Decoding covers a window of recent
    tokens, so the cost of a token does not depend on the length of the output.

    One exception: tokenizers with byte tokens (``<0x41>``) replace every byte of a run that
    is not UTF-8 as a whole. Characters of such a run that were already sent do not change.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        sampling: Sampling,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """``prompt_tail``: last tokens of the prompt. SentencePiece tokenizers drop a space in
        front of the very first token, so decoding must not start with the output."""
        self._decoder = _DecodeWindow(tokenizer, skip_special=sampling.skip_special_tokens)
        stops = _StopStrings(sampling.stop, keep=sampling.include_stop)
        has_both = sampling.tool_calls and sampling.stop
        calls = ToolCallScanner(calls_first=sampling.tool_calls_first)
        self._stops = _StopStringsOutsideCalls(stops, calls) if has_both else stops
        for token in prompt_tail:
            self._decoder.push(token)

    def push(self, token: int) -> TextDelta:
        """Add an output token; the text that it makes final."""
        return self._stops.push(self._decoder.push(token))

    def finish(self) -> str:
        """The text held back until now; empty after a stop string was found."""
        piece = self._stops.push(self._decoder.flush())
        return piece.text + self._stops.flush()


class _DecodeWindow:
    """Decodes a window of the last tokens and returns the new text.

    The decoded tail may still change while it ends in a replacement character: the rest of
    a multi-byte character may come with the next token. A window starts at a token border
    where the text was settled, so characters are never cut.
    """

    def __init__(self, tokenizer: FastTokenizer, *, skip_special: bool) -> None:
        self._decode = tokenizer.backend.decode
        self._name = tokenizer.backend.id_to_token
        self._byte_level = tokenizer.backend.token_to_id("Ġ") is not None
        self._skip = frozenset(tokenizer.all_special_ids if skip_special else ())
        self._tokens = list[int]()
        self._border = 0
        """Tokens of the window whose text was final when the next token came."""
        self._given = 0
        """Characters of the window's text that were returned already."""

    def push(self, token: int) -> str:
        """Text that this token makes final."""
        if token in self._skip:
            return ""
        self._tokens.append(token)
        text = self._text(self._tokens)
        settled = self._settled(text)
        new = text[self._given : settled]
        self._given = max(self._given, settled)
        if settled == len(text):
            self._shrink()
        return new

    def flush(self) -> str:
        """The remaining text, without an incomplete character at its end."""
        text = self._text(self._tokens)
        if text.endswith(_REPLACEMENT) and (cut_bytes := self._incomplete_bytes()):
            # A byte-level decoder shows one replacement character for all of them. With byte
            # tokens, each of them is a token.
            text = text[:-1] if self._byte_level else self._text(self._tokens[:-cut_bytes])
        new, self._given = text[self._given :], max(self._given, len(text))
        return new

    def _incomplete_bytes(self) -> int:
        """Bytes at the end that begin a character and do not complete it."""
        names = (self._name(token) or "" for token in self._tokens[-_CHARACTER_BYTES:])
        return incomplete_character(
            piece_bytes(name, byte_level=self._byte_level) for name in names
        )

    def _settled(self, text: str) -> int:
        """Characters that no later token can change."""
        if not text.endswith(_REPLACEMENT):
            return len(text)
        if len(self._tokens) - self._border < _WINDOW_TOKENS:
            return len(text.rstrip(_REPLACEMENT))
        return len(text) - 1

    def _shrink(self) -> None:
        if len(self._tokens) > _WINDOW_TOKENS and 0 < self._border < len(self._tokens):
            kept = self._tokens[self._border :]
            text = self._text(kept)
            if text:
                self._tokens, self._given = kept, len(text)
        self._border = len(self._tokens)

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=False)


class _StopStrings:
    """Returns text until a stop string is complete; holds back text that may begin one.

    The stop string that is completed first ends the output, regardless of token borders;
    of several completed by the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keep = keep
        self._held_back = ""
        self._ended = False

    def push(self, new: str) -> TextDelta:
        if self._ended:
            return TextDelta("")
        if not self._stops:
            return TextDelta(new)
        text = self._held_back + new
        if found := self._first(text):
            end, stop = found
            self._held_back, self._ended = "", True
            return TextDelta(text[: end if self._keep else end - len(stop)], stop)
        hold = max(overlap(text, stop) for stop in self._stops)
        self._held_back = text[len(text) - hold :]
        return TextDelta(text[: len(text) - hold])

    def flush(self) -> str:
        held, self._held_back = self._held_back, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop


class _StopStringsOutsideCalls:
    """The same for output with tool calls, in which stop strings are not matched.

    Agents send stop strings such as a line break, which every call contains.
    """

    def __init__(self, stops: _StopStrings, calls: ToolCallScanner) -> None:
        self._stops, self._calls = stops, calls

    def push(self, new: str) -> TextDelta:
        text = ""
        for segment in self._calls.push(new):
            if segment.in_call:
                text += self._stops.flush() + segment.text
                continue
            delta = self._stops.push(segment.text)
            text += delta.text
            if delta.stop is not None:
                return TextDelta(text, delta.stop)
        return TextDelta(text)

    def flush(self) -> str:
        rest = self._calls.flush()
        if rest is None or rest.in_call:
            return self._stops.flush() + (rest.text if rest else "")
        return self._stops.push(rest.text).text + self._stops.flush()
