"""The official client against a real server: what a user's program sees."""

import asyncio
import contextlib
import json

import httpx
import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from triptych.core.errors import Overloaded, QueueFull
from triptych.deployments.http.openai.protocol import ChatBody

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server, engine):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_answers_whole_and_says_what_compression_did(client, engine):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, seed=0, max_tokens=5)
    assert answer.choices[0].message.content == "abcde"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == len(engine.calls[0][0].prompt)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.model_extra["compression"] == {
        "method": "uniform:k8v4",
        "policy": "uniform:k8v4",
        "ratio": 3.0,
        "raw_bytes": 3000,
        "stored_bytes": 1000,
        "floor": "low",
        "lowered_tokens": 0,
        "classes": {"recent": 0.25, "high": 0.5, "low": 0.125, "merged": 0.0, "pruned": 0.125},
        "estimated_error": None,
    }


def test_chat_without_max_tokens_may_fill_the_context(client, engine):
    client.chat.completions.create(model="tiny", messages=HELLO, stop="c", seed=0)
    request = engine.calls[0][0]
    assert request.sampling.max_tokens == 2048 - len(request.prompt)
    assert request.reply_to == "ingress-0"


def test_max_completion_tokens_wins(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=0, max_tokens=9, max_completion_tokens=2
    )
    assert answer.choices[0].message.content == "ab"


def test_streamed_chat_says_the_same_as_the_whole_one(client, engine):
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            seed=3,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "defg"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 5 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.model_extra["compression"]["classes"]["high"] == 0.5
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_defaults_to_16_tokens(client, engine):
    answer = client.completions.create(model="tiny", prompt="hello", seed=0)
    assert answer.choices[0].text == "abcdefghijklmnop"
    Completion.model_validate(answer.model_dump())


def test_streamed_completion_with_echo(client, engine):
    chunks = list(
        client.completions.create(
            model="tiny", prompt="say: ", seed=0, max_tokens=3, echo=True, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "say: abc"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_take_texts_and_token_ids(client, engine, tokenizer):
    ids = tokenizer.encode("hi there")
    for prompt, prompts in [
        (ids, [ids]),
        (["hi there", "x"], [ids, tokenizer.encode("x")]),
        ([ids, [5]], [ids, [5]]),
    ]:
        engine.calls.clear()
        answer = client.completions.create(
            model="tiny", prompt=prompt, seed=0, max_tokens=2, n=2, echo=True
        )
        assert [list(r.prompt) for r in engine.calls[0]] == [p for p in prompts for _ in range(2)]
        assert [choice.index for choice in answer.choices] == list(range(len(prompts) * 2))
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        assert answer.choices[0].text == "hi thereab"


def test_each_of_n_choices_has_its_own_seed(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=7, n=3, max_tokens=3, temperature=0.5
    )
    assert [r.sampling.seed for r in engine.calls[0]] == [7, 8, 9]
    assert [c.message.content for c in answer.choices] == ["hij", "ijk", "jkl"]
    assert len({r.id for r in engine.calls[0]}) == 3
    assert answer.usage.completion_tokens == 9


def test_streamed_choices_can_be_told_apart(client, engine):
    texts = {0: "", 1: ""}
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=0, n=2, max_tokens=3, stream=True
    )
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "abc", 1: "bcd"}


def test_seeds_are_drawn_anew_when_absent_and_negative_ones_are_taken(client, engine):
    for seed in (None, None, -1):
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, seed=seed)
    first, second, negative = (call[0].sampling.seed for call in engine.calls)
    assert first != second
    assert negative == 2**63 - 1


def test_stop_strings_end_the_answer(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=0, stop=["zz", "de"], max_tokens=20
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "de"
    assert engine.calls[0][0].sampling.stop == ("zz", "de")


def test_sampling_options_reach_the_engine(client, engine):
    client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=3,
        temperature=0,
        top_p=0.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100, "6": 1.5},
        user="somebody",
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [4],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "something_new": {"a": 1},
        },
    )
    sampling = engine.calls[0][0].sampling
    assert sampling.temperature == 0
    assert sampling.top_k == 0
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.include_stop) == (2, True, True)
    assert sampling.stop_token_ids == (4,)
    assert not sampling.skip_special_tokens
    assert (sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.5, 0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)


