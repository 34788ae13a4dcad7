# llguidance has type hints for its classes, but not for what its tokenizers are made of.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Grammars for structured output: built from a schema, regex, choices or rules.

A grammar is a text that llguidance parses; it contains no code. ``LIMITS`` bounds the cost of
every step, but not that of compiling: the ingress compiles in a child process with limits
(``triptych.deployments.grammars``), and workers compile only what has passed it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

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
"""At most about 7 ms for a step, and 40 MB of memory."""

JSON_WHITESPACE = r"[ \n\r\t]{0,32}"
"""White space between two tokens of JSON. Without a bound, a model can fill its answer with it."""

OPEN_KEYWORDS = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("propertyNames", "minProperties", "dependentSchemas", "dependentRequired"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref"),
    }
)
"""Keywords that say what else an object may have, or that combine schemas."""

SourceKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A client's schema, regular expression, choices or rules, before it is compiled.

    Raises: GrammarError if it is too long
    """

    kind: SourceKind
    text: str
    """A regular expression, Lark rules, or JSON: a schema, or a list of texts."""

    def __post_init__(self) -> None:
        _check_size(self.text)


def compile_source(source: GrammarSource) -> str:
    """The grammar of a source, checked. It can take any time, memory and stack.

    Raises: GrammarError
    """
    match source.kind:
        case "json_schema":
            return from_json_schema(json.loads(source.text))
        case "regex":
            return from_regex(source.text)
        case "choice":
            return from_choices(json.loads(source.text))
        case "lark":
            return from_lark(source.text)


def schema_source(schema: Mapping[str, object] | bool) -> GrammarSource:
    """The source of JSON texts that a schema allows.

    Raises: GrammarError if it is too long or nested too deeply
    """
    if _depth(schema) > MAX_DEPTH:
        raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    return GrammarSource("json_schema", json.dumps(schema))


def bounded_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """A schema whose texts have bounded white space, unless it says itself how much they have.

    Objects have the properties that it names and no others, unless it allows others: a small model
    would write more and more of them. vLLM and SGLang do the same (xgrammar's ``strict_mode``).
    """
    return {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **_closed(schema)}


def _closed(schema: Any) -> Any:
    """A schema without unnamed properties where that cannot contradict another part of it."""
    if not isinstance(schema, Mapping):
        return schema
    given = dict(cast("Mapping[str, Any]", schema))
    if given.keys() & OPEN_KEYWORDS:
        return given
    if isinstance(named := given.get("properties"), Mapping):
        given["properties"] = {
            name: _closed(one) for name, one in cast("Mapping[str, Any]", named).items()
        }
        required = given.get("required")
        if not isinstance(required, list) or all(name in named for name in required):
            given["additionalProperties"] = False
    return given | ({"items": _closed(given["items"])} if "items" in given else {})


def from_json_schema(schema: Mapping[str, object] | bool) -> str:
    """The grammar of JSON texts that a JSON schema allows; unsupported keywords are an error.

    Raises: GrammarError
    """
    schema_source(schema)
    bounded = bounded_schema(schema) if isinstance(schema, Mapping) else schema
    return _checked(LLMatcher.grammar_from_json_schema(json.dumps(bounded)))


def from_regex(pattern: str) -> str:
    """The grammar of texts that a regular expression matches from start to end.

    Raises: GrammarError
    """
    _check_size(pattern)
    return _checked(LLMatcher.grammar_from_regex(pattern))


def from_choices(choices: Sequence[str]) -> str:
    """The grammar that allows exactly the texts given.

    Raises: GrammarError
    """
    if not choices or not all(choices):
        raise GrammarError("expected a list of texts, none of them empty")
    return from_lark("start: " + " | ".join(map(json.dumps, choices)))


def from_lark(rules: str) -> str:
    """The grammar of Lark rules, whose first rule is ``start``.

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
    """A tokenizer whose vocabulary is all bytes; it shows whether any text satisfies a grammar."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
