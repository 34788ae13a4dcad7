"""Prompts that are read some layers at a time, and encoded meanwhile."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.learned import networks_beside, save_networks
from tests.tiny import DIFFKV, save_tiny_model
from tests.unit.workers.settled import booked_in_the_end
from triptych.core.config import AppConfig
from triptych.core.errors import PoolExhausted, StageLost
from triptych.core.handles import KVHandle
from triptych.core.layout import Geometry
from triptych.core.messages import (
    Compress,
    Compressed,
    CompressItem,
    Encode,
    Expect,
    Finished,
    Layers,
    LayersEncoded,
    Message,
    Planned,
    Prefill,
    Prefilled,
    Request,
    Sampling,
    Send,
)
from triptych.core.pages import PagePlan
from triptych.kvpool import LocalPool
from triptych.workers.compress.attention_predictor import AttentionPredictor
from triptych.workers.compress.raw_tokens import RawTokens
from triptych.workers.factory import load_model, make_engines
from triptych.workers.local import Completion, LocalServer
from triptych.workers.models.facts import describe
from triptych.workers.stage import Engine

LAYERS, CHUNK = 7, 60
LENGTHS = (40, 61, 130, 300, 410)
"""The first is read in one step; of the last a layer is nearly a step."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny_model(tmp_path_factory.mktemp("seven-layers"), layers=LAYERS)
    save_networks(made)
    return made


def config(
    at_once: int,
    *,
    chunk: int = CHUNK,
    capacity: int = 32 << 20,
    method: Mapping[str, object] | None = None,
) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": capacity, "extent_pages": 16, "prefix_bytes": 0},
            "compressor": {"profile": "none", **DIFFKV, "alpha_low": 0.008, **(method or {})},
            "prefill": {"max_num_batched_tokens": chunk},
            "experimental": {"layers_at_once": at_once},
        }
    )


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * tokens + seed).choices(range(2, 258), k=tokens)


def greedy(count: int, **more: object) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0, **more)


def answers(server: LocalServer, lengths: tuple[int, ...] = LENGTHS) -> list[Completion]:
    """One after the other, so that no prompt is cut where another one ends."""
    asked = [server.request(prompt(count), greedy(20)) for count in lengths]
    return [answer for one in asked for answer in server.complete([one])]


