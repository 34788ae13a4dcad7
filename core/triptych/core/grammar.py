# llguidance has type hints for its classes, but not for what its tokenizers are made of.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Grammars that an answer keeps to: made from what a client asks for, and checked before it runs.

A grammar is a text that llguidance reads: no code of ours or of the client's is in it, and what it
may cost is bounded, in building and in every step (``LIMITS``). So one request cannot hold up the
others, whatever it brings along.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from triptych.core.errors import GrammarError

MAX_CHARS = 64 << 10
MAX_DEPTH = 32
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""About 50 ms to build a grammar, 7 ms for a step, and 40 MB for what it remembers, at most."""


def of_schema(schema: Mapping[str, object] | bool) -> str:
    """JSON texts that a JSON schema allows; keywords that cannot be kept to are refused.

    Raises: GrammarError
    """
    if _depth(schema) > MAX_DEPTH:
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    text = json.dumps(schema)
    _check_size(text)
    return _checked(LLMatcher.grammar_from_json_schema(text))


def of_regex(pattern: str) -> str:
    """Texts that a regular expression matches from end to end.

    Raises: GrammarError
    """
    _check_size(pattern)
    return _checked(LLMatcher.grammar_from_regex(pattern))


def of_choice(choices: Sequence[str]) -> str:
    """One of some texts.

    Raises: GrammarError
    """
    if not choices or not all(choices):
        raise GrammarError("expected a list of texts, none of them empty")
    return of_lark("start: " + " | ".join(map(json.dumps, choices)))


def of_lark(rules: str) -> str:
    """Texts of a context-free grammar in Lark's notation, which begins with the rule ``start``.

    Raises: GrammarError
    """
    _check_size(rules)
    if "::=" in rules and "start:" not in rules:
        raise GrammarError(
            "'::=' is GBNF: write rules in Lark's notation, as in 'start: \"a\" | b'"
        )
    return _checked(LLMatcher.grammar_from_lark(rules))


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise GrammarError(f"{len(text)} characters: at most {MAX_CHARS} can be kept to")


def _checked(grammar: str) -> str:
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_wrong:
        raise GrammarError(messages[0].splitlines()[0][:300])
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError("no text satisfies it")
    return grammar


def _depth(value: object) -> int:
    """How deeply lists and mappings are nested, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for one in level for inner in _members(one)]
    return depth


def _members(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Bytes:
    """A vocabulary of all bytes: enough to see whether a grammar can begin at all."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
