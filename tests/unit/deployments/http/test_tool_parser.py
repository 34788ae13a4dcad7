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
from triptych.core.errors import DeadlineExceeded
from triptych.deployments.grammars import process_compiler
from triptych.deployments.http.openai.guided_decoding import constraint_of
from triptych.deployments.http.openai.protocol import ChatBody, validate
from triptych.deployments.http.openai.tool_parser import (
    ParsedCall,
    ToolFormat,
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


def compiled(asked: ChatBody, form: ToolFormat = ToolFormat.TAGS) -> str:
    given = (asked, tools_of(asked), process_compiler(), constraint_of(asked))
    return asyncio.run(grammar_of(*given, form=form))


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


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parallel_calls_can_be_ruled_out(choice: str) -> None:
    made = compiled(body(tool_choice=choice, parallel_tool_calls=False))
    assert accepts(made, CALL)
    for second in (TIME_CALL, NO_CALL):
        assert not accepts(made, f"{CALL}\n{second}")
        assert not accepts(made, f"{CALL} and {second}")
    assert accepts(made, f"I look. {CALL}") == accepts(made, "It rains.") == (choice == "auto")


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
def test_an_answer_that_may_call_has_no_minimum_length(client, choice) -> None:
    field = {"min_tokens": 1}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tool_choice=choice, extra_body=field)
    assert caught.value.param == "min_tokens"
    assert ask(client, tool_choice="none", extra_body=field).choices[0].message.tool_calls is None


def test_parameters_that_cannot_be_kept_to_are_any_object_unless_strict() -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"if": {}, "then": {}}}}
    asked = validate(ChatBody, {"messages": QUESTION, "tools": [odd], "tool_choice": "required"})
    made = compiled(asked)
    assert accepts(made, '<tool_call>\n{"name": "odd", "arguments": {"a": 1}}\n</tool_call>')


def test_arguments_have_no_other_names_than_the_parameters(client, engine) -> None:
    """Many frameworks leave ``additionalProperties`` out, and would pass any name on."""
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"at": inner, "all": {"items": inner}}}

    def fits(arguments: str, **more: object) -> bool:
        function = {"name": "f", "parameters": {**parameters, **more}}
        tools = [{"type": "function", "function": function}]
        ask(client, tools=tools, tool_choice="required", max_tokens=1)
        call = f'{{"name": "f", "arguments": {arguments}}}'
        made = engine.calls[-1][0].sampling.grammar
        return accepts(made, f"<tool_call>\n{call}\n</tool_call>")

    assert fits('{"at": {"x": 1}, "all": [{"x": 2}]}')
    for wrong in ('{"y": 1}', '{"at": {"y": 1}}', '{"all": [{"y": 1}]}'):
        assert not fits(wrong)
    assert fits('{"y": 1}', additionalProperties=True)
    assert fits('{"y": 1}', allOf=[{"properties": {"y": {"type": "integer"}}}])
    assert fits('{"y": 1}', required=["y"])
    assert fits("{}", properties={})
    assert not fits('{"y": 1}', properties={})


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


def history(call: dict[str, object], *results: dict[str, object]) -> list[dict[str, object]]:
    return [*QUESTION, {"role": "assistant", **call}, *results]


def called(**function: object) -> dict[str, object]:
    function = {"name": "time", **function}
    return {"content": None, "tool_calls": [{"id": "c0", "type": "function", "function": function}]}


ANSWER = {"role": "tool", "tool_call_id": "c0", "content": "wet"}
NO_ARGUMENTS = [{"arguments": ""}, {"arguments": "null"}, {"arguments": " \n"}, {}]


@pytest.mark.parametrize("arguments", [*NO_ARGUMENTS, {"arguments": None}, {"arguments": {}}])
def test_a_call_without_arguments_has_an_empty_object(client, engine, arguments) -> None:
    ask(client, messages=history(called(**arguments), ANSWER), max_tokens=1)
    turns = turns_of(body(messages=history(called(**arguments), ANSWER)).messages, ())
    assert turns[1]["content"] == '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def test_arguments_may_be_an_object() -> None:
    sent = history(called(arguments={"zone": ["Köln", 1]}), ANSWER)
    turns = turns_of(body(messages=sent).messages, ())
    assert '"arguments": {"zone": ["Köln", 1]}}' in turns[1]["content"]


@pytest.mark.parametrize("arguments", ['{"a": ', "{", "[1]", "1", '"{}"', "nul", [1], 1, True])
def test_arguments_that_are_no_object_are_refused_by_name(client, engine, arguments) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=history(called(arguments=arguments), ANSWER))
    assert caught.value.param == "messages.1.tool_calls.0.function.arguments"