@pytest.mark.parametrize(
    ("at_once", "policy"),
    [(1, "diffkv"), (2, "diffkv"), (3, "diffkv"), (1, "learned:score"), (3, "learned:score")],
)
def test_parts_give_the_answers_that_a_whole_prompt_gives_bit_for_bit(
    model: Path, at_once: int, policy: str
) -> None:
    method = {"policy": policy, "learned": networks_beside(model)}
    with LocalServer(config(0, chunk=512, method=method), model) as server:
        whole = answers(server)
    heard = list[Message]()
    with LocalServer(config(at_once, method=method), model, watch=heard.append) as server:
        in_parts = answers(server)
        assert server.pool.stat().request_pages == 0
        assert server.pool.allocated_pages == 0
    for one, other in zip(whole, in_parts, strict=True):
        assert one.tokens == other.tokens
        assert [e.logprob for e in one.logprobs] == [e.logprob for e in other.logprobs]
        assert one.report is not None
        assert other.report is not None
        # Each group of layers has small pages of its own, and a page that is not full of them.
        more = other.report.stored_bytes - one.report.stored_bytes
        assert 0 <= more <= LAYERS * server.plan.page_bytes
        assert one.report == replace(other.report, stored_bytes=one.report.stored_bytes)
    handles = [message.handle for message in heard if isinstance(message, Prefilled)]
    rows = [len(handle.runs[0].tokens) // 4 for handle in handles if handle is not None]
    assert min(rows) < max(rows) == 2 * LAYERS  # some came with their last layers only


def test_parts_are_scored_by_the_networks_of_their_layers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those of the first layers for all, pages would have other classes."""
    method = {"policy": "learned:score", "learned": networks_beside(model)}
    write, firsts = AttentionPredictor.write, list[int]()

    def by_the_first(
        predictor: AttentionPredictor, raw: RawTokens, tokens: int, first_layer: int
    ) -> None:
        firsts.append(first_layer)
        write(predictor, raw, tokens, 0)

    with LocalServer(config(2, method=method), model) as server:
        (right,) = answers(server, (300,))
    monkeypatch.setattr(AttentionPredictor, "write", by_the_first)
    with LocalServer(config(2, method=method), model) as server:
        (wrong,) = answers(server, (300,))
    assert sorted(firsts) == list(range(LAYERS))  # 300 tokens are a step with one layer at a time
    assert right.error is wrong.error is None
    assert right.logprobs != wrong.logprobs


def test_less_memory_than_the_raw_pages_of_a_prompt_will_do(model: Path) -> None:
    with LocalServer(config(1), model) as server:
        raw = server.plan.raw.pages(410) * server.plan.geometry.head_rows * server.plan.page_bytes
    capacity = raw  # so that nothing is left to encode into
    with LocalServer(config(0, capacity=capacity), model) as server:
        (refused,) = answers(server, (410,))
    assert refused.error is not None
    assert refused.error.status == 400
    with LocalServer(config(1, capacity=capacity), model) as server:
        served = answers(server, (410, 410, 410))
        assert server.pool.allocated_pages == 0
    assert [answer.finish for answer in served] == ["length"] * 3


def test_nothing_is_left_of_a_prompt_whose_client_goes_away(model: Path) -> None:
    with LocalServer(config(1), model) as server:
        for _ in range(8):
            server.complete([server.request(prompt(3), greedy(1))])
            stream = server.stream([server.request(prompt(410), greedy(300))])
            other = server.stream([server.request(prompt(5), greedy(2))])
            next(other)
            other.close()
            stream.close()
        server.complete([server.request(prompt(3), greedy(2))])
        assert booked_in_the_end(server) == {}
        assert server.pool.stat().request_pages == 0
        assert server.pool.allocated_pages == 0


def test_an_answer_of_one_token_leaves_nothing_with_the_compressor(model: Path) -> None:
    with LocalServer(config(1), model) as server:
        (answer,) = server.complete([server.request(prompt(410), greedy(1))])
        assert answer.finish == "length"
        server.complete([server.request(prompt(3), greedy(2))])
        assert booked_in_the_end(server) == {}
        assert server.pool.allocated_pages == 0


def test_a_prompt_whose_tokens_are_scored_is_read_whole(model: Path) -> None:
    asked = prompt(200)
    with LocalServer(config(1), model) as server:
        scored, plain = server.complete(
            [
                server.request(asked, greedy(20, prompt_logprobs=1)),
                server.request(asked, greedy(20)),
            ]
        )
    assert scored.prompt_logprobs is not None
    assert len(list(scored.prompt_logprobs.rows())) == 199
    assert scored.tokens == plain.tokens


# ------------------------------------------------------------------ the engines, message by message


class Bench:
    """A prefill engine and a compressor with a pool each can take from, and a request between."""

    def __init__(self, model: Path, pages: int = 4000) -> None:
        settings = config(2)
        facts = describe(model)
        self.plan = PagePlan.of(settings, facts.geometry, is_plain=True)
        self.pool = LocalPool(pages, self.plan.page_bytes, "worker", None, None, None)
        model_context = load_model(settings, self.plan, model, ("prefill", "compress"))
        self.prefill, self.compress = make_engines(
            settings, self.plan, model_context, self.pool, ("prefill", "compress")
        )
        self.request = Request(
            id="r", prompt=tuple(prompt(130)), sampling=greedy(20), reply_to="client"
        )

    def begin(self) -> None:
        message = Prefill(requests=(self.request,), encoders=("compressor",), reader="reader")
        assert self.prefill.accept(message) == ()

    def run(self, engine: Engine, most: int = 100) -> list[Send]:
        sends = list[Send]()
        while engine.has_work() and most:
            sends += engine.step()
            most -= 1
        return sends

    def read(self) -> list[Send]:
        return [send for send in self.run(self.prefill) if send.to != "client"]

    def expect(self) -> None:
        assert self.take(Expect(requests=("r",))) == []

    def take(self, message: Message) -> list[Message]:
        return [send.message for send in self.compress.accept(message) or ()]

    def encoded(self, first: int) -> LayersEncoded:
        return LayersEncoded(request="r", first=first)


@pytest.fixture
def bench(model: Path) -> Iterator[Bench]:
    made = Bench(model)
    yield made
    made.pool.close()


def layers_of(sends: list[Send]) -> list[Layers]:
    return [send.message for send in sends if isinstance(send.message, Layers)]


def test_no_more_than_two_parts_are_in_raw_pages(bench: Bench) -> None:
    bench.begin()
    first, second = layers_of(bench.read())
    assert (first.first, second.first) == (0, 2)
    assert not bench.prefill.has_work()
    rows, kv_heads = len(first.handle.runs[0].tokens) // 4, bench.plan.geometry.kv_heads
    assert rows == 2 * kv_heads
    raw = bench.plan.raw.pages(130) * rows
    assert bench.pool.stat().request_pages == 2 * raw
    bench.prefill.accept(bench.encoded(0))
    (third,) = layers_of(bench.read())
    assert third.first == 4
    bench.prefill.accept(bench.encoded(2))
    (prefilled,) = [send.message for send in bench.read()]
    assert isinstance(prefilled, Prefilled)
    assert prefilled.handle is not None
    assert len(prefilled.handle.runs[0].tokens) == 4 * kv_heads  # the seventh layer


def test_a_word_that_comes_twice_counts_once(bench: Bench) -> None:
    bench.begin()
    bench.read()
    for _ in range(3):
        bench.prefill.accept(bench.encoded(0))
    bench.prefill.accept(LayersEncoded(request="another", first=2))
    assert [part.first for part in layers_of(bench.read())] == [4]


def test_an_order_waits_for_layers_that_are_on_their_way(bench: Bench) -> None:
    """Layers come straight from the prefill worker, the order through the router."""
    bench.begin()
    parts = layers_of(bench.read())
    bench.expect()
    for part in parts[:2]:
        bench.take(part)
        bench.run(bench.compress)
    bench.prefill.accept(bench.encoded(0))
    (third,) = layers_of(bench.read())
    bench.prefill.accept(bench.encoded(2))
    (prefilled,) = [send.message for send in bench.read()]
    order = Compress(items=(CompressItem(request="r", handle=prefilled.handle),))
    assert bench.take(order) == []
    assert bench.compress.requests() == ["r"]
    (planned,) = bench.take(third)
    assert isinstance(planned, Planned)
    assert bench.take(Encode(requests=("r",), arena="")) == []
    sends = [send.message for send in bench.run(bench.compress)]
    encoded, compressed = sends
    assert encoded == bench.encoded(4)
    assert isinstance(compressed, Compressed)
    handle: KVHandle = compressed.handle
    counts = [np.frombuffer(run.tokens, "<i4") for run in handle.runs]
    assert {count.size for count in counts} == {bench.plan.geometry.head_rows}
    assert bench.pool.stat().request_pages == planned.pages
    assert bench.pool.allocated_pages == 0


def test_layers_without_those_before_them_end_the_request(bench: Bench) -> None:
    bench.begin()
    _, second = layers_of(bench.read())
    bench.expect()
    (finished,) = bench.take(second)
    assert isinstance(finished, Finished)
    assert finished.error is not None
    assert "layers from 2 on behind 0 head rows" in finished.error.message
    assert bench.compress.requests() == []
    assert not bench.compress.has_work()


def test_layers_of_a_prefill_worker_that_is_gone_end_the_request(bench: Bench) -> None:
    bench.begin()
    first, second = layers_of(bench.read())
    bench.expect()
    assert bench.take(first) == []
    bench.run(bench.compress)
    bench.prefill.cancel(["r"])
    (finished,) = bench.take(second)
    assert isinstance(finished, Finished)
    assert finished.error is not None
    assert finished.error.code == StageLost.code
    assert bench.pool.allocated_pages == 0
    assert bench.pool.stat().request_pages == 0


def test_layers_may_come_before_the_word_that_they_will(bench: Bench) -> None:
    bench.begin()
    for part in layers_of(bench.read()):
        assert bench.take(part) == []
    assert not bench.compress.has_work()
    assert bench.compress.requests() == []
    bench.expect()
    assert [send.message for send in bench.run(bench.compress)] == [
        bench.encoded(0),
        bench.encoded(2),
    ]


@pytest.mark.parametrize("how", ["cancelled", "abandoned"])
def test_layers_that_come_too_late_stay_with_who_read_them(bench: Bench, how: str) -> None:
    """Nobody would ever tell the compressor to let them go."""
    bench.begin()
    first, _ = layers_of(bench.read())
    bench.expect()
    if how == "cancelled":
        bench.compress.cancel(["r"])
    else:  # the router died; its workers notice one after the other
        bench.compress.abandon()
    assert bench.take(first) == []
    assert not bench.compress.has_work()
    bench.prefill.cancel(["r"])
    assert bench.pool.stat().request_pages == 0
    assert bench.pool.allocated_pages == 0


def test_an_order_without_its_layers_ends_the_request(bench: Bench) -> None:
    bench.begin()
    first, _ = layers_of(bench.read())
    (finished,) = bench.take(Compress(items=(CompressItem(request="r", handle=first.handle),)))
    assert isinstance(finished, Finished)
    assert finished.error is not None
    assert "4 head rows, the model 14" in finished.error.message
    assert bench.compress.requests() == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_cancelled_request_gives_back_what_was_encoded(bench: Bench, steps: int) -> None:
    bench.begin()
    bench.expect()
    for part in layers_of(bench.read()):
        bench.take(part)
    bench.run(bench.compress, steps)
    bench.compress.cancel(["r"])
    bench.prefill.cancel(["r"])
    assert bench.pool.allocated_pages == 0
    assert bench.pool.stat().request_pages == 0


def test_without_pages_to_encode_into_the_request_ends(bench: Bench) -> None:
    bench.begin()
    bench.expect()
    for part in layers_of(bench.read()):
        bench.take(part)
    others = bench.pool.allocate(bench.pool.capacity_pages - bench.pool.stat().request_pages)
    (send,) = bench.run(bench.compress)
    assert isinstance(send.message, Finished)
    assert send.message.error is not None
    assert send.message.error.code == PoolExhausted.code
    assert bench.compress.requests() == []
    bench.pool.free(others)
    assert bench.pool.stat().request_pages == 0


def test_without_pages_to_read_into_the_request_ends(bench: Bench) -> None:
    bench.begin()
    others = bench.pool.allocate(bench.pool.capacity_pages - 10)
    (send,) = bench.run(bench.prefill)
    assert isinstance(send.message, Finished)
    assert send.message.error is not None
    assert bench.prefill.requests() == []
    bench.pool.free(others)


def test_shorter_prompts_are_read_between_layers(bench: Bench) -> None:
    """And while layers wait for their compressor."""
    bench.begin()
    bench.read()
    short = replace(bench.request, id="s", prompt=tuple(prompt(20)))
    bench.prefill.accept(Prefill(requests=(short,)))
    (prefilled,) = [send.message for send in bench.read()]
    assert prefilled.request == "s"
    assert bench.prefill.requests() == ["r"]


# ------------------------------------------------------------------ which prompts are cut, and how


def plan_of(at_once: int, *, prefixes: bool = False, policy: str = "uniform:k8v4") -> PagePlan:
    settings = AppConfig.from_mapping(
        {
            "model": {"name": "tiny"},
            "pool": {"kv_cache_memory_bytes": 256 << 20, "prefix_bytes": "auto" if prefixes else 0},
            "compressor": {"policy": policy},
            "experimental": {"layers_at_once": at_once},
        }
    )
    return PagePlan.of(settings, Geometry(30, 3, 64), is_plain=True)


@pytest.mark.parametrize(
    ("tokens", "layers"), [(512, 30), (513, 2), (2048, 2), (10_000, 1), (15_360, 1), (15_361, 30)]
)
def test_a_part_is_never_more_than_a_step(tokens: int, layers: int) -> None:
    assert plan_of(2).layers_of(tokens) == layers


def test_what_cannot_be_cut_is_not() -> None:
    assert plan_of(0).layers_of(2048) == 30
    assert plan_of(2, prefixes=True).layers_of(2048) == 30
    assert plan_of(2, policy="uniform:fp16").layers_of(2048) == 30
