"""Fields that say how a prompt is made: vLLM's names, and what happens to fields nobody knows."""

import httpx
import pytest

from tests.unit.deployments.http.conftest import (
    CHAT_TEMPLATE,
    MODEL,
    make_engine,
    make_tokenizer,
    serve_app,
)
from triptych.core.errors import RequestError
from triptych.deployments.http.tokenizer import TextCodec

CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "the weather"}, {"role": "assistant", "content": "the user "}]


def prompt_of(http, engine, route: str, **body) -> list[int]:
    answer = http.post(route, json={"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return list(engine.calls[-1][0].prompt)


def test_the_newest_tokens_of_a_prompt_are_read(http, engine):
    ids = list(range(40, 60))
    route = "/v1/completions"
    assert prompt_of(http, engine, route, prompt=ids, truncate_prompt_tokens=5) == ids[-5:]
    assert prompt_of(http, engine, route, prompt=ids, truncate_prompt_tokens=50) == ids
    whole = prompt_of(http, engine, CHAT, messages=TALK)
    assert prompt_of(http, engine, CHAT, messages=TALK, truncate_prompt_tokens=7) == whole[-7:]


def test_as_much_of_a_prompt_is_read_as_leaves_room_for_the_answer(http, engine):
    ids = [50] * 3000
    body = {"prompt": ids, "truncate_prompt_tokens": -1}
    assert len(prompt_of(http, engine, "/v1/completions", **body, max_tokens=48)) == 2000
    refused = http.post("/v1/completions", json={"prompt": ids, "max_tokens": 48})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_what_is_repeated_is_what_was_read(http, engine, tokenizer):
    ids = tokenizer.encode("the user and the weather", add_special_tokens=False)
    for prompt in ("the user and the weather", ids):
        body = {"prompt": prompt, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 1}
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert text.startswith(tokenizer.decode(ids[-3:]))


def test_an_answer_goes_on_with_the_last_message(http, engine, tokenizer):
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    text = tokenizer.decode(prompt_of(http, engine, CHAT, messages=TALK, **asked))
    assert text.endswith("<|im_start|>assistant\nthe user ")
    text = tokenizer.decode(
        prompt_of(http, engine, CHAT, messages=TALK, add_generation_prompt=False)
    )
    assert text.endswith("the user<|im_end|>\n")
    told = http.post("/tokenize", json={"messages": TALK, **asked}).json()
    assert told["tokens"] == list(prompt_of(http, engine, CHAT, messages=TALK, **asked))


async def test_a_template_that_leaves_the_last_message_out_is_named():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(RequestError, match="leaves the last message out"):
        await TextCodec(tokenizer, 64).encode_chat(TALK, continue_final=True)


def test_a_template_is_told_whether_to_think():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if enable_thinking is false %}</think>{% endif %}"
    engine = make_engine(tokenizer)
    with serve_app(tokenizer, engine) as server, httpx.Client(base_url=server.url) as http:
        told = {"chat_template_kwargs": {"enable_thinking": False}}
        assert tokenizer.decode(prompt_of(http, engine, CHAT, messages=TALK, **told)).endswith(
            "</think>"
        )
        assert "think" not in tokenizer.decode(prompt_of(http, engine, CHAT, messages=TALK))


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("chat_template_kwargs", {"tokenize": True}, "chat_template_kwargs.tokenize"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"thinking": "yes"}, "chat_template_kwargs.thinking"),
        ("chat_template", "{{ 7 * 7 }}", "chat_template"),
        ("continue_final_message", True, "continue_final_message"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_one_is_named(http, engine, field, value, param):
    answer = http.post(CHAT, json={"messages": TALK, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_fields_nobody_knows_are_let_be_or_refused():
    tokenizer = make_tokenizer()
    body = {"model": MODEL, "messages": TALK, "max_tokens": 1, "user": "ada"}
    for strict, status in ((False, 200), (True, 400)):
        with (
            serve_app(tokenizer, make_engine(tokenizer), strict_params=strict) as server,
            httpx.Client(base_url=server.url) as http,
        ):
            assert http.post(CHAT, json=body).status_code == 200
            answer = http.post(CHAT, json={**body, "temprature": 0})
            assert answer.status_code == status
            if strict:
                assert answer.json()["error"]["param"] == "temprature"