EMPTY = [{"content": None}, {}, {"content": None, "tool_calls": []}, {"content": ""}]
LEGACY = {"content": None, "function_call": {"name": "time", "arguments": ""}}


@pytest.mark.parametrize("message", EMPTY)
def test_an_assistant_without_content_is_empty(client, engine, message) -> None:
    sent = [*history(message), {"role": "user", "content": "Well?"}]
    ask(client, messages=sent, max_tokens=1)
    assert turns_of(body(messages=sent).messages, ())[1]["content"] == ""


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (called(), {**ANSWER, "content": None}),
        (called(), {"role": "tool", "tool_call_id": "c0"}),
        (called(), {"role": "tool", "content": "wet"}),
        (called(), {**ANSWER, "tool_call_id": ""}),
        ({"tool_calls": [{"id": "", "function": {"name": "time"}}]}, ANSWER),
        ({"tool_calls": [{"function": {"name": "time"}}]}, {"role": "tool", "content": ""}),
        (LEGACY, {"role": "function", "name": "time", "content": "wet"}),
        (LEGACY, {"role": "function", "name": "time", "content": None}),
    ],
)
def test_results_of_any_client_belong_to_the_call_before(client, engine, call, result) -> None:
    sent = history(call, result)
    ask(client, messages=sent, max_tokens=1)
    _, calls, results = turns_of(body(messages=sent).messages, ())
    assert '{"name": "time", "arguments": {}}' in calls["content"]
    text = result.get("content") or ""
    assert results["content"] == f"<tool_response>\n{text}\n</tool_response>"


@pytest.mark.parametrize("result", [ANSWER, {**ANSWER, "tool_call_id": ""}])
def test_a_result_without_a_call_is_refused(client, engine, result) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[*QUESTION, result])
    assert caught.value.param == "messages.1.tool_call_id"


# ---------------------------------------------------------------- what the answer says


NAMES = frozenset({"weather", "time"})
TAGGED = (
    '<tool_call>\n{"name": "time", "arguments": {"a": "\\\\\\"</tool_call>{<tool_call>", "b": 2}}\n'
    "</tool_call>"
)
PARTS = ["It <is> ", CALL, TIME_CALL, TAGGED, NO_CALL, "<", "\n", "<tool_", "</tool_call>"]


def parse(pieces: list[str], finish: str = "stop") -> tuple[str, list[tuple[str, str]], bool]:
    """The text, the calls and whether the output ends inside a call."""
    parser, parsed = ToolParser(NAMES), list[str | ParsedCall]()
    for index, piece in enumerate(pieces, 1):
        parsed += parser.read(piece, finish=finish if index == len(pieces) else None)
    calls = [(one.name, one.arguments) for one in parsed if isinstance(one, ParsedCall)]
    assert parser.calls == len(calls)
    return "".join(one for one in parsed if isinstance(one, str)), calls, parser.is_cut


def split(text: str, seed: int) -> list[str]:
    cut, pieces = Random(seed), list[str]()
    while text:
        size = cut.choice([1, 1, 2, 3, 30])
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, ""]


@given(
    st.lists(st.sampled_from(PARTS)),
    st.integers(min_value=0),
    st.sampled_from(["stop", "length"]),
    st.integers(),
)
def test_any_split_and_any_ending_give_the_same_text_and_calls(
    parts: list[str], end: int, finish: str, seed: int
) -> None:
    text = "".join(parts)
    text = text[: end % (len(text) + 1)]
    text_alone, calls, is_cut = parse([text], finish)
    assert parse(split(text, seed), finish) == (text_alone, calls, is_cut)
    assert "<tool_call>" not in text_alone
    whole = [call for call in (CALL, TIME_CALL, TAGGED) for _ in range(text.count(call))]
    assert len(calls) == len(whole)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("end", range(1, len(CALL)))
@pytest.mark.parametrize("before", ["", "I look.", f"{TIME_CALL}\n", f"I look. {TIME_CALL} "])
def test_a_cut_call_leaves_no_markup(before: str, end: int) -> None:
    text, calls, is_cut = parse([before + CALL[:end]], "length")
    assert text in ("", "I look.")
    assert len(calls) == before.count(TIME_CALL)
    assert is_cut


def test_a_closing_tag_in_a_string_does_not_end_the_call() -> None:
    text, calls, is_cut = parse([f"a {TAGGED} b"])
    assert (text, is_cut) == ("a  b", False)
    assert json.loads(calls[0][1]) == {"a": '\\"</tool_call>{<tool_call>', "b": 2}


