"""The shapes that need odd tokens: characters in several tokens, infinite log probabilities."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.messages import (
    ClassShares,
    CompressionReport,
    Request,
    Sampling,
    TokenLogprob,
    Tokens,
)
from triptych.core.profile import Fidelity
from triptych.deployments.http.json_frames import dump_json
from triptych.deployments.http.openai.chat_logprobs import ChatLogprobs
from triptych.deployments.http.openai.request_builder import Job
from triptych.deployments.http.openai.responses import (
    ChatResponseBuilder,
    Choice,
    CompletionResponseBuilder,
    usage,
)
from triptych.deployments.http.tokenizer import TextCodec
from triptych.workers.models.tokenizer import from_json, to_json
from triptych.workers.sampling.detokenizer import IncrementalDetokenizer


@pytest.fixture
def job() -> Job:
    return job_of(Sampling())


def job_of(sampling: Sampling) -> Job:
    request = Request(id="cmpl-1-0", prompt=(1, 2), sampling=sampling, reply_to="here")
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
    answer, content = content_of(job, tokenizer, [text, ended], streamed=streamed)
    assert answer == raw_of(content).decode() == "a🎉"
    assert len(content) == len(text.tokens) + 1
    assert content[-1]["token"] == end


def outputs(tokenizer, ids: list[int], sampling: Sampling) -> Iterator[Tokens]:
    """What a worker sends of an answer with these tokens."""
    text, end = IncrementalDetokenizer(from_json(to_json(tokenizer)), sampling), len(ids) - 1
    for index, token in enumerate(ids):
        entry = TokenLogprob(token=token, logprob=-1.0, top=((token, -1.0),))
        if token == tokenizer.eos_token_id:
            delta, finish, stop = text.finish(), "stop", token
        else:
            piece = text.push(token)
            stop, finish = piece.stop, "stop" if piece.stop else "length" if index == end else None
            delta = piece.text + (text.finish() if finish == "length" else "")
        yield Tokens(
            request="cmpl-1-0",
            index=index,
            tokens=(token,),
            text=delta,
            logprobs=(entry,),
            finish=finish,
            stop=stop,
        )
        if finish:
            return


def content_of(job, tokenizer, items: list[Tokens], *, streamed: bool) -> tuple[str, list]:
    """The text and the entries of an answer."""
    chat = ChatResponseBuilder(job, TextCodec(tokenizer, 64))
    (choice,), content, answer = chat.choices, [], ""
    for item in items:
        choice.add(item)
        for chunk in chat.chunks(choice, item) if streamed else ():
            part = chunk["choices"][0]
            content += (part["logprobs"] or {"content": []})["content"]
            answer += part["delta"].get("content", "")
    if not streamed:
        whole = chat.whole()["choices"][0]
        content, answer = whole["logprobs"]["content"], whole["message"]["content"]
    return answer, content


def raw_of(content: list) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in content)


@given(
    text=st.text(st.sampled_from("ab the🎉é\n"), max_size=24),
    stops=st.lists(st.text(st.sampled_from("ab the🎉\n"), min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
    ends=st.booleans(),
)
@settings(deadline=None)
def test_bytes_of_entries_stop_where_a_stop_string_does(
    tokenizer, text: str, stops: list[str], keep: bool, ends: bool
):
    ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * ends
    sampling = Sampling(stop=tuple(stops), include_stop=keep, logprobs=1)
    items = list(outputs(tokenizer, ids, sampling))
    if not items:
        return
    for streamed in (False, True):
        answer, content = content_of(job_of(sampling), tokenizer, items, streamed=streamed)
        assert raw_of(content).decode() == answer
        assert len(content) == len(items)


def test_bytes_are_cut_inside_a_token(tokenizer):
    ids = tokenizer.encode("the weather", add_special_tokens=False)
    assert any("eathe" in token for token in tokenizer.convert_ids_to_tokens(ids))
    for keep, kept in ((False, b"the w"), (True, b"the weath")):
        sampling = Sampling(stop=("eath",), include_stop=keep, logprobs=0)
        items = list(outputs(tokenizer, ids, sampling))
        for streamed in (False, True):
            answer, content = content_of(job_of(sampling), tokenizer, items, streamed=streamed)
            assert raw_of(content) == answer.encode() == kept


def test_what_decoding_changes_is_cut_at_the_stop_string(tokenizer):
    """A space in front is not in the text of some tokenizers, nor are bytes of no character."""
    sampling = Sampling(stop=("the",), logprobs=0)
    codec = TextCodec(tokenizer, 64)
    for raw, text in ((" a the", "a "), ("a the", "\N{REPLACEMENT CHARACTER} ")):
        ids = tokenizer.encode(raw, add_special_tokens=False)
        entries = [TokenLogprob(token=i, logprob=-1.0) for i in ids]
        content = list(ChatLogprobs(codec, sampling).finish(text, entries, "the"))
        assert raw_of(content).decode() == raw.removesuffix("the")


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
            "method": "uniform:k8v4",
            "policy": "uniform:k8v4",
            "ratio": 3.0,
            "raw_bytes": 150,
            "stored_bytes": 50,
            "floor": "low",
            "lowered_tokens": 0,
            "estimated_error": None,
        },
    }
    assert "compression" not in usage(7, choices[1:2])


def test_shares_of_classes_weigh_prompts_by_their_length():
    long = ClassShares(recent=0.1, high=0.2, low=0.4, pruned=0.3)
    short = ClassShares(recent=0.9, high=0.1)
    reports = [
        CompressionReport(policy="diffkv", raw_bytes=300, stored_bytes=9, classes=long),
        None,
        CompressionReport(policy="diffkv", raw_bytes=100, stored_bytes=9, classes=short),
    ]
    choices = [Choice(index=i, ids=[1], compression=r) for i, r in enumerate(reports)]
    expected = {"recent": 0.3, "high": 0.175, "low": 0.3, "merged": 0.0, "pruned": 0.225}
    assert usage(7, choices)["compression"]["classes"] == pytest.approx(expected)
    assert (
        "classes"
        not in usage(7, [replace(choices[1], compression=replace(reports[0], classes=None))])[
            "compression"
        ]
    )


def test_what_is_shared_stands_beside_what_is_stored():
    """The ratio is compression's alone."""
    report = CompressionReport(policy="p", raw_bytes=300, stored_bytes=30, shared_bytes=70)
    compression = usage(7, [Choice(index=0, ids=[1], compression=report)])["compression"]
    assert compression == {
        "method": "p",
        "policy": "p",
        "ratio": 3.0,
        "raw_bytes": 300,
        "stored_bytes": 30,
        "floor": "low",
        "lowered_tokens": 0,
        "shared_bytes": 70,
        "estimated_error": None,
    }


def test_lowered_tokens_are_reported_and_the_measured_error_is_not_theirs():
    """A choice that is computed again has been lowered as well."""
    report = CompressionReport(policy="p", raw_bytes=300, stored_bytes=30)
    choice = Choice(index=0, ids=[1], floor="low")
    measured = Fidelity(
        context=8, bytes_ratio=0.3, kl=0.5, top1_agreement=0.9, perplexity_ratio=1.0
    )
    estimates = {report.policy: measured}
    for one in (report, replace(report, lowered_tokens=96), report):
        tokens = Tokens(request="r", index=0, tokens=(1,), text="", compression=one)
        before = usage(7, [choice], fidelity=estimates).get("compression", {})
        choice.add(tokens)
    assert before["lowered_tokens"] == 96
    told = usage(7, [choice], fidelity=estimates)["compression"]
    assert (told["floor"], told["lowered_tokens"]) == ("low", 96)
    assert told["estimated_error"] is None
