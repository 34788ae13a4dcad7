"""Digits of numbers in JSON are counted, and those in texts are not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.workers.sampling.json_numbers import NumberScanner


def scanner(text: str, *, is_everywhere: bool = True) -> NumberScanner:
    found = NumberScanner(is_everywhere=is_everywhere)
    found.read(text.encode())
    return found


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        ("1" * 18, False),
        ("1" * 19, True),
        ("-" + "1" * 19, True),
        ("1" * 19 + ".", False),
        ("0." + "3" * 16, False),
        ("0." + "3" * 17, True),
        ("1.5e1", False),
        ("1.5e-12", True),
        ("1E+12", True),
        ('{"e": ' + "1" * 18, False),
        ('{"e": 1.5e12, "b": ' + "1" * 18, False),
        ('{"e": 1.5e12, "b": ' + "1" * 19, True),
        ('"' + "1" * 40, False),
        ('"\\"' + "1" * 40, False),
        ('"\\\\", ' + "1" * 40, True),
        ('{"a1": [true, ' + "1" * 19, True),
    ],
)
def test_a_number_is_full_when_a_reader_could_hold_no_more(text: str, is_full: bool) -> None:
    assert scanner(text).is_full == is_full


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        ("pi is 3." + "1" * 40, False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ' + "1" * 19, True),
        ('He said "\n{"name": "f", "arguments": {"a":\n' + "1" * 19, True),
        ('{"name": "f", "arguments": {}}\n' + "1" * 40, False),
    ],
)
def test_beside_text_only_json_at_the_start_of_a_line_counts(text: str, is_full: bool) -> None:
    assert scanner(text, is_everywhere=False).is_full == is_full


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 2]))
def test_no_64_bit_number_is_cut(value: object, indent: int | None) -> None:
    """A number is full only behind its last digit."""
    text, found = json.dumps(value, indent=indent).encode(), NumberScanner(is_everywhere=True)
    for byte in text:
        assert not (found.is_full and chr(byte).isdigit())
        found.read(bytes([byte]))
