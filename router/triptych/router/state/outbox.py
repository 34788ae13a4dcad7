"""Collects the messages of one scheduling round, so that each worker gets one of each kind."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.core.messages import (
    Cancel,
    Compress,
    CompressItem,
    Encode,
    Expect,
    Message,
    Prefill,
    Request,
    Send,
)


@dataclass
class Outbox:
    """Messages in sending order: cancels first, so that workers have room for the rest."""

    _cancel: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _single: list[Send] = field(default_factory=list[Send])
    _prefill: dict[str, list[tuple[Request, str, str]]] = field(
        default_factory=dict[str, list[tuple[Request, str, str]]]
    )
    _expect: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _compress: dict[str, list[CompressItem]] = field(default_factory=dict[str, list[CompressItem]])
    _encode: dict[tuple[str, str], list[str]] = field(
        default_factory=dict[tuple[str, str], list[str]]
    )

    def post(self, to: str, message: Message) -> None:
        self._single.append(Send(to, message))

    def cancel(self, to: str, request: str) -> None:
        self._cancel.setdefault(to, []).append(request)

    def prefill(self, to: str, request: Request, encoder: str = "", arena: str = "") -> None:
        """``encoder``: the compressor that receives its layers during prefill; empty: none.

        ``arena``: where its raw pages are stored; empty: at the worker's home.
        """
        self._prefill.setdefault(to, []).append((request, encoder, arena))
        if encoder:
            self._expect.setdefault(encoder, []).append(request.id)

    def compress(self, to: str, item: CompressItem) -> None:
        self._compress.setdefault(to, []).append(item)

    def encode(self, to: str, arena: str, request: str) -> None:
        self._encode.setdefault((to, arena), []).append(request)

    def take(self) -> list[Send]:
        """All collected messages; the outbox is empty afterwards."""
        if not (self._cancel or self._prefill or self._compress or self._encode):
            sends, self._single = self._single, []  # nothing to gather, as after most messages
            return sends
        sends = list(self._drain())
        gathered = (self._cancel, self._single, self._prefill, self._expect, self._compress)
        for part in (*gathered, self._encode):
            part.clear()
        return sends

    def _drain(self) -> Iterator[Send]:
        for to, names in self._cancel.items():
            yield Send(to, Cancel(requests=tuple(dict.fromkeys(names))))
        yield from self._single
        for (to, arena), names in self._encode.items():
            yield Send(to, Encode(requests=tuple(names), arena=arena))
        for to, items in self._compress.items():
            yield Send(to, Compress(items=tuple(items)))
        for to, names in self._expect.items():
            yield Send(to, Expect(requests=tuple(names)))
        for to, prompts in self._prefill.items():
            yield Send(to, _prefill_of(prompts, to))


def _prefill_of(prompts: list[tuple[Request, str, str]], reader: str) -> Prefill:
    requests, encoders, arenas = zip(*prompts, strict=True)
    given = arenas if any(arenas) else ()
    if not any(encoders):
        return Prefill(requests=requests, arenas=given)
    return Prefill(requests=requests, encoders=encoders, reader=reader, arenas=given)
