"""The shapes that need odd tokens: characters in several tokens, infinite log probabilities."""

import math
from dataclasses import replace

import pytest

from triptych.core.messages import CompressionReport, Request, Sampling, TokenLogprob, Tokens
from triptych.deployments.http.json_frames import dump_json
from triptych.deployments.http.openai.request_builder import Job
from triptych.deployments.http.openai.responses import (
    ChatResponseBuilder,
    Choice,
    CompletionResponseBuilder,
    usage,
)
from triptych.deployments.http.tokenizer import TextCodec


@pytest.fixture
def job() -> Job:
    request = Request(id="cmpl-1-0", prompt=(1, 2), sampling=Sampling(), reply_to="here")
    return Job(
        id="cmpl-1",
        created=0,
        model="tiny",
        requests=(request,),
        prompt_tokens=2,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        token_ids=False,
        echo=("",),
    )


def spell(tokenizer, text: str, logprob: float = -1.0) -> Tokens:
    ids = tokenizer.encode(text, add_special_tokens=False)
    logprobs = tuple(TokenLogprob(token=i, logprob=logprob, top=((i, logprob),)) for i in ids)
    return Tokens(
        request="cmpl-1-0", index=0, tokens=tuple(ids), text=text, logprobs=logprobs, finish="stop"
    )


def test_a_character_of_several_tokens_is_named_by_its_bytes(job, tokenizer):
    item = spell(tokenizer, "a🎉b")
    assert len(item.tokens) == 6
    chat = ChatResponseBuilder(job, TextCodec(tokenizer, 64))
    chat.choices[0].add(item)
    content = chat.whole()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a🎉b"
    plain = CompletionResponseBuilder(job, TextCodec(tokenizer, 64))
    plain.choices[0].add(item)
    logprobs = plain.whole()["choices"][0]["logprobs"]
    assert logprobs["tokens"][1] == "bytes:\\xf0"
    assert logprobs["text_offset"] == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", "q"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_bytes_of_all_entries_are_the_text(job, tokenizer, end: str, streamed: bool):
    """The token that ends the answer is no text, nor are special tokens inside it."""
    middle, last = spell(tokenizer, "a<|im_start|>🎉"), spell(tokenizer, end)
    text = replace(middle, text="a🎉", finish=None)
    ended = replace(last, text="", stop=last.tokens[-1], index=len(text.tokens))
    chat = ChatResponseBuilder(job, TextCodec(tokenizer, 64))
    (choice,), content, answer = chat.choices, [], ""
    for item in (text, ended):
        choice.add(item)
        for chunk in chat.chunks(choice, item) if streamed else ():
            part = chunk["choices"][0]
            content += (part["logprobs"] or {"content": []})["content"]
            answer += part["delta"].get("content", "")
    if not streamed:
        whole = chat.whole()["choices"][0]
        content, answer = whole["logprobs"]["content"], whole["message"]["content"]
    assert answer == b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a🎉"
    assert len(content) == len(text.tokens) + 1
    assert content[-1]["token"] == end


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, math.inf, -1e9])
def test_what_json_cannot_say_becomes_minus_9999(job, tokenizer, logprob):
    answer = CompletionResponseBuilder(job, TextCodec(tokenizer, 64))
    answer.choices[0].add(spell(tokenizer, "a", logprob))
    whole = answer.whole()
    dump_json(whole)
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -9999.0}]


def test_compression_is_summed_over_choices():
    reports = [
        CompressionReport(policy="uniform:k8v4", raw_bytes=100, stored_bytes=30),
        None,
        CompressionReport(policy="uniform:k8v4", raw_bytes=50, stored_bytes=20),
    ]
    choices = [Choice(index=i, ids=[1, 2], compression=r) for i, r in enumerate(reports)]
    assert usage(7, choices) == {
        "prompt_tokens": 7,
        "completion_tokens": 6,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
        "compression": {
            "policy": "uniform:k8v4",
            "ratio": 3.0,
            "raw_bytes": 150,
            "stored_bytes": 50,
        },
    }
    assert "compression" not in usage(7, choices[1:2])


def test_what_is_shared_stands_beside_what_is_stored():
    """The ratio is compression's alone."""
    report = CompressionReport(policy="p", raw_bytes=300, stored_bytes=30, shared_bytes=70)
    compression = usage(7, [Choice(index=0, ids=[1], compression=report)])["compression"]
    assert compression == {
        "policy": "p",
        "ratio": 3.0,
        "raw_bytes": 300,
        "stored_bytes": 30,
        "shared_bytes": 70,
    }
