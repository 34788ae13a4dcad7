"""Whatever arrives: an OpenAI-shaped error that names the field, and no work for the engine."""

import contextlib
import json
import re

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.core.errors import RequestError
from triptych.deployments.http.json_frames import parse_json

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}
LARGE_INT = 10**30


FOREIGN = re.compile(r"Value error|Input should|String should|List should|Field required|pydantic")
"""Phrases of pydantic."""


def check_refused(
    http: httpx.Client, engine, response: httpx.Response, status: int, param: str | None
) -> dict[str, str | None]:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    assert not FOREIGN.search(error["message"]), error
    assert len(response.content) < 5000
    assert response.headers["x-request-id"].startswith("req-")
    assert engine.calls == []
    assert http.get("/health").status_code == 200
    return error


def image(url: str) -> list[dict[str, object]]:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def tool(name: str, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **more}}


def called(arguments: str) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


BROKEN_TOOL = tool("f", parameters={"type": "wat"}, strict=True)
STRAY_RESULT = {"role": "tool", "content": "4", "tool_call_id": "x"}

FIELDS = [
    # field, value, status, param
    ("temperature", 99, 400, "temperature"),
    ("temperature", -1, 400, "temperature"),
    ("temperature", "1", 400, "temperature"),
    ("temperature", True, 400, "temperature"),
    ("temperature", [], 400, "temperature"),
    ("temperature", LARGE_INT, 400, "temperature"),
    *(
        (field, value, 400, field)
        for field in ("ttft_slo_ms", "tpot_slo_ms", "deadline_ms")
        for value in (0, 5e-324, -1, 86_400_001, "fast", True, LARGE_INT)
    ),
    ("priority", 101, 400, "priority"),
    ("priority", -101, 400, "priority"),
    ("priority", 0.5, 400, "priority"),
    ("priority", "high", 400, "priority"),
    ("priority", True, 400, "priority"),
    ("top_p", 0, 400, "top_p"),
    ("top_p", 1.1, 400, "top_p"),
    ("top_k", -2, 400, "top_k"),
    ("top_k", 0.5, 400, "top_k"),
    ("min_p", 2, 400, "min_p"),
    ("presence_penalty", 2.5, 400, "presence_penalty"),
    ("frequency_penalty", -2.5, 400, "frequency_penalty"),
    *(("repetition_penalty", value, 400, "repetition_penalty") for value in (0, 1e-300, 5e-324)),
    ("repetition_penalty", 0.0099, 400, "repetition_penalty"),
    ("repetition_penalty", 10.1, 400, "repetition_penalty"),
    ("n", 0, 400, "n"),
    ("n", 5, 400, "n"),
    ("n", 10**6, 400, "n"),
    ("n", LARGE_INT, 400, "n"),
    ("n", 1.0, 400, "n"),
    ("n", True, 400, "n"),
    ("n", "2", 400, "n"),
    ("max_tokens", 0, 400, "max_tokens"),
    ("max_tokens", -1, 400, "max_tokens"),
    ("max_tokens", 2**31, 400, "max_tokens"),
    ("max_tokens", 2**64, 400, "max_tokens"),
    ("max_tokens", 2048, 400, "max_tokens"),
    ("max_tokens", "16", 400, "max_tokens"),
    ("seed", 2**63, 400, "seed"),
    ("seed", -(2**63) - 1, 400, "seed"),
    ("seed", 1.5, 400, "seed"),
    ("stop", ["a"] * 17, 400, "stop"),
    ("stop", "", 400, "stop"),
    ("stop", ["a", ""], 400, "stop.1"),
    ("stop", "x" * 10**5, 400, "stop"),
    ("stop", {"a": 1}, 400, "stop"),
    ("stop", [1], 400, "stop.0"),
    ("logit_bias", {"99999999": 1}, 400, "logit_bias.99999999"),
    ("logit_bias", {"-1": 1}, 400, "logit_bias.-1"),
    ("logit_bias", {"one": 1}, 400, "logit_bias.one"),
    ("logit_bias", {"1": "x"}, 400, "logit_bias.1"),
    ("logit_bias", {"1": 101}, 400, "logit_bias.1"),
    ("logit_bias", {str(i): 1 for i in range(10_000)}, 400, "logit_bias"),
    ("logit_bias", [1], 400, "logit_bias"),
    ("stop_token_ids", [10**6], 400, "stop_token_ids"),
    ("stop_token_ids", [-1], 400, "stop_token_ids.0"),
    ("stop_token_ids", [1] * 1000, 400, "stop_token_ids"),
    ("min_tokens", 4000, 400, "min_tokens"),
    ("min_tokens", -1, 400, "min_tokens"),
    ("ignore_eos", "yes", 400, "ignore_eos"),
    ("prompt_logprobs", 21, 400, "prompt_logprobs"),
    ("prompt_logprobs", -1, 400, "prompt_logprobs"),
    ("prompt_logprobs", True, 400, "prompt_logprobs"),
    ("stream", "true", 400, "stream"),
    ("stream", 1, 400, "stream"),
    ("stream_options", {"include_usage": True}, 400, "stream_options"),
    ("stream_options", [], 400, "stream_options"),
    ("model", "other", 404, "model"),
    ("model", "", 404, "model"),
    ("model", "../../etc/passwd", 404, "model"),
    ("model", "a\0b", 404, "model"),
    ("model", 5, 400, "model"),
    ("model", "m" * 10**5, 400, "model"),
    ("response_format", {"type": "json_schema"}, 400, "response_format.json_schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {}},
        400,
        "response_format.json_schema.name",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}},
        400,
        "response_format.json_schema.schema",
    ),
    (
        "response_format",
        {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1/x"}},
        },
        400,
        "response_format.json_schema.schema",
    ),
    ("structured_outputs", {}, 400, "structured_outputs"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, 400, "structured_outputs"),
    ("structured_outputs", {"regex": "(" * 40}, 400, "structured_outputs.regex"),
    ("structured_outputs", {"regex": "a" * 100_000}, 400, "structured_outputs.regex"),
    ("structured_outputs", {"regex": 3}, 400, "structured_outputs.regex"),
    ("structured_outputs", {"choice": []}, 400, "structured_outputs.choice"),
    ("structured_outputs", {"choice": ["a"] * 5000}, 400, "structured_outputs.choice"),
    ("structured_outputs", {"grammar": "start: nope"}, 400, "structured_outputs.grammar"),
    ("structured_outputs", {"json": {"enum": list(range(30_000))}}, 400, "structured_outputs.json"),
    ("structured_outputs", {"json": "{"}, 400, "structured_outputs.json"),
    ("structured_outputs", {"json": "[]"}, 400, "structured_outputs.json"),
    ("structured_outputs", {"json": "[" * 10**5}, 400, "structured_outputs.json"),
    ("guided_json", "no", 400, "guided_json"),
    ("guided_json", {"type": "wat"}, 400, "guided_json"),
    ("guided_regex", "(", 400, "guided_regex"),
    ("guided_choice", [1], 400, "guided_choice.0"),
    ("guided_grammar", 'root ::= "a"', 400, "guided_grammar"),
    ("response_format", {"type": "regex"}, 400, "response_format.pattern"),
    ("response_format", {"type": "regex", "pattern": "(a"}, 400, "response_format.pattern"),
    ("response_format", {"type": "grammar"}, 400, "response_format.grammar"),
    (
        "response_format",
        {"type": "grammar", "grammar": "start: " + "x " * 40_000},
        400,
        "response_format.grammar",
    ),
    ("response_format", {"type": "yaml"}, 400, "response_format.type"),
]

