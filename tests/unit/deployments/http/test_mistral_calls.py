# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false
"""Tool calls in the two formats of Mistral, both behind a special token and with short ids."""

import re
from contextlib import contextmanager

import openai
import pytest

from tests.unit.deployments.http.conftest import MODEL, make_engine, make_tokenizer, serve_app
from tests.unit.deployments.http.test_tool_parser import (
    QUESTION,
    TIME,
    WEATHER,
    accepts,
    body,
    compiled,
)
from triptych.deployments.http.openai.chat_template import ChatTemplate
from triptych.deployments.http.openai.named_calls import calls_in
from triptych.deployments.http.openai.tool_parser import (
    ToolFormat,
    call_parser,
)

MISTRAL_TEMPLATE = """{% set asked = messages[-1] %}{% for message in messages %}
{%- if message.role == "user" %}
{%- if tools and message == asked %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}{% set out = call.function | tojson %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{{- out[:-1] }}, "id": "{{ call.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("nine letters") }}{% endif -%}
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}
{%- else %} {{ message.content }}{% endif %}{% endfor %}"""
ARRAY_CALL = '[{"name": "weather", "arguments": {"city": "Ulm"}}]'
TWO_CALLS = (
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}, '
    '{"name": "time", "arguments": {}}]'
)


ASKED = {"model": MODEL, "tools": [WEATHER, TIME], "max_tokens": 200}


@contextmanager
def served(template: str, form: ToolFormat):
    """A client, the engine and the tokenizer of a server with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert ChatTemplate(tokenizer).tool_format is form
    engine = make_engine(tokenizer)
    with serve_app(tokenizer, engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        yield client, engine, tokenizer


def test_calls_are_an_array_where_the_template_writes_so() -> None:
    with served(MISTRAL_TEMPLATE, ToolFormat.ARRAY) as (client, engine, tokenizer):
        engine.script = TWO_CALLS
        choice = client.chat.completions.create(messages=QUESTION, **ASKED).choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "time"]
        assert all(re.fullmatch("[0-9a-z]{9}", call.id) for call in calls)
        engine.script = "It rains."
        foreign = {**calls[0].model_dump(), "id": "call_of_another_server"}
        answered = [
            *QUESTION,
            {"role": "assistant", "tool_calls": [foreign]},
            {"role": "tool", "tool_call_id": foreign["id"], "content": "rain"},
        ]
        choice = client.chat.completions.create(messages=answered, **ASKED).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
        prompt = tokenizer.decode(engine.calls[-1][0].prompt)
        (call_id,) = set(re.findall('id": "([^"]*)"', prompt))
        assert len(call_id) == 9


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "names"),
    [
        (ARRAY_CALL, ["weather"]),
        (TWO_CALLS, ["weather", "time"]),
        ('[{"name": "rain", "arguments": {}}]', []),
        ("[1] is a list.", []),
    ],
)
def test_an_array_is_calls_or_text_however_it_is_cut(
    text: str, names: list[str], pieces: int
) -> None:
    parser = call_parser(frozenset(["weather", "time"]), ToolFormat.ARRAY, calls_first=False)
    found = list[object]()
    for start in range(0, len(text), pieces):
        found += parser.read(text[start : start + pieces])
    found += parser.read("", finish="stop")
    assert [one.name for one in found if not isinstance(one, str)] == names
    assert "".join(one for one in found if isinstance(one, str)) == ("" if names else text)
    assert parser.calls == len(names)


def test_an_array_that_is_cut_off_is_no_text() -> None:
    parser = call_parser(frozenset(["weather"]), ToolFormat.ARRAY, calls_first=False)
    assert not list(parser.read(ARRAY_CALL[:-4], finish="length"))
    assert parser.is_cut


@pytest.mark.parametrize(
    ("fields", "fits", "does_not"),
    [
        ({"tool_choice": "required"}, [ARRAY_CALL, TWO_CALLS], ["It rains.", f"{ARRAY_CALL} a"]),
        (
            {"tool_choice": "auto"},
            [ARRAY_CALL, "It rains.", "\n It [1] rains.", ""],
            ['[{"name": "rain"}]', "[1]", "\n [1]", "It rains. [TOOL_CALLS]"],
        ),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, [ARRAY_CALL], [TWO_CALLS]),
    ],
)
def test_arrays_keep_to_the_parameters(fields, fits, does_not) -> None:
    made = compiled(body(**fields), ToolFormat.ARRAY)
    assert all(accepts(made, text) for text in fits)
    assert not any(accepts(made, text) for text in does_not)


# ---------------------------------------------------------------- from version 11 on

NAMED_TEMPLATE = """{% for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}{{ message.content }}
{%- for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}CALL_ID[ARGS]
{{- call.function.arguments | tojson }}{% endfor %}
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]
{{- message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""
IDS = "[CALL_ID]{{ call.id }}"
ONE = '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}'
TWO = 'I look.[TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]time[ARGS]{}"}[TOOL_CALLS]time[ARGS]{}'
WITH_ID = '[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{"city": "Ulm"}'


@pytest.mark.parametrize("ids", ["", IDS])
def test_named_calls_where_the_template_writes_so(ids: str) -> None:
    template = NAMED_TEMPLATE.replace("CALL_ID", ids, 1)
    with served(template, ToolFormat.NAMED) as (client, engine, tokenizer):
        engine.script = TWO
        choice = client.chat.completions.create(messages=QUESTION, **ASKED).choices[0]
        assert not engine.calls[-1][0].sampling.skip_special_tokens
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", '{"city": "[TOOL_CALLS]time[ARGS]{}"}'),
            ("time", "{}"),
        ]
        assert all(re.fullmatch("[0-9a-z]{9}", call.id) for call in calls)
        streamed = list[str]()
        for event in client.chat.completions.create(messages=QUESTION, stream=True, **ASKED):
            for call in event.choices[0].delta.tool_calls or []:
                streamed.append(call.function.name or "")
        assert streamed == ["weather", "time"]
        engine.script = "It rains."
        answered = [
            *QUESTION,
            choice.message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls),
        ]
        choice = client.chat.completions.create(messages=answered, **ASKED).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
        assert "[TOOL_CALLS]time" in tokenizer.decode(engine.calls[-1][0].prompt)


