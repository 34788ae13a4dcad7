"""Grammars of a client: what is made of them, and that none of them costs much."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from triptych.core import grammar
from triptych.core.errors import GrammarError
from triptych.core.grammar import LIMITS, MAX_CHARS

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def accepts(made: str, text: str) -> bool:
    tokenizer: LLTokenizer = grammar._bytes_tokenizer()
    matcher = LLMatcher(tokenizer, made, log_level=0, limits=LIMITS)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("made", "good", "bad"),
    [
        (grammar.from_json_schema(PERSON), '{"name": "Ada", "age": 36}', '{"name": "Ada"}'),
        (grammar.from_json_schema({"type": "object"}), '{"a": [1, {}]}', "[1]"),
        (grammar.from_json_schema({"enum": ["rot", "grün", 3]}), '"grün"', '"blau"'),
        (grammar.from_regex("[0-9]{3}-[a-z]+"), "123-abc", "123-"),
        (grammar.from_regex("(a+)+b"), "aaab", "aaa"),
        (grammar.from_choices(["yes", 'a "quoted"\nno']), 'a "quoted"\nno', "maybe"),
        (grammar.from_lark('start: "(" start ")" | "x"'), "((x))", "((x)"),
    ],
)
def test_what_is_made_accepts_just_what_was_asked_for(made: str, good: str, bad: str) -> None:
    assert accepts(made, good)
    assert not accepts(made, bad)


@pytest.mark.parametrize(
    ("make", "wanted", "why"),
    [
        (grammar.from_json_schema, nested(20_000), "nested more than 32"),
        (grammar.from_json_schema, {"enum": [f"v{i}" for i in range(100_000)]}, "at most"),
        (grammar.from_json_schema, {"$ref": "http://169.254.169.254/latest"}, "does not fetch"),
        (grammar.from_json_schema, {"$ref": "#"}, "no text satisfies"),
        (grammar.from_json_schema, {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        (grammar.from_json_schema, {"type": "wat"}, "wat"),
        (grammar.from_json_schema, {"if": {}, "then": {}}, "if"),
        (
            grammar.from_json_schema,
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {}}} for i in range(10)]}
                    for j in range(10)
                ]
            },
            "too large",
        ),
        (grammar.from_regex, "(", "regex"),
        (grammar.from_regex, "(?=a)b", "regex"),
        (grammar.from_regex, "a" * (MAX_CHARS + 1), "at most"),
        (grammar.from_choices, [], "none of them empty"),
        (grammar.from_choices, ["a", ""], "none of them empty"),
        (grammar.from_lark, "start: nope", "nope"),
        (grammar.from_lark, 'root ::= "a"', "Lark's notation"),
        (grammar.from_lark, "start: start", "no text satisfies"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(make, wanted: object, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        make(wanted)


@pytest.mark.parametrize(
    "pattern", ["a{1,999999999}", "((((a{1,99}){1,99}){1,99}){1,99})", "(.*a){30}"]
)
def test_patterns_made_to_cost_much_do_not(pattern: str) -> None:
    made = grammar.from_regex(pattern)
    matcher = LLMatcher(grammar._bytes_tokenizer(), made, log_level=0, limits=LIMITS)
    for byte in b"a" * 2_000:
        matcher.compute_bitmask()
        if not matcher.consume_token(byte):
            break
    assert len(json.dumps(made)) < 1_000
