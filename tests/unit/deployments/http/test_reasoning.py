"""Chats of models that reason, and call tools in the form of their own template."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.unit.deployments.http.conftest import (
    MODEL,
    FakeEngine,
    make_engine,
    make_tokenizer,
    serve_app,
)
from tests.unit.deployments.http.test_tool_parser import (
    CALL,
    QUESTION,
    TIME,
    WEATHER,
    accepts,
    body,
    compiled,
)
from triptych.core.errors import ConfigError
from triptych.deployments.grammars import process_compiler
from triptych.deployments.http.openai.chat_template import ChatTemplate
from triptych.deployments.http.openai.guided_decoding import constraint_of
from triptych.deployments.http.openai.reasoning_parser import ReasoningParser, Thinking
from triptych.deployments.http.openai.tool_parser import (
    CallParser,
    ParsedCall,
    ToolFormat,
    call_parser,
    grammar_of,
    tools_of,
)
from triptych.workers.models.tokenizer import from_json, read_chat_template, to_json

TEMPLATE = r"""{%- if tools %}<|im_start|>system
These are the tools:
{%- for tool in tools %}{{ "\n" }}{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}
<think>{{ message.reasoning_content }}</think>
{%- endif %}{{ "\n" }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif style == "deep" %}<think>
{% endif %}{% endif %}"""
OUTPUT = f"<think>\nIs it wet?\nYes.\n</think>\n\n{CALL}"
CHAT = "/v1/chat/completions"


def make_reasoner() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def reasoner() -> PreTrainedTokenizerFast:
    return make_reasoner()


@pytest.fixture(scope="module")
def own_engine(reasoner: PreTrainedTokenizerFast) -> FakeEngine:
    return make_engine(reasoner)


@pytest.fixture(scope="module")
def own_http(reasoner: PreTrainedTokenizerFast, own_engine: FakeEngine) -> Iterator[httpx.Client]:
    with serve_app(reasoner, own_engine) as server, httpx.Client(base_url=server.url) as http:
        yield http


@pytest.fixture(scope="module")
def own_client(own_http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{own_http.base_url}/v1", api_key="none", max_retries=0)


# ---------------------------------------------------------------- the prompt


def prompt_of(
    http: httpx.Client, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, **body: object
) -> str:
    answer = http.post(CHAT, json={"messages": QUESTION, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return tokenizer.decode(engine.calls[-1][0].prompt)


def test_the_template_lists_tools_and_writes_calls_and_results(
    own_http, own_engine, reasoner
) -> None:
    arguments = {"city": "Ulm <|im_end|>"}
    call = {"id": "a", "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(arguments)}}  # fmt: skip
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "It rains."},
    ]
    text = prompt_of(own_http, own_engine, reasoner, messages=messages, tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nThese are the tools:\n{")
    assert '"description": "How it is outside"' in text
    assert "<think>Hm.</think>" in text
    assert f'{{"name": "weather", "arguments": {json.dumps(arguments)}}}' in text
    assert "<|im_start|>tool\nIt rains.<|im_end|>" in text
    assert "# Tools" not in text
    # The name of a special token in an argument is text.
    ids = list(own_engine.calls[-1][0].prompt)
    assert ids.count(reasoner.convert_tokens_to_ids("<|im_end|>")) == text.count("<|im_end|>") - 1


def test_tokenize_renders_tools_as_a_chat_does(own_http, own_engine, reasoner) -> None:
    prompt_of(own_http, own_engine, reasoner, tools=[WEATHER])
    told = own_http.post("/tokenize", json={"messages": QUESTION, "tools": [WEATHER]}).json()
    assert told["tokens"] == list(own_engine.calls[-1][0].prompt)


def test_a_template_without_tools_is_told_of_them_in_text() -> None:
    assert ChatTemplate(make_reasoner()).tool_format is ToolFormat.TAGS
    assert ChatTemplate(make_tokenizer()).tool_format is None


def test_a_template_of_a_multimodal_model_gets_parts() -> None:
    tokenizer = make_tokenizer()
    assert not ChatTemplate(tokenizer).takes_parts
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    engine = make_engine(tokenizer)
    with serve_app(tokenizer, engine) as server, httpx.Client(base_url=server.url) as http:
        assert prompt_of(http, engine, tokenizer) == QUESTION[0]["content"]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "assistant\n"),
        ({"chat_template_kwargs": {"style": "deep"}}, "assistant\n<think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\n"),
        ({"reasoning_effort": "none"}, "</think>\n\n"),
        ({"reasoning_effort": "high"}, "assistant\n"),
    ],
)
def test_variables_are_those_of_the_template(own_http, own_engine, reasoner, fields, end) -> None:
    assert prompt_of(own_http, own_engine, reasoner, **fields).endswith(end)


def test_words_and_variables_of_a_loop_are_no_variables(reasoner) -> None:
    assert ChatTemplate(reasoner).variables == {"enable_thinking", "style"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs.tone"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(own_http, fields, param) -> None:
    answer = own_http.post(CHAT, json={"messages": QUESTION, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_fields_that_change_nothing_are_let_be(own_http, own_engine, reasoner) -> None:
    more = {
        "use_beam_search": False,
        "bad_words": [],
        "user": "ada",
        "store": True,
        "documents": [],
    }
    assert prompt_of(own_http, own_engine, reasoner, **more)


# ---------------------------------------------------------------- the answer


def test_reasoning_text_and_calls_are_separate(own_client, own_engine) -> None:
    own_engine.script = OUTPUT
    asked = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 500}
    whole = own_client.chat.completions.create(**asked).choices[0]
    assert whole.message.reasoning_content == "Is it wet?\nYes."
    assert whole.message.content is None
    assert [call.function.name for call in whole.message.tool_calls] == ["weather"]
    assert whole.finish_reason == "tool_calls"
    reasoning, content, calls = "", "", []
    for chunk in own_client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        calls += delta.tool_calls or []
    assert (reasoning, content) == ("Is it wet?\nYes.", "")
    assert [call.function.arguments for call in calls] == ['{"city": "Ulm"}']
    hidden = own_client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.choices[0].message.tool_calls


def test_an_answer_that_ends_while_it_reasons_has_no_content(own_client, own_engine) -> None:
    own_engine.script = OUTPUT
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 18}
    found = own_client.chat.completions.create(**asked).choices[0]
    assert (found.message.content, found.finish_reason) == (None, "length")
    assert found.message.reasoning_content == "Is it wet?"


PARTS = ["<think>", "</think>", "<thin", "\n", " ", "a", "<", "think>", "<tool_call>"]


@pytest.mark.parametrize("thinking", Thinking)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), cuts=st.lists(st.integers(1, 7)))
def test_any_split_gives_the_same_texts(
    thinking: Thinking, parts: list[str], cuts: list[int]
) -> None:
    output = "".join(parts)
    whole = ReasoningParser(thinking).read(output, finish="stop")
    parser, pieces, rest = ReasoningParser(thinking), list[tuple[str, str]](), output
    for cut in cuts:
        pieces.append(parser.read(rest[:cut]))
        rest = rest[cut:]
    pieces.append(parser.read(rest, finish="stop"))
    assert ("".join(r for r, _ in pieces), "".join(t for _, t in pieces)) == whole


@pytest.mark.parametrize(
    ("thinking", "output", "expected"),
    [
        (Thinking.NO, "<think>a</think>b", ("", "<think>a</think>b")),
        (Thinking.MAYBE, "a <think>b</think>", ("", "a <think>b</think>")),
        (Thinking.MAYBE, "\n<think>\na\n</think>\n\nb\n", ("a", "b\n")),
        (Thinking.OPEN, "a\n</think>\n\nb", ("a", "b")),
        (Thinking.OPEN, "a </thi", ("a </thi", "")),
    ],
)
def test_reasoning_is_between_the_tags(thinking, output, expected) -> None:
    assert ReasoningParser(thinking).read(output, finish="stop") == expected


# ---------------------------------------------------------------- calls as Llama 3 writes them

LLAMA_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "user" and tools and loop.first %}<|im_start|>user
Respond with {"name": function name, "parameters": its arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ message.content }}<|im_end|>
{%- elif message.tool_calls %}<|im_start|>assistant
{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}{% endfor %}"""
OBJECT_CALL = '{"name": "weather", "parameters": {"city": "Ulm"}}'


