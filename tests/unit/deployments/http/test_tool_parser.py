"""Tool calls: what the model is told, what it may say, and what a client reads of it."""

import asyncio
import json
from random import Random

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from triptych.core import grammar
from triptych.deployments.grammars import process_compiler
from triptych.deployments.http.openai.guided_decoding import constraint_of
from triptych.deployments.http.openai.protocol import ChatBody, validate
from triptych.deployments.http.openai.tool_parser import (
    ParsedCall,
    ToolParser,
    grammar_of,
    tools_of,
    turns_of,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
QUESTION = [{"role": "user", "content": "Is it raining?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def body(**more: object) -> ChatBody:
    return validate(ChatBody, {"messages": QUESTION, "tools": [WEATHER, TIME], **more})


def compiled(asked: ChatBody) -> str:
    constraint = constraint_of(asked)
    return asyncio.run(grammar_of(asked, tools_of(asked), process_compiler(), constraint))


def accepts(made: str, text: str) -> bool:
    matcher = LLMatcher(grammar._bytes_tokenizer(), made, log_level=0, limits=grammar.LIMITS)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# ---------------------------------------------------------------- what the answer keeps to


NO_CALL = "<tool_call>no json</tool_call>"
NAMED = {"type": "function", "function": {"name": "time"}}
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": [1]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "text", "fits"),
    [
        ("auto", "It rains.", True),
        ("auto", CALL, True),
        ("auto", f"Let me see. {CALL}\n{TIME_CALL}", True),
        ("auto", '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>', False),
        ("auto", '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>', False),
        ("required", "It rains.", False),
        ("required", CALL, True),
        ("required", f"{CALL}\n{TIME_CALL}", True),
        ("required", f"{CALL} and", False),
        (NAMED, CALL, False),
        (NAMED, TIME_CALL, True),
        (NAMED, f"{TIME_CALL}\n{TIME_CALL}", False),
    ],
)
def test_the_grammar_knows_calls_from_anything_else(choice, text: str, fits: bool) -> None:
    asked = body(tool_choice=choice)
    assert accepts(compiled(asked), text) == fits


def test_parallel_calls_can_be_ruled_out() -> None:
    asked = body(tool_choice="required", parallel_tool_calls=False)
    made = compiled(asked)
    assert accepts(made, CALL)
    assert not accepts(made, f"{CALL}\n{TIME_CALL}")


@pytest.mark.parametrize(
    ("constraint", "fits", "does_not"),
    [
        (
            {"response_format": {"type": "json_object"}},
            ['{"a": 1}', CALL, f"{CALL}\n{TIME_CALL}"],
            ["It rains.", f"It rains. {CALL}"],
        ),
        ({"guided_regex": "a/b+"}, ["a/bb", CALL], ["a", "ab"]),
        ({"guided_choice": ["yes", "no"]}, ["no", CALL], ["maybe"]),
        ({"guided_grammar": 'start: x+\nx: "ha"'}, ["haha", CALL], ["h"]),
    ],
)
def test_a_structured_answer_may_still_be_a_call(
    constraint: dict[str, object], fits: list[str], does_not: list[str]
) -> None:
    made = compiled(body(tool_choice="auto", **constraint))
    assert all(accepts(made, text) for text in fits)
    assert not any(accepts(made, text) for text in does_not)
    forced = compiled(body(tool_choice="required", **constraint))
    assert accepts(forced, CALL)
    assert not accepts(forced, fits[0])


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_an_answer_that_may_call_ends_where_its_grammar_does(client, choice, field) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tool_choice=choice, extra_body=field)
    assert caught.value.param == next(iter(field))
    assert ask(client, tool_choice="none", extra_body=field).choices[0].message.tool_calls is None


def test_parameters_that_cannot_be_kept_to_are_any_object_unless_strict() -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"if": {}, "then": {}}}}
    asked = validate(ChatBody, {"messages": QUESTION, "tools": [odd], "tool_choice": "required"})
    made = compiled(asked)
    assert accepts(made, '<tool_call>\n{"name": "odd", "arguments": {"a": 1}}\n</tool_call>')


# ---------------------------------------------------------------- what the model is told


def test_calls_and_their_results_are_written_as_the_model_knows_them() -> None:
    made = {"name": "weather", "arguments": "{}"}
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{i}", "type": "function", "function": made} for i in range(2)],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "wet"},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ]
    asked = body(messages=messages)
    system, _, calls, results = turns_of(asked.messages, asked.tools)
    assert system["content"].startswith("Be brief.\n\n# Tools")
    assert '"name": "weather"' in system["content"]
    assert calls["content"].count("<tool_call>") == 2
    assert results["role"] == "user"
    assert results["content"].count("<tool_response>") == 2


# ---------------------------------------------------------------- what the answer says


@given(
    st.lists(
        st.sampled_from(["It <is> ", CALL, TIME_CALL, "<tool_call>no json</tool_call>", "<", "\n"])
    ),
    st.integers(),
)
def test_however_an_answer_is_cut_it_says_the_same(parts: list[str], seed: int) -> None:
    text, cut = "".join(parts), Random(seed)
    names = frozenset({"weather", "time"})
    whole = list(ToolParser(names).read(text, is_last=True))
    reader, pieces = ToolParser(names), list[str | ParsedCall]()
    rest = text
    while rest:
        size = cut.randint(1, 30)
        pieces += reader.read(rest[:size], is_last=size >= len(rest))
        rest = rest[size:]
    assert output_tokens(pieces) == output_tokens(whole)
    assert sum(isinstance(one, ParsedCall) for one in whole) == parts.count(CALL) + parts.count(
        TIME_CALL
    )


def output_tokens(pieces: list[str | ParsedCall]) -> tuple[str, list[tuple[str, str]]]:
    texts = [one for one in pieces if isinstance(one, str)]
    return "".join(texts), [
        (one.name, one.arguments) for one in pieces if isinstance(one, ParsedCall)
    ]


@pytest.fixture
def client(server, engine):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **more: object):
    wanted = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER, TIME], "max_tokens": 300}
    return client.chat.completions.create(**wanted, **more)


def test_the_client_gets_calls(client, engine) -> None:
    engine.script = f"I look. {CALL}\n{TIME_CALL}"
    answer = ask(client)
    ChatCompletion.model_validate(answer.model_dump())
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "time"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Ulm"}
    assert "<tool_call>" in engine.calls[0][0].sampling.grammar


def test_a_stream_says_the_same(client, engine) -> None:
    engine.script = f"I look. {CALL}\n{TIME_CALL}"
    chunks = list(ask(client, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "time")]
    assert "".join(delta.content or "" for delta in deltas).strip() == "I look."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_such_a_text_is_text(client, engine) -> None:
    engine.script = CALL
    for more in ({"tools": openai.omit}, {"tool_choice": "none"}):
        answer = client.chat.completions.create(
            **{"model": "tiny", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 300, **more}
        )
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
        assert engine.calls[-1][0].sampling.grammar == ""