CHAT_FIELDS = [
    ("messages", [], 400, "messages"),
    ("messages", None, 400, "messages"),
    ("messages", "hello", 400, "messages"),
    ("messages", {}, 400, "messages"),
    ("messages", HELLO * 2049, 400, "messages"),
    ("messages", [1], 400, "messages.0"),
    ("messages", [{"role": "wizard", "content": "x"}], 400, "messages.0.role"),
    ("messages", [{"role": 1, "content": "x"}], 400, "messages.0.role"),
    ("messages", [{"role": "user"}], 400, "messages.0.content"),
    ("messages", [{"content": "x"}], 400, "messages.0.role"),
    ("messages", [*HELLO, {"role": "user", "content": None}], 400, "messages.1.content"),
    ("messages", [{"role": "user", "content": 5}], 400, "messages.0.content"),
    ("messages", [{"role": "user", "content": [5]}], 400, "messages.0.content.0"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text"}]}],
        400,
        "messages.0.content.0.text",
    ),
    ("messages", image("http://169.254.169.254/latest"), 400, "messages.0.content.1"),
    ("messages", image("file:///etc/passwd"), 400, "messages.0.content.1"),
    ("messages", [{"role": "user", "content": "word " * 2000}], 400, "messages"),
    ("messages", [{"role": "user", "content": "w" * 200_000}], 400, "messages"),
    ("max_completion_tokens", 2048, 400, "max_completion_tokens"),
    ("max_completion_tokens", 0, 400, "max_completion_tokens"),
    ("logprobs", 1, 400, "logprobs"),
    ("top_logprobs", 21, 400, "top_logprobs"),
    ("top_logprobs", -1, 400, "top_logprobs"),
    ("top_logprobs", 2, 400, "top_logprobs"),
    ("tools", [{"type": "function"}], 400, "tools.0.function"),
    ("tools", [{"type": "retrieval"}], 400, "tools.0.type"),
    ("tools", [tool("a b")], 400, "tools.0.function.name"),
    ("tools", [tool("f", parameters=[])], 400, "tools.0.function.parameters"),
    ("tools", [tool("f"), tool("f")], 400, "tools"),
    ("tools", [tool(f"f{i}") for i in range(129)], 400, "tools"),
    (
        "tools",
        [tool("f", parameters={"type": "wat"}, strict=True)],
        400,
        "tools.0.function.parameters",
    ),
    ("tools", [tool("f", description="word " * 3000)], 400, "messages"),
    ("tool_choice", "required", 400, "tool_choice"),
    ("tool_choice", "f", 400, "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, 400, "tool_choice"),
    ("parallel_tool_calls", "no", 400, "parallel_tool_calls"),
    (
        "messages",
        [*HELLO, {"role": "tool", "content": "4", "tool_call_id": "x"}],
        400,
        "messages.1.tool_call_id",
    ),
    ("messages", [*HELLO, called("{")], 400, "messages.1.tool_calls.0.function.arguments"),
    ("messages", [*HELLO, called("[]")], 400, "messages.1.tool_calls.0.function.arguments"),
    ("tools", "x", 400, "tools"),
    ("functions", [{}], 400, "functions"),
]

COMPLETION_FIELDS = [
    ("prompt", None, 400, "prompt"),
    ("prompt", "", 400, "prompt"),
    ("prompt", [], 400, "prompt"),
    ("prompt", [[]], 400, "prompt"),
    ("prompt", [""], 400, "prompt"),
    ("prompt", 5, 400, "prompt"),
    ("prompt", {"a": 1}, 400, "prompt"),
    ("prompt", [True], 400, "prompt.0"),
    ("prompt", [1, "x"], 400, "prompt.1"),
    ("prompt", ["x", 1], 400, "prompt.1"),
    ("prompt", [[1], ["x"]], 400, "prompt.1.0"),
    ("prompt", [-1], 400, "prompt.0"),
    ("prompt", [10**6], 400, "prompt"),
    ("prompt", [2**63], 400, "prompt.0"),
    ("prompt", [1] * 2048, 400, "prompt"),
    ("prompt", [1] * 100_000, 400, "prompt"),
    ("prompt", ["x"] * 1025, 400, "prompt"),
    ("prompt", "<|im_end|>" * 2100, 400, "prompt"),
    ("prompt", "\u200d" * 20_000, 400, "prompt"),
    ("echo", 1, 400, "echo"),
    ("logprobs", 21, 400, "logprobs"),
    ("logprobs", True, 400, "logprobs"),
    ("suffix", "end", 400, "suffix"),
    ("best_of", 3, 400, "best_of"),
]


def label(value: object) -> str:
    return repr(value)[:24] if not isinstance(value, list | dict) else type(value).__name__


@pytest.mark.parametrize(("field", "value", "status", "param"), FIELDS + CHAT_FIELDS, ids=label)
def test_chat_refuses(http, engine, field, value, status, param):
    body = {"model": "tiny", "messages": HELLO, field: value}
    check_refused(http, engine, http.post(CHAT, json=body), status, param)


@pytest.mark.parametrize(
    ("field", "value", "status", "param"), FIELDS + COMPLETION_FIELDS, ids=label
)
def test_completions_refuse(http, engine, field, value, status, param):
    body = {"model": "tiny", "prompt": "hello", field: value}
    check_refused(http, engine, http.post(COMPLETIONS, json=body), status, param)


def test_limits_that_contradict_each_other_are_refused(http, engine):
    body = {"prompt": "x", "ttft_slo_ms": 500, "deadline_ms": 400}
    error = check_refused(http, engine, http.post(COMPLETIONS, json=body), 400, "ttft_slo_ms")
    assert "deadline_ms=400" in error["message"]


SURROGATE_TOOL = (
    '{"messages":[{"role":"user","content":"x"}],'
    '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'
)
SURROGATES = ['{"\\ud800":1}', '{"description":"\\udfff"}', '{"enum":[["a\\ud83d"]]}']


def test_a_lone_surrogate_is_refused_by_name(http, engine):
    for path, body, param in [
        (CHAT, '{"messages":[{"role":"user","content":"\\ud800"}]}', "messages.0.content"),
        (COMPLETIONS, '{"prompt":"\\udfff"}', "prompt"),
        (COMPLETIONS, '{"prompt":"x","stop":["\\ud800"]}', "stop.0"),
        (COMPLETIONS, '{"prompt":"x","model":"\\ud800"}', "model"),
        *((CHAT, SURROGATE_TOOL % text, "tools.0.function.parameters") for text in SURROGATES),
        (COMPLETIONS, '{"prompt":"x","guided_json":{"\\ud800":1}}', "guided_json"),
        (COMPLETIONS, '{"prompt":"x","guided_json":"{\\"\\\\ud800\\":1}"}', "guided_json"),
        (
            COMPLETIONS,
            '{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"name":"a",'
            '"schema":{"enum":["\\udc00"]}}}}',
            "response_format.json_schema.schema",
        ),
    ]:
        check_refused(http, engine, http.post(path, content=body, headers=JSON), 400, param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"messages": HELLO, "temperature": 3},
            "temperature: expected a number of at most 2 (got 3)",
        ),
        ({"messages": HELLO, "n": "2"}, "n: expected an integer (got '2')"),
        ({"messages": []}, "messages: expected at least 1 item"),
        ({"messages": None}, "messages: a value is required, not null"),
        ({}, "messages: this field is required"),
        ({"mesages": HELLO}, "messages: this field is required; the request has 'mesages' instead"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content: a value is required, not null",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content: this field is required"),
        (
            {"messages": [called("{")]},
            "messages.0.tool_calls.0.function.arguments: expected the text of a JSON object "
            "(got '{')",
        ),
        (
            {"messages": HELLO, "response_format": {"type": "yaml"}},
            "response_format.type: expected 'text', 'json_object', 'json_schema', 'regex' or "
            "'grammar' (got 'yaml')",
        ),
        ({"messages": HELLO, "stop": ""}, "stop: expected at least 1 character"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs.x: the model's chat template has no such variable",
        ),
    ],
    ids=label,
)
def test_messages_are_sentences_about_the_field(http, engine, body, message):
    response = http.post(CHAT, json=body)
    param = message.partition(":")[0]
    assert check_refused(http, engine, response, 400, param)["message"] == message