@pytest.mark.parametrize("pieces", [1, 2, 7, 200])
@pytest.mark.parametrize(
    ("text", "names", "shown"),
    [
        (ONE, ["weather"], ""),
        (TWO, ["weather", "time"], "I look."),
        (WITH_ID, ["weather"], ""),
        ("It rains [TOOL", [], "It rains [TOOL"),
        ("weather{}", [], "weather{}"),
        ("[TOOL_CALLS]rain[ARGS]{}", [], ""),
    ],
)
def test_named_calls_are_found_however_the_output_is_cut(
    text: str, names: list[str], shown: str, pieces: int
) -> None:
    parser = call_parser(frozenset(["weather", "time"]), ToolFormat.NAMED, calls_first=False)
    found = list[object]()
    for start in range(0, len(text), pieces):
        found += parser.read(text[start : start + pieces])
    found += parser.read("", finish="stop")
    calls = [one for one in found if not isinstance(one, str)]
    assert [one.name for one in calls] == names
    assert "".join(one for one in found if isinstance(one, str)) == shown
    assert (parser.calls, parser.is_cut) == (len(names), False)
    assert text != WITH_ID or calls[0].id == "abcdefgh1"


@pytest.mark.parametrize("end", range(1, len(ONE)))
def test_a_named_call_that_is_cut_off_is_no_text(end: int) -> None:
    parser = call_parser(frozenset(["weather"]), ToolFormat.NAMED, calls_first=False)
    assert not list(parser.read(ONE[:end], finish="length"))
    assert parser.is_cut


@pytest.mark.parametrize(
    ("fields", "fits", "does_not"),
    [
        (
            {"tool_choice": "required"},
            [ONE, WITH_ID, ONE + "[TOOL_CALLS]time[ARGS]{}"],
            ["It rains.", f"It rains.{ONE}", ONE + " a", ONE.replace("city", "town")],
        ),
        (
            {"tool_choice": "auto"},
            [ONE, TWO, "It rains.", ""],
            ["[TOOL_CALLS]rain[ARGS]{}", "It rains. [TOOL_CALLS]", f"{ONE} It rains."],
        ),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, [ONE], [ONE + ONE]),
    ],
)
def test_named_calls_keep_to_the_parameters(fields, fits, does_not) -> None:
    made = compiled(body(**fields), ToolFormat.NAMED)
    assert all(accepts(made, text) for text in fits)
    assert not any(accepts(made, text) for text in does_not)


def test_a_tag_in_the_text_of_a_template_hides_no_call() -> None:
    text = f"Begin calls with [TOOL_CALLS], as in: {ONE}"
    assert [name for name, _, _ in calls_in(text)] == ["weather"]
