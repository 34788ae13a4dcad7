"""Text out of tokens as they come: whole characters only, and never past a stop text."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.messages import Sampling
from triptych.workers.models.tokenizer import FastTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a token added: text that is final, and the stop text that ended the answer."""

    text: str
    stop: str | None = None


class IncrementalDetokenizer:
    """Detokenizes one answer incrementally.

    All pieces and ``finish`` together are the decoded answer, cut at the first stop text
    that is completed. Decoding restarts inside a window of recent tokens, so a token costs
    the same however long the answer is.

    One exception: tokenizers with byte tokens (``<0x41>``) replace every byte of a run that
    is not UTF-8 as a whole. Characters of such a run that were already sent stay as they are.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        sampling: Sampling,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """``prompt_tail``: last tokens of a prompt that the answer continues without a break.
        Tokenizers of SentencePiece's kind drop a space in front of the very first token."""
        self._decoder = _DecodeWindow(tokenizer, skip_special=sampling.skip_special_tokens)
        self._stops = _StopStrings(sampling.stop, keep=sampling.include_stop)
        for token in prompt_tail:
            self._decoder.push(token)

    def push(self, token: int) -> TextDelta:
        """Take the answer's next token."""
        return self._stops.push(self._decoder.push(token))

    def finish(self) -> str:
        """The text that was still held back; nothing after a stop text was found."""
        piece = self._stops.push(self._decoder.flush())
        return piece.text + self._stops.flush()


class _DecodeWindow:
    """Decodes the last few tokens and gives what is new.

    The decoded tail may still change while it ends in a replacement character: the rest of
    a multi-byte character may come with the next token. A window starts at a token border
    where the text was settled, so characters are never cut.
    """

    def __init__(self, tokenizer: FastTokenizer, *, skip_special: bool) -> None:
        self._decode = tokenizer.backend.decode
        self._skip = frozenset(tokenizer.all_special_ids if skip_special else ())
        self._tokens = list[int]()
        self._border = 0
        """Tokens of the window whose text was settled when the next token came."""
        self._given = 0
        """Characters of the window's text that were handed out."""

    def push(self, token: int) -> str:
        """Text that this token settles."""
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
        """Everything else, an unfinished character as a replacement character."""
        text = self._text(self._tokens)
        new, self._given = text[self._given :], len(text)
        return new

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
    """Lets text through until one of the stop texts is complete.

    The stop text that is completed first ends the answer, whatever the tokens' borders;
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
        hold = max(_overlap(text, stop) for stop in self._stops)
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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` but is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