def object_parser() -> CallParser:
    return call_parser(frozenset(["weather", "time"]), ToolFormat.OBJECT, calls_first=False)


def test_the_whole_output_is_a_call_where_the_template_writes_so() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = LLAMA_TEMPLATE
    assert ChatTemplate(tokenizer).tool_format is ToolFormat.OBJECT
    engine = make_engine(tokenizer)
    engine.script = OBJECT_CALL
    with serve_app(tokenizer, engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 200}
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Ulm"}'
        assert "# Tools" not in tokenizer.decode(engine.calls[-1][0].prompt)
        engine.script = '{"rain": true}'
        choice = client.chat.completions.create(**asked).choices[0]
        assert (choice.message.content, choice.finish_reason) == ('{"rain": true}', "stop")


@pytest.mark.parametrize(
    ("fields", "fits", "does_not"),
    [
        ({"tool_choice": "required"}, [OBJECT_CALL], ["It rains.", CALL, f"{OBJECT_CALL} a"]),
        (
            {"tool_choice": "auto"},
            [OBJECT_CALL, "It rains.", "\n It {rains}.", ""],
            ['{"name": "rain"}', "{", " {"],
        ),
        ({"tool_choice": "auto", **{"guided_choice": ["no"]}}, [OBJECT_CALL, "no"], ["yes"]),
    ],
)
def test_objects_keep_to_the_parameters(fields, fits, does_not) -> None:
    made = compiled(body(**fields), ToolFormat.OBJECT)
    assert all(accepts(made, text) for text in fits)
    assert not any(accepts(made, text) for text in does_not)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_cut_object_leaves_no_markup(size: int) -> None:
    for end in range(len(OBJECT_CALL) + 1):
        parser, found = object_parser(), list[object]()
        text = OBJECT_CALL[:end]
        for at in range(0, max(end, 1), size):
            is_last = at + size >= end
            found += parser.read(text[at : at + size], finish="length" if is_last else None)
        is_whole = end == len(OBJECT_CALL)
        assert [isinstance(one, ParsedCall) for one in found] == [True] * is_whole
        assert (parser.calls, parser.is_cut) == (int(is_whole), 0 < end < len(OBJECT_CALL))


