# tokenizers has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Tokenizer without templates, special tokens or length limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from triptych.workers.models.pretrained import read_tokenizer

LONG = 10_000
"""Texts of at least this many characters are cached."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a model directory."""

    path: Path

    @cached_property
    def _backend(self) -> Any:
        return read_tokenizer(self.path).backend_tokenizer

    @property
    def size(self) -> int:
        """Ids are below this."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(_encode_cached(self, text) if len(text) >= LONG else self._encode(text))

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens)))


@lru_cache(maxsize=32)
def _encode_cached(vocabulary: Vocabulary, text: str) -> list[int]:
    """Sources are cut many times, with other seeds and context lengths."""
    return vocabulary._encode(text)  # pyright: ignore[reportPrivateUsage]
