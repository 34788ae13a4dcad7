"""Answers that keep to a grammar: whatever the model would rather say."""

import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import byte_tokenizer
from triptych.core import grammar
from triptych.core.config import AppConfig
from triptych.core.errors import GrammarError
from triptych.core.messages import Sampling, failed
from triptych.workers.local import LocalServer
from triptych.workers.sampling.grammar import GrammarMatcher, Vocabulary, with_text_tokens
from triptych.workers.sampling.sampler import SamplerRow, sample

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    settings = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20},
        "compressor": {"policy": "uniform:k8v4", "recent_window_tokens": 4},
    }
    with LocalServer(AppConfig.from_mapping(settings), tiny_model) as server:
        yield server


def answers(server: LocalServer, made: str, count: int = 6, **more: object) -> list:
    sampling = [
        Sampling(temperature=1.0, max_tokens=120, seed=seed, grammar=made, **more)
        for seed in range(count)
    ]
    return server.complete([server.request([5, 6, 7 + i], one) for i, one in enumerate(sampling)])


def test_a_random_model_writes_what_a_schema_allows(server: LocalServer) -> None:
    for answer in answers(server, grammar.from_json_schema(PERSON)):
        assert answer.finish == "stop"
        person = json.loads(answer.text)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 199
    assert server.pool.stat().request_pages == server.pool.stat().prefix_pages


def test_answers_with_and_without_a_grammar_share_a_batch(server: LocalServer) -> None:
    made = grammar.from_regex("[0-9]{3}(-[a-f]{2}){4}")
    asked = [Sampling(temperature=1.0, max_tokens=30, seed=s, ignore_eos=True) for s in range(3)]
    alone = server.complete([server.request([9, 9, s], one) for s, one in enumerate(asked)])
    free = [server.request([9, 9, s], one) for s, one in enumerate(asked)]
    bound = Sampling(temperature=1.0, max_tokens=30, grammar=made)
    *others, kept = server.complete([*free, server.request([1, 2, 3], bound)])
    assert re.fullmatch("[0-9]{3}(-[a-f]{2}){4}", kept.text)
    assert [one.tokens for one in others] == [one.tokens for one in alone]


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_end_where_json_readers_can_hold_them(server: LocalServer, kind: str) -> None:
    """A random model writes digits until it may not any more."""
    schema = {"type": "object", "properties": {"b": {"type": kind}}, "required": ["b"]}
    made = grammar.from_json_schema({**schema, "additionalProperties": False})
    bias = [(id, 100.0) for id in byte_tokenizer().convert_tokens_to_ids(list("123456789"))]
    for answer in answers(server, made, logit_bias=tuple(bias)):
        number = json.loads(answer.text)["b"]
        assert number < 10**119
        assert not re.search("[0-9]{20}", answer.text)


def test_white_space_in_json_is_bounded(server: LocalServer) -> None:
    made = grammar.from_json_schema(PERSON)
    (space,) = byte_tokenizer().encode(" ")
    for answer in answers(server, made, logit_bias=((space, 100.0),)):
        assert " " * 32 in answer.text
        assert " " * 33 not in answer.text