MISSPELT = [
    ({"max_token": 1}, "'max_token' is ignored: did you mean 'max_tokens'?"),
    ({"maxTokens": 1}, "'maxTokens' is ignored: did you mean 'max_tokens'?"),
    ({"temprature": 1}, "'temprature' is ignored: did you mean 'temperature'?"),
    ({"top-p": 1}, "'top-p' is ignored: did you mean 'top_p'?"),
    ({"temp\nerature\u00e9": 1}, "'temp\\nerature\\xe9' is ignored: did you mean 'temperature'?"),
    (
        {"response_format": {"type": "text", "patern": "a"}},
        "'response_format.patern' is ignored: did you mean 'pattern'?",
    ),
    ({"something_else": 1, "user": "me", "store": True}, None),
    ({"x" * 10_000: 1, **{f"max_tokens{i}{i}{i}{i}": 1 for i in range(1000, 3000)}}, None),
]


@pytest.mark.parametrize(("fields", "warning"), MISSPELT, ids=label)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_misspelt_field_is_named_in_a_header(http, engine, path, stream, fields, warning):
    body = {"max_tokens": 1, "stream": stream, **fields}
    body |= {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    response = http.post(path, json=body)
    assert response.status_code == 200
    assert response.headers.get("x-triptych-warning") == warning


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [tool("f")]},
    ],
    ids=label,
)
def test_ignore_eos_is_not_refused_and_has_no_effect_on_a_structured_answer(
    http, engine, constraint
):
    body = {"messages": HELLO, "max_tokens": 1, "ignore_eos": True}
    free = http.post(CHAT, json=body)
    assert "x-triptych-warning" not in free.headers
    response = http.post(CHAT, json=body | constraint)
    assert response.status_code == 200
    assert response.headers["x-triptych-warning"].startswith("'ignore_eos' is ignored: ")
    sampled = [call[0].sampling.ignore_eos for call in engine.calls]
    assert sampled == [True, False]