def test_wanted_structures_reach_the_engine_as_grammars(client, engine):
    class Answer(pydantic.BaseModel):
        good: bool

    with contextlib.suppress(openai.LengthFinishReasonError):  # this engine knows only letters
        client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Answer, max_tokens=2
        )
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}}
    same = [  # what says the same has the same grammar
        [
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json": json.dumps(schema)}},
            {"guided_json": schema},
        ],
        [
            {"response_format": {"type": "regex", "pattern": "a+"}},
            {"structured_outputs": {"regex": "a+"}},
            {"guided_regex": "a+"},
        ],
        [{"structured_outputs": {"choice": ["a"]}}, {"guided_choice": ["a"]}],
        [
            {"response_format": {"type": "grammar", "grammar": 'start: "a"'}},
            {"structured_outputs": {"grammar": 'start: "a"'}},
            {"guided_grammar": 'start: "a"'},
        ],
        [
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ],
        [{"response_format": {"type": "text"}}, {}],
    ]
    assert '"good"' in engine.calls[0][0].sampling.grammar
    seen = list[set[str]]()
    for bodies in same:
        engine.calls.clear()
        for wanted in bodies:
            client.completions.create(model="tiny", prompt="x", extra_body=wanted)
        seen.append({requests[0].sampling.grammar for requests in engine.calls})
    assert [len(grammars) for grammars in seen] == [1] * len(same)
    assert [grammars == {""} for grammars in seen] == [False] * 5 + [True]


def test_two_fields_that_say_what_the_answer_is_to_be_are_refused(client, engine):
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    with pytest.raises(openai.BadRequestError, match="response_format and guided_regex") as caught:
        client.completions.create(model="tiny", prompt="x", extra_body=both)
    assert caught.value.param == "guided_regex"


def test_chat_logprobs(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=0, max_tokens=2, logprobs=True, top_logprobs=2
    )
    ChatCompletion.model_validate(answer.model_dump())
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "b"]
    assert content[0].bytes == [97]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
        ("a", -0.5),
        ("b", -9999.0),
    ]


def test_streamed_chat_logprobs_come_with_tokens_that_have_no_text_yet(client, engine):
    engine.held_back = 1
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, seed=0, max_tokens=2, logprobs=True, stream=True
        )
    )
    parts = [c.choices[0] for c in chunks]
    named = [part.logprobs.content[0].token for part in parts if part.logprobs]
    assert named == ["a", "b"]
    assert "".join(part.delta.content or "" for part in parts) == "b"


def test_completion_logprobs(client, engine):
    answer = client.completions.create(model="tiny", prompt="x", seed=0, max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"a": -0.5}


def test_token_ids_come_whole_and_streamed_if_asked_for(client, engine):
    asked = {"model": "tiny", "prompt": [5, 6], "seed": 0, "max_tokens": 4}
    extra = {"return_token_ids": True}
    whole = client.completions.create(**asked, extra_body=extra).choices[0].model_extra
    chunks = client.completions.create(**asked, extra_body=extra, stream=True)
    assert whole["prompt_token_ids"] == [5, 6]
    assert len(whole["token_ids"]) == 4
    told = [c.choices[0].model_extra["token_ids"] for c in chunks]
    assert [token for ids in told for token in ids] == whole["token_ids"]
    plain = client.completions.create(**asked).choices[0].model_extra
    assert "token_ids" not in plain


def test_streamed_completion_offsets_go_on_from_chunk_to_chunk(client, engine):
    chunks = client.completions.create(
        model="tiny", prompt="x", seed=0, max_tokens=3, logprobs=0, stream=True
    )
    assert [c.choices[0].logprobs.text_offset for c in chunks] == [[0], [1], [2]]


def test_a_chat_says_how_likely_its_prompt_was(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, max_tokens=2, extra_body={"prompt_logprobs": 2}
    )
    asked = engine.calls[0]
    assert [r.sampling.prompt_logprobs for r in asked] == [2, -1]  # one prompt is scored once
    first, second, *rest = answer.model_extra["prompt_logprobs"]
    assert first is None
    own = str(asked[0].prompt[1])
    assert second[own] == {"logprob": -1.0, "rank": 2, "decoded_token": "user"}
    assert second["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": "#"}
    assert second["6"]["logprob"] == -9999.0
    assert len(rest) == len(asked[0].prompt) - 2