def test_an_output_does_not_wait_for_the_grammar_of_another_one(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that computes starts one while a thread compiles the other."""
    factory = server._loop._grammars.factory
    ready, slow = grammar.from_regex("a"), grammar.from_regex("b+")
    factory.compile(ready)
    begun, may_end = threading.Event(), threading.Event()

    def compile_slowly(*arguments: object, **options: object) -> LLMatcher:
        begun.set()
        assert may_end.wait(30)
        return LLMatcher(*arguments, **options)

    monkeypatch.setattr("triptych.workers.sampling.grammar.LLMatcher", compile_slowly)
    with ThreadPoolExecutor(2) as threads:
        compiled = threads.submit(factory.compile, slow)
        assert begun.wait(10)
        threads.submit(factory.start, ready).result(10)
        assert not compiled.done()
        may_end.set()
        compiled.result(10)
    assert factory.is_ready(slow)


def test_log_probabilities_are_those_of_the_model_itself(server: LocalServer) -> None:
    for answer in answers(server, grammar.from_choices(["yes", "no"]), logprobs=2):
        assert answer.text in {"yes", "no"}
        assert any(entry.token not in dict(entry.top) for entry in answer.logprobs)


def test_an_answer_that_left_its_grammar_ends_and_disturbs_no_other() -> None:
    """As it would if a checkpoint told of tokens that the grammar does not have."""
    made = grammar.from_regex("[0-9]+")
    tokenizer = from_tokenizer(byte_tokenizer(), eos_token=1)
    digit, letter = tokenizer.tokenize_str("7x")
    matcher = LLMatcher(tokenizer, made, log_level=0, limits=grammar.LIMITS)
    bound = [GrammarMatcher(Vocabulary(tokenizer), matcher.deep_copy(), None) for _ in range(2)]
    wants = Sampling(temperature=0.0)
    rows = [SamplerRow(wants, [1], (1,), (digit,), bound[0])]
    rows += [SamplerRow(wants, [1], (1,), (letter,), bound[1]), SamplerRow(wants, [1], (1,))]
    logits = torch.zeros(3, tokenizer.vocab_size)
    logits[:, letter], logits[:, digit] = 2.0, 1.0
    kept, left, free = sample(logits, rows)
    assert (kept.token, free.token) == (digit, letter)
    with pytest.raises(GrammarError, match="cannot go on in its grammar after 1 tokens") as caught:
        left.checked_token()
    assert failed("r", caught.value).status == 400


def test_a_grammar_that_costs_too_much_is_the_clients_error(server: LocalServer) -> None:
    """It is cheap to begin with; what it costs shows when the answer has come some way."""
    rules = [f'x{i}: "a" x{i} | "a"' for i in range(100)]
    made = grammar.from_lark(
        "\n".join(["start: " + " | ".join(f"x{i}" for i in range(100)), *rules])
    )
    for answer in answers(server, made, count=2, logit_bias=((1, -100.0),)):
        assert answer.error is not None
        assert (answer.error.status, answer.error.kind) == (400, "invalid_request_error")
        assert "cannot go on in its grammar" in answer.error.message
        assert answer.text == "a" * len(answer.tokens) != ""
    assert server.pool.stat().request_pages == server.pool.stat().prefix_pages


def test_a_tag_that_is_one_token_is_text_of_the_grammar() -> None:
    """llguidance takes added tokens in angle brackets for special, which no text matches."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)], special_tokens=True)
    tag, special, end = len(tokenizer) - 2, len(tokenizer) - 1, 1
    made = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer) + 3)
    assert made.is_special_token(tag)
    changed = with_text_tokens(made, [tag], [end])
    assert not changed.is_special_token(tag)
    assert changed.is_special_token(special)
    assert changed.vocab_size == made.vocab_size
    rules = grammar.from_lark('start: TEXT "<tool_call>" "x"\nTEXT: "a"')
    matcher = LLMatcher(changed, rules, log_level=0, limits=grammar.LIMITS)
    text = [tokenizer.convert_tokens_to_ids("a"), tag, tokenizer.convert_tokens_to_ids("x")]
    assert matcher.try_consume_tokens(text) == len(text)
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert list(allowed.nonzero()[0]) == [end]
    assert with_text_tokens(made, [], [end]) is made


def test_a_tokenizer_may_know_more_tokens_than_the_model(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<later>", special=True), AddedToken("zz", special=False)])
    tokenizer.save_pretrained(path)
    settings = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20},
        "compressor": {"policy": "uniform:k8v4", "recent_window_tokens": 4},
    }
    with LocalServer(AppConfig.from_mapping(settings), path) as server:
        for answer in answers(server, grammar.from_regex("zzzz|[a-c]{6}")):
            assert re.fullmatch("zzzz|[a-c]{6}", answer.text), answer


@pytest.mark.parametrize(
    ("rules", "shown", "text"),
    [
        ('start: "[TOOL_CALLS]" "[" "]"', False, "[]"),
        ('start: "[TOOL_CALLS]" "f" "[ARGS]" "{" "}"', True, "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_special_tokens_of_calls_of_mistral_are_text_of_the_grammar(
    rules: str, shown: bool, text: str, tmp_path: Path
) -> None:
    """The model was trained on those tokens, not on their letters."""
    tokenizer = byte_tokenizer()
    added = [AddedToken(tag, special=True) for tag in ("[TOOL_CALLS]", "[ARGS]")]
    tokenizer.add_tokens(added, special_tokens=True)
    size = len(tokenizer)
    tags = tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "[ARGS]"])
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20},
    }
    with LocalServer(AppConfig.from_mapping(settings), tmp_path) as server:
        sampling = Sampling(
            temperature=0.0,
            max_tokens=20,
            grammar=grammar.from_lark(rules),
            logit_bias=tuple((tag, 100.0) for tag in tags),
            skip_special_tokens=not shown,
        )
        (answer,) = server.complete([server.request([65, 66], sampling)])
    assert answer.tokens[0] == tags[0]
    assert answer.text == text
    assert not shown or tags[1] in answer.tokens
