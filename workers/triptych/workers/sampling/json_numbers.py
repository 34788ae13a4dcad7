"""Bounds the digits of numbers in JSON outputs.

A JSON schema allows numbers of any length, and a model may fill its answer with digits. JSON
readers hold 64-bit integers, and floats of 17 digits with exponents below 308.
"""

import json
from dataclasses import dataclass
from typing import Self

INTEGER_DIGITS = 19
FRACTION_DIGITS = 17
EXPONENT_DIGITS = 2

_EMBEDDED = "%json "
_NEWLINE, _QUOTE, _BACKSLASH = b'\n"\\'


@dataclass(eq=False)
class NumberScanner:
    """Follows the text of an output, and tells when a number has all its digits."""

    is_everywhere: bool
    """Whether the whole output is JSON; else objects and lists that begin a line are."""
    _depth: int = 0
    """Objects and lists that are open."""
    _is_line_start: bool = True
    _in_string: bool = False
    _is_escaped: bool = False
    _digits: int = 0
    _limit: int = INTEGER_DIGITS

    @classmethod
    def of(cls, grammar: str) -> Self | None:
        """A scanner for outputs of a grammar (llguidance's form); None if they have no JSON."""
        if not grammar.lstrip().startswith("{"):  # Lark rules
            return cls(is_everywhere=False) if _EMBEDDED in grammar else None
        first = json.loads(grammar)["grammars"][0]
        return None if first.get("json_schema") is None else cls(is_everywhere=True)

    @property
    def is_full(self) -> bool:
        """Whether the next character may not be a digit."""
        is_json = self.is_everywhere or self._depth > 0
        return is_json and not self._in_string and self._digits >= self._limit

    def read(self, text: bytes) -> None:
        """Advance by the bytes of a token."""
        for byte in text:
            self._read(byte)

    def _read(self, byte: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif byte == _NEWLINE:  # JSON strings have no raw line breaks
            self._in_string = False
            self._end_number()
        elif byte == _BACKSLASH:
            self._is_escaped = self._in_string
        elif byte == _QUOTE:
            self._in_string = not self._in_string
            self._end_number()
        elif not self._in_string:
            self._read_nesting(byte)
            self._read_number(byte)
        self._is_line_start = byte == _NEWLINE

    def _read_nesting(self, byte: int) -> None:
        if byte in b"{[" and (self._depth or self._is_line_start):
            self._depth += 1
        elif byte in b"}]" and self._depth:
            self._depth -= 1

    def _read_number(self, byte: int) -> None:
        match chr(byte):
            case digit if digit.isdigit():
                self._digits += 1
            case ".":
                self._digits, self._limit = 0, FRACTION_DIGITS
            case "e" | "E" if self._digits:
                self._digits, self._limit = 0, EXPONENT_DIGITS
            case "+" | "-" if self._limit == EXPONENT_DIGITS:
                pass
            case _:
                self._end_number()

    def _end_number(self) -> None:
        self._digits, self._limit = 0, INTEGER_DIGITS