def test_other_objects_and_texts_are_text() -> None:
    for text in ("It rains.", '{"rain": true}', '{"name": "rain", "parameters": {}}', "  ", "{"):
        parser = object_parser()
        found = [*parser.read(text[:2]), *parser.read(text[2:], finish="stop")]
        assert "".join(map(str, found)) == text
        assert (parser.calls, parser.is_cut) == (0, False)


# ---------------------------------------------------------------- grammars after reasoning


JSON_ANSWER = {"response_format": {"type": "json_object"}}
THOUGHT = 'Is "it"\n[1, {2}? </thin'


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "auto", **JSON_ANSWER},
        {"tool_choice": "auto"},
    ],
)
def test_calls_come_after_reasoning(fields) -> None:
    asked = body(**fields)
    constraint = constraint_of(asked)

    def compiled(thinking: Thinking) -> str:
        work = grammar_of(asked, tools_of(asked), process_compiler(), constraint, thinking)
        return asyncio.run(work)

    maybe, opened = compiled(Thinking.MAYBE), compiled(Thinking.OPEN)
    assert accepts(maybe, CALL)
    assert accepts(maybe, f"<think>{THOUGHT}</think>\n\n{CALL}")
    assert accepts(opened, f"{THOUGHT}</think>\n\n{CALL}")
    assert not accepts(opened, CALL)
    if fields != {"tool_choice": "auto"}:
        assert not accepts(maybe, f"<think>{THOUGHT}</think>\n\nIt rains.")
        assert not accepts(opened, f"{THOUGHT}</think>\n\nIt rains.")


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (JSON_ANSWER, '{"a": 1}'),
        ({"guided_regex": "a/b+"}, "a/bb"),
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_grammar": 'start: x+\nx: "ha"'}, "haha"),
    ],
)
def test_structured_answers_come_after_reasoning(fields, answer) -> None:
    constraint = constraint_of(body(tools=[], **fields))
    assert constraint is not None

    def compiled(thinking: Thinking) -> str:
        return asyncio.run(constraint.grammar(process_compiler(), thinking))

    assert accepts(compiled(Thinking.NO), answer)
    assert accepts(compiled(Thinking.MAYBE), answer)
    for begin, thinking in (("<think>", Thinking.MAYBE), ("", Thinking.OPEN)):
        assert accepts(compiled(thinking), f"{begin}{THOUGHT}</think>\n\n{answer}")
        assert not accepts(compiled(thinking), f"{begin}{THOUGHT}</think>\n\n{answer} or")
        assert not accepts(compiled(thinking), f"{begin}{THOUGHT}")


# ---------------------------------------------------------------- templates of operators


def test_an_operators_template_is_read_and_checked(tmp_path: Path) -> None:
    assert read_chat_template("") == ""
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_chat_template(str(file)) == file.read_text()
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"model.chat_template=.*own.jinja"):
        read_chat_template(str(file))
    with pytest.raises(ConfigError, match=r"model.chat_template=.*none.jinja"):
        read_chat_template(str(tmp_path / "none.jinja"))


def test_a_template_for_tools_alone_is_used_with_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {
        "default": "plain",
        "tool_use": "tools: {{ tools[0].function.name }}",
    }
    read = from_json(to_json(tokenizer))
    assert read.apply_chat_template([]) == "plain"
    assert read.apply_chat_template([], tools=[TIME]) == "tools: time"
