"""The bytes of tokens, which may be parts of characters."""

import codecs
import re
from collections.abc import Iterable
from functools import cache

_UTF8 = codecs.getincrementaldecoder("utf-8")


def piece_bytes(piece: str, *, byte_level: bool) -> bytes:
    """The bytes of a vocabulary entry.

    ``byte_level``: whether the vocabulary writes bytes as GPT-2's does; others write single bytes
    as ``<0x41>`` and a space as ``▁``.
    """
    if byte_level:
        try:
            alphabet = _byte_alphabet()
            return bytes(alphabet[char] for char in piece)
        except KeyError:  # an added token: its name is its text
            return piece.encode()
    single = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(single[1]) if single else piece.replace("▁", " ").encode()


def incomplete_character(parts: Iterable[bytes]) -> int:
    """Number of bytes at the end that begin a character and do not complete it."""
    decoder = _UTF8(errors="replace")
    for part in parts:
        decoder.decode(part)
    return len(decoder.getstate()[0])


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    stand_ins = {chr(256 + index): byte for index, byte in enumerate(rest)}
    return {chr(byte): byte for byte in plain} | stand_ins