def test_a_field_name_stays_one_line_in_the_log(http, engine, caplog):
    with caplog.at_level("INFO", logger="triptych"):
        body = {"prompt": "x", "logit_bias": {"1\nroot: all is well\u2028": 1}}
        assert http.post(COMPLETIONS, json=body).status_code == 400
    (record,) = [one for one in caplog.records if "400" in one.getMessage()]
    assert "\\nroot: all is well" in record.getMessage()
    assert len(record.getMessage().splitlines()) == 1


BODIES = [
    b"",
    b"{",
    b'{"prompt": "x",}',
    b'{"prompt": "x"} x',
    b"[]",
    b"null",
    b"5",
    b'"text"',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "\xff\xfe"}',
    b'\xef\xbb\xbf{"prompt": "x"}',
    '{"prompt": "x"}'.encode("utf-16"),
    b'{"prompt": "a\nb"}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 30_000,
    b'{"prompt": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"\x1f\x8b\x08\x00",
    b"model=tiny&prompt=x",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_what_is_not_a_json_object_is_refused(http, engine, body):
    response = http.post(COMPLETIONS, content=body, headers=JSON)
    check_refused(http, engine, response, 400, None)


def test_a_number_beyond_floats_is_refused_by_name(http, engine):
    body = b'{"prompt": "x", "temperature": 1e400}'
    response = http.post(COMPLETIONS, content=body, headers=JSON)
    check_refused(http, engine, response, 400, "temperature")