def test_completions_say_how_likely_each_of_their_prompts_was(client, engine):
    answer = client.completions.create(
        model="tiny", prompt=["the we", "x"], n=2, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    prompts = [request.prompt for request in engine.calls[0]]
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.logprobs is None
        nothing, *told = choice.model_extra["prompt_logprobs"]
        assert nothing is None
        assert [[*entry] for entry in told] == [[str(token)] for token in prompt[1:]]
    assert [r.sampling.prompt_logprobs for r in engine.calls[0]] == [0, -1, 0, -1]


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_at_all_scores_the_prompt_alone(client, engine, stream):
    """What lm-eval asks for each text whose likelihood it wants."""
    engine.cached_tokens = 0
    answer = client.completions.create(
        model="tiny",
        prompt=["ab", "the weather"],
        max_tokens=0,
        echo=True,
        logprobs=1,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    chunks = list(answer) if stream else [answer]
    usage = chunks[-1].usage
    assert usage.completion_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens
    for index, text in enumerate(["ab", "the weather"]):
        told = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(choice.text for choice in told) == text
        assert told[-1].finish_reason == "length"
        scored = [choice.logprobs for choice in told if choice.logprobs]
        assert "".join(token for one in scored for token in one.tokens) == text
        values = [value for one in scored for value in one.token_logprobs]
        assert values == [None, *(-1.0 - i for i in range(len(values) - 1))]
    assert all(request.sampling.max_tokens == 1 for request in engine.calls[0])


def test_no_answer_and_no_prompt_is_nothing(client, engine):
    with pytest.raises(openai.BadRequestError, match="with echo: true the prompt is") as caught:
        client.completions.create(model="tiny", prompt="ab", max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="min_tokens=1 is more than"):
        client.completions.create(
            model="tiny", prompt="ab", max_tokens=0, echo=True, extra_body={"min_tokens": 1}
        )
    assert engine.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_log_probabilities_of_the_prompt(client, engine, stream):
    got = client.completions.create(
        model="tiny",
        prompt="say: ",
        n=2,
        seed=0,
        max_tokens=3,
        echo=True,
        logprobs=1,
        stream=stream,
    )
    choices = [choice for one in (got if stream else [got]) for choice in one.choices]
    prompt = engine.calls[0][0].prompt
    for index in range(2):
        parts = [choice for choice in choices if choice.index == index and choice.logprobs]
        assert "".join(part.text for part in parts).startswith("say: ")
        told = {
            name: [value for part in parts for value in getattr(part.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert "".join(told["tokens"]) == "say: " + "abcd"[index : index + 3]
        assert told["token_logprobs"][: len(prompt)] == [None, *range(-1, -len(prompt), -1)]
        assert told["token_logprobs"][len(prompt) :] == [-0.5] * 3
        assert told["top_logprobs"][0] is None
        assert told["top_logprobs"][1] == {"#": -0.5, told["tokens"][1]: -1.0}
        assert told["text_offset"] == [
            len("".join(told["tokens"][:i])) for i in range(len(prompt) + 3)
        ]


def test_prompts_are_scored_within_limits(client, engine):
    whole = {"model": "tiny", "max_tokens": 2, "extra_body": {"prompt_logprobs": 1}}
    with pytest.raises(openai.BadRequestError, match="whole answers") as caught:
        client.completions.create(prompt="x", stream=True, **whole)
    assert caught.value.param == "prompt_logprobs"
    many = [[5] * 2000] * 10
    with pytest.raises(openai.BadRequestError, match="220000 values: at most 200000") as caught:
        client.completions.create(model="tiny", prompt=many, max_tokens=2, echo=True, logprobs=10)
    assert caught.value.param == "logprobs"
    assert not engine.calls


def test_models_are_listed_and_found(client, engine):
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_extra["max_model_len"] == 2048
    Model.model_validate(client.models.retrieve("tiny").model_dump())
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("change", "kind", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 99}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"max_tokens": 9999}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions", "unsupported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own_exceptions(client, engine, change, kind, param, code, stream):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(
            **{"model": "tiny", "messages": HELLO, "stream": stream, **change}
        )
    assert caught.value.param == param
    assert caught.value.code == code
    assert engine.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_rate_limit_with_a_pause(client, engine, stream):
    engine.refusal = QueueFull(waiting=9, limit=8, retry_after_s=1.5)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    headers = caught.value.response.headers
    assert headers["retry-after"] == "2"
    assert headers["retry-after-ms"] == "1500"
    assert caught.value.code == "rate_limit_exceeded"
    assert headers["x-request-id"].startswith("req-")


def test_missing_workers_are_a_503_with_a_pause(client, engine):
    engine.refusal = Overloaded("no decode worker")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


def test_an_error_in_mid_stream_raises_in_the_client(client, engine):
    engine.crash, engine.fail_after = RuntimeError("secret path /root"), 2
    stream = client.chat.completions.create(model="tiny", messages=HELLO, seed=0, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(3)] == ["", "a", "b"]
    with pytest.raises(openai.APIError) as caught:
        next(stream)
    assert "secret" not in str(caught.value)
    assert caught.value.code == "internal_error"


def test_sixteen_at_once(server, engine):
    engine.delay_s = 0.01

    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        async with client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="tiny", messages=HELLO, seed=seed, max_tokens=4
                    )
                    for seed in range(16)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(main())
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert texts == [letters[seed : seed + 4] for seed in range(16)]


def test_async_streams(server, engine):
    async def main() -> str:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        async with client:
            stream = await client.completions.create(
                model="tiny", prompt="x", seed=0, max_tokens=4, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(main()) == "abcd"


def test_null_is_the_same_as_absent(http: httpx.Client, engine):
    names = {*ChatBody.model_fields} - {"messages"} | {"user", "metadata"}
    body = {"messages": HELLO} | dict.fromkeys(names)
    assert http.post("/v1/chat/completions", json=body).status_code == 200