@pytest.mark.parametrize("value", ["1" * 5000, '"\\ud800"', "1e400"])
def test_arguments_keep_the_text_of_the_model(value: str) -> None:
    arguments = f'{{"a": {value}}}'
    _, calls, _ = parse(
        [f'<tool_call>\n{{"name": "time", "arguments": {arguments}}}\n</tool_call>']
    )
    assert calls == [("time", arguments)]


@pytest.fixture
def client(server, engine):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **more: object):
    wanted = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER, TIME], "max_tokens": 300}
    return client.chat.completions.create(**wanted | more)


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


ENDINGS = [10, 30, len(CALL) - 1, len(CALL) + 1, len(CALL) + 12, 2 * len(CALL) - 1]


@pytest.mark.parametrize("max_tokens", ENDINGS)
def test_an_answer_that_length_cuts_inside_a_call_has_finish_length(
    client, engine, max_tokens: int
) -> None:
    engine.script = f"{CALL}\n{CALL}"
    choice = ask(client, max_tokens=max_tokens, tool_choice="required").choices[0]
    chunks = list(ask(client, max_tokens=max_tokens, tool_choice="required", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call.function.arguments for call in choice.message.tool_calls or []]
    assert calls == ['{"city": "Ulm"}'] * (max_tokens // len(CALL))
    assert [c.function.arguments for d in deltas for c in d.tool_calls or []] == calls
    assert not choice.message.content
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length"


def test_a_call_that_a_stop_token_cuts_has_finish_length(client, engine) -> None:
    """Stop strings are not matched in a call; a stop token ends it wherever it comes."""
    engine.script, engine.stop_at = CALL, 20
    choice = ask(client).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == ""
    assert engine.calls[0][0].sampling.tool_calls


@pytest.mark.parametrize("cut", [12, 30, len(CALL) + 20])
def test_an_error_inside_a_call_shows_no_markup(client, engine, cut: int) -> None:
    """As a deadline, a lost worker and a cancel end a stream."""
    engine.script, engine.fail_after = f"{CALL}\n{CALL}", cut
    engine.crash = DeadlineExceeded("not finished")
    choices = []
    with pytest.raises(openai.APIError, match="not finished"):
        choices.extend(chunk.choices[0] for chunk in ask(client, stream=True))
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert choices
    assert not any(choice.delta.content or choice.finish_reason for choice in choices)
    assert [call.function.arguments for call in calls] == ['{"city": "Ulm"}'] * (cut > len(CALL))


JSON_ANSWERS = [
    json.dumps({"a": f"Write {CALL}", "b": "<tool_call>"}),
    json.dumps({"<tool_call>": f"{TIME_CALL}\n{CALL}"}, indent=1),
    '{"a": "</tool_call><tool_call>"}',
    '{"a": "<tool_call',
]


@pytest.mark.parametrize("text", JSON_ANSWERS)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_markup_in_a_constrained_answer_is_text(text: str, finish: str) -> None:
    """Its grammar allows a call at the beginning only."""
    for seed in range(20):
        parser, parsed = ToolParser(NAMES, calls_first=True), list[str | ParsedCall]()
        for piece in split(text, seed):
            parsed += parser.read(piece, finish=None if piece else finish)
        assert "".join(map(str, parsed)) == text
        assert (parser.calls, parser.is_cut) == (0, False)


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMATS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"extra_body": {"guided_regex": ".*"}},
]


@pytest.mark.parametrize("text", JSON_ANSWERS)
@pytest.mark.parametrize("wanted", FORMATS)
def test_a_json_answer_beside_tools_may_hold_markup(client, engine, text: str, wanted) -> None:
    engine.script = text
    choice = ask(client, **wanted).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **wanted)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text
    assert not any(chunk.delta.tool_calls for chunk in chunks)
    assert choice.finish_reason == chunks[-1].finish_reason == "stop"
    assert engine.calls[0][0].sampling.tool_calls_first


@pytest.mark.parametrize("wanted", [*FORMATS, {"tool_choice": "required"}, {}])
def test_a_call_beside_a_response_format_is_a_call(client, engine, wanted) -> None:
    engine.script = f"{CALL}\n{TAGGED}"
    choice = ask(client, **wanted).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "time"]
    assert engine.calls[0][0].sampling.tool_calls_first == bool(wanted)


def test_without_tools_such_a_text_is_text(client, engine) -> None:
    engine.script = CALL
    for more in ({"tools": openai.omit}, {"tool_choice": "none"}):
        answer = client.chat.completions.create(
            **{"model": "tiny", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 300, **more}
        )
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
        assert engine.calls[-1][0].sampling.grammar == ""