def test_of_two_equal_keys_the_last_counts(http, engine):
    body = b'{"prompt": "x", "max_tokens": 99999, "max_tokens": 1}'
    assert http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200


def test_a_nul_in_a_text_is_text(http, engine):
    assert http.post(COMPLETIONS, json={"prompt": "a\0b", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/jsonx"},
        {**JSON, "content-encoding": "gzip"},
        {**JSON, "content-encoding": "br"},
    ],
    ids=str,
)
def test_only_plain_json_bodies_are_read(http, engine, headers):
    response = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    check_refused(http, engine, response, 400, None)


def test_a_charset_beside_the_content_type_is_fine(http, engine):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/models", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/V1/models", 404),
        ("GET", "/v1/models/%2e%2e/x", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("GET", "/docs", 404),
        ("GET", "/openapi.yaml", 404),
    ],
)
def test_unknown_routes_and_methods_answer_in_json(http, engine, method, path, status):
    response = http.request(method, path)
    param = "model" if path.startswith("/v1/models/") else None
    check_refused(http, engine, response, status, param)


def test_the_context_error_has_both_numbers_and_the_words_that_clients_look_for(http, engine):
    body = {"messages": HELLO, "max_tokens": 2100}
    error = http.post(CHAT, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. ")
    assert "2100 in the completion" in error["message"]
    long_prompt = http.post(COMPLETIONS, json={"prompt": [5] * 2800}).json()["error"]
    assert "maximum context length is 2048 tokens" in long_prompt["message"]
    assert "2800 tokens" in long_prompt["message"]
    assert long_prompt["code"] == "context_length_exceeded"


def test_a_prompt_that_fills_the_context_but_for_one_token_is_served(http, engine):
    answer = http.post(COMPLETIONS, json={"prompt": [5] * 2047}).json()
    assert answer["usage"]["completion_tokens"] == 1


def test_many_faults_make_a_short_error(http, engine):
    messages = [{"role": "x" * 1000, "content": "y" * 50} for _ in range(200)]
    response = http.post(CHAT, json={"messages": messages})
    error = check_refused(http, engine, response, 400, "messages.0.role")
    assert error["message"].count("messages.") <= 10


def test_tokenize_and_detokenize_are_inverse(http, engine, tokenizer):
    answer = http.post(
        "/tokenize", json={"prompt": "the weather é", "return_token_strs": True}
    ).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "the weather é"}


def test_tokenize_renders_messages(http, engine, tokenizer):
    answer = http.post("/tokenize", json={"messages": HELLO}).json()
    expected = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert answer["tokens"] == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_tokenize_refuses(http, engine, path, body, param):
    check_refused(http, engine, http.post(path, json=body), 400, param)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELD_NAMES = sorted({field for field, *_ in FIELDS + CHAT_FIELDS} - {"model", "messages"})


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(FIELD_NAMES), json_values, max_size=3),
    messages=st.just(HELLO) | json_values,
)
def test_no_body_makes_the_server_fail(http, engine, fields, messages):
    fields |= {"messages": messages, "max_tokens": 1} if "max_tokens" not in fields else {}
    body = json.dumps(fields).encode()
    response = http.post(CHAT, content=body, headers=JSON)
    assert response.status_code in (200, 400), response.text


@settings(max_examples=examples(200), deadline=None)
@given(body=st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(body):
    with contextlib.suppress(RequestError):
        assert isinstance(parse_json(body), dict)
