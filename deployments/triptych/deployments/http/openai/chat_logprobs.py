"""``logprobs.content`` of a chat choice: an entry for each token, with the bytes of its text."""

import codecs
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.core.messages import Sampling, TokenLogprob
from triptych.deployments.http.tokenizer import TextCodec

Json = dict[str, object]

UNLIKELY = -9999.0
"""OpenAI's value for a log probability of minus infinity, which JSON does not have."""

_UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class _Held:
    """An entry that is not returned yet."""

    entry: TokenLogprob
    start: int
    """Bytes of the output before it."""
    raw: bytes
    chars: int
    """Characters of the output up to its end, one that is incomplete included."""


class ChatLogprobs:
    """The entries of one choice, in pieces that follow its text.

    As in vLLM every token has an entry, also those of a stop string and the one that ends the
    answer. As OpenAI defines ``bytes``, those of all entries together are the text: an entry has
    only those of its token's bytes that are text, so none behind a stop string. With stop strings
    an entry is therefore held back as long as its text is. Bytes of an incomplete character at
    the end are kept, and those of tool calls, as calls are cut out of the text later.
    """

    def __init__(self, codec: TextCodec, sampling: Sampling) -> None:
        self._codec, self._sampling = codec, sampling
        self._decoder = _UTF8(errors="replace")
        self._raw = bytearray()
        self._chars = 0
        self._pieces = list[str]()
        self._shown = 0
        self._held = deque[_Held]()

    def push(self, text: str, entries: Sequence[TokenLogprob]) -> Iterator[Json]:
        """Add text and entries of tokens; the entries that no stop string can cut any more."""
        self._add(text, entries)
        while self._held and self._held[0].chars <= self._shown:
            held = self._held.popleft()
            yield self._json(held.entry, held.raw)

    def finish(
        self, text: str, entries: Sequence[TokenLogprob], stop: str | int | None
    ) -> Iterator[Json]:
        """Add the last text and entries; all entries that are left.

        ``stop``: the stop string or token that ended the answer
        """
        self._add(text, entries)
        end = self._end_of_text(stop) if self._held else 0
        while self._held:
            held = self._held.popleft()
            yield self._json(held.entry, held.raw[: max(end - held.start, 0)])

    def _add(self, text: str, entries: Sequence[TokenLogprob]) -> None:
        self._pieces.append(text)
        self._shown += len(text)
        for entry in entries:
            self._hold(entry)

    def _hold(self, entry: TokenLogprob) -> None:
        raw = self._text_bytes(entry.token)
        self._chars += len(self._decoder.decode(raw))
        is_incomplete = bool(self._decoder.getstate()[0])
        chars = self._chars + is_incomplete if self._sampling.stop else 0
        self._held.append(_Held(entry, len(self._raw), raw, chars))
        self._raw += raw

    def _end_of_text(self, stop: str | int | None) -> int:
        """Number of the output's bytes that are text."""
        if isinstance(stop, int):
            return self._held[-1].start
        if stop is None:
            return len(self._raw)
        text, found = "".join(self._pieces).encode(), stop.encode()
        if self._raw.startswith(text):
            return len(text)
        # Decoding changed some bytes: a space in front, or bytes that are no character.
        at = self._raw.find(found)
        return len(self._raw) if at < 0 else at + len(found) * self._sampling.include_stop

    def _text_bytes(self, token: int) -> bytes:
        is_skipped = self._sampling.skip_special_tokens and self._codec.is_special(token)
        return b"" if is_skipped else self._codec.token_bytes(token)

    def _json(self, entry: TokenLogprob, raw: bytes) -> Json:
        top = [self._named(token, value, self._text_bytes(token)) for token, value in entry.top]
        return self._named(entry.token, entry.logprob, raw) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float, raw: bytes) -> Json:
        name = self._codec.token_bytes(token).decode("utf-8", errors="replace")
        return {"token": name, "logprob": finite_logprob(logprob), "bytes": list(raw)}


def finite_logprob(logprob: float) -> float:
    """A log probability that JSON has."""
    return max(logprob, UNLIKELY) if math.isfinite(logprob) else UNLIKELY
