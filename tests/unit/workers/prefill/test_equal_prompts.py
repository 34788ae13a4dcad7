"""Requests with equal prompts: computed once, and answered as each would be alone."""

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import DIFFKV
from triptych.core.config import AppConfig
from triptych.core.messages import (
    Cancel,
    Finished,
    Prefill,
    Prefilled,
    Request,
    Sampling,
    Send,
    Submit,
    Tokens,
)
from triptych.core.pages import PagePlan
from triptych.kvpool import LocalPool
from triptych.workers.factory import load_model, make_engines
from triptych.workers.kv.handle_codec import unpack_run
from triptych.workers.local import CLIENT, Completion, LocalServer
from triptych.workers.loop import Work
from triptych.workers.models.facts import describe
from triptych.workers.prefill.prefill_engine import PrefillEngine
from triptych.workers.stage import Engine

CHUNK = 32
PROMPT = 150
GREEDY = Sampling(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)


@dataclass
class Prefills:
    """A prefill engine on its own, and what it has sent."""

    engine: PrefillEngine
    pool: LocalPool
    plan: PagePlan
    tokens: dict[str, Tokens] = field(default_factory=dict[str, Tokens])
    done: dict[str, Prefilled] = field(default_factory=dict[str, Prefilled])
    refused: list[str] = field(default_factory=list[str])
    steps: int = 0

    def take(self, *requests: Request) -> None:
        assert self.engine.accept(Prefill(requests=requests)) is not None

    def step(self) -> None:
        self.steps += 1
        for send in self.engine.step():
            match send.message:
                case Tokens():
                    self.tokens[send.message.request] = send.message
                case Prefilled():
                    self.done[send.message.request] = send.message
                case Finished():
                    self.refused.append(send.message.request)
                case _:
                    raise AssertionError(send)

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()

    def pages(self, request: str) -> np.ndarray:
        """Bytes of the raw pages of a prompt, in the order of its tokens."""
        handle = self.done[request].handle
        assert handle is not None
        rows = self.plan.geometry.head_rows
        _, ids = unpack_run(handle.runs[0], self.plan.raw, rows, self.pool.capacity_pages)
        return self.pool.arena.data[ids]


def engine_of(model: Path, pages: int) -> Prefills:
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "compressor": {"profile": "none", **DIFFKV},
            "prefill": {"max_num_batched_tokens": CHUNK},
        }
    )
    plan = PagePlan.of(config, describe(model).geometry)
    pool = LocalPool(pages, plan.page_bytes, "prefill")
    context = load_model(config, plan, model, ("prefill",))
    (engine,) = make_engines(config, plan, context, pool, ("prefill",))
    assert isinstance(engine, PrefillEngine)
    return Prefills(engine, pool, plan)


@pytest.fixture
def prefills(tiny_model: Path) -> Iterator[Prefills]:
    found = engine_of(tiny_model, 2000)
    yield found
    found.engine.abandon()
    assert found.pool.check() == []
    assert found.pool.stat().request_pages == 0
    found.pool.close()


def request(name: str, seed: int = 0, **more: object) -> Request:
    prompt = tuple(random.Random(seed).choices(range(2, 250), k=PROMPT))
    one = Request(id=name, prompt=prompt, sampling=GREEDY, reply_to="client")
    return replace(one, **more)  # type: ignore[arg-type]


STEPS = -(-PROMPT // CHUNK)


def test_equal_prompts_are_computed_once(prefills: Prefills) -> None:
    prefills.take(*(request(name) for name in "abc"))
    prefills.step()
    prefills.take(request("d"))
    assert prefills.engine.requests() == list("abcd")
    prefills.finish()
    assert prefills.steps == STEPS
    assert list(prefills.done) == list("abcd")
    first = prefills.tokens["a"]
    for name in "bcd":
        assert replace(prefills.tokens[name], request="a") == first
        assert (prefills.pages(name) == prefills.pages("a")).all(), "significance included"
    leases = {done.handle.lease_ref.lease for done in prefills.done.values() if done.handle}
    assert len(leases) == 4
    assert prefills.pool.stat().request_pages == 4 * prefills.pages("a").shape[0]


def test_each_request_has_a_sampler_of_its_own(prefills: Prefills) -> None:
    drawn = [Sampling(temperature=5.0, max_tokens=8, seed=seed) for seed in range(6)]
    prefills.take(*(request(f"r{seed}", sampling=one) for seed, one in enumerate(drawn)))
    prefills.finish()
    assert prefills.steps == STEPS
    together = [prefills.done[f"r{seed}"].first_token for seed in range(6)]
    assert len(set(together)) > 1
    prefills.take(request("alone", sampling=drawn[3]))
    prefills.finish()
    assert prefills.done["alone"].first_token == together[3]


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "another"},
        {"cached_at_most": 0},
        {"seed": 1},
        {"sampling": replace(GREEDY, prompt_logprobs=0)},
    ],
)
def test_requests_that_differ_are_computed_each(
    prefills: Prefills, other: dict[str, object]
) -> None:
    prefills.take(request("a"), request("b", **other))  # type: ignore[arg-type]
    prefills.finish()
    assert prefills.steps == -(-2 * PROMPT // CHUNK)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("gone", ["a", "b", "ab", "abc"])
def test_a_cancelled_request_leaves_the_prompt_to_the_others(
    prefills: Prefills, steps: int, gone: str
) -> None:
    prefills.take(*(request(name) for name in "abc"))
    for _ in range(steps):
        prefills.step()
    prefills.engine.cancel(list(gone))
    left = [name for name in "abc" if name not in gone]
    assert prefills.engine.requests() == left
    prefills.finish()
    assert list(prefills.done) == left
    assert prefills.steps == (STEPS if left else steps)


def test_requests_that_end_with_their_first_token_take_no_pages(prefills: Prefills) -> None:
    short = replace(GREEDY, max_tokens=1)
    prefills.take(request("a", sampling=short), request("b"), request("c", sampling=short))
    prefills.finish()
    handles = {name: done.handle is not None for name, done in prefills.done.items()}
    assert handles == {"a": False, "b": True, "c": False}


def test_a_copy_that_finds_no_pages_refuses_its_request_alone(tiny_model: Path) -> None:
    whole = engine_of(tiny_model, 2000)
    whole.take(request("a"))
    whole.finish()
    pages = whole.pages("a").shape[0]
    whole.engine.abandon()
    whole.pool.close()
    small = engine_of(tiny_model, 2 * pages + pages // 2)
    small.take(*(request(name) for name in "abc"))
    small.finish()
    assert (sorted(small.done), small.refused) == (["a", "b"], ["c"])
    small.engine.abandon()
    assert small.pool.check() == []
    small.pool.close()


# -------------------------------------------------------------------- all stages


def server_of(model: Path, policy: Mapping[str, object], prefix_bytes: int | str) -> LocalServer:
    settings = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {
                "kv_cache_memory_bytes": 16 << 20,
                "extent_pages": 64,
                "prefix_bytes": prefix_bytes,
            },
            "compressor": {"profile": "none", **policy},
            "prefill": {"max_num_batched_tokens": 48},
        }
    )
    return LocalServer(settings, model)


def outcome(one: Completion) -> tuple[list[int], list[float]]:
    assert one.error is None
    return one.tokens, [token.logprob for token in one.logprobs]


POLICIES: dict[str, Mapping[str, object]] = {
    "diffkv": DIFFKV,
    "uniform:k8v4": {"policy": "uniform:k8v4"},
    "16 bits": {"policy": "uniform:fp16"},
}


@pytest.mark.parametrize("prefix_bytes", ["auto", 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_requests_sent_alone(
    tiny_model: Path, policy: str, prefix_bytes: int | str
) -> None:
    prompt = random.Random(0).choices(range(2, 250), k=PROMPT)
    samplings = [
        Sampling(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0),
        *(
            Sampling(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True, logprobs=0)
            for seed in range(3)
        ),
    ]
    alone = list[tuple[list[int], list[float]]]()
    for sampling in samplings:
        with server_of(tiny_model, POLICIES[policy], prefix_bytes) as server:
            (answer,) = server.complete([server.request(prompt, sampling)])
        alone.append(outcome(answer))
    with server_of(tiny_model, POLICIES[policy], prefix_bytes) as server:
        answers = server.complete([server.request(prompt, one) for one in samplings])
        assert server.counters.get("placement:equal_prompt", 0) == 3 * (prefix_bytes != 0)
        stats = server.pool.stat()
        assert stats.request_pages == stats.prefix_pages
    assert [outcome(one) for one in answers] == alone


@pytest.mark.parametrize("gone", [[0], [0, 1], [2], [0, 1, 2, 3]])
def test_clients_that_leave_take_nothing_from_the_others(tiny_model: Path, gone: list[int]) -> None:
    """While the prompt is computed, the client leaves whose request it was, or another one."""
    prompt = random.Random(0).choices(range(2, 250), k=PROMPT)
    with server_of(tiny_model, DIFFKV, "auto") as server:
        alone = outcome(server.complete([server.request(prompt, GREEDY)])[0])
    with server_of(tiny_model, DIFFKV, "auto") as server:
        requests = [server.request(prompt, GREEDY) for _ in range(4)]
        follower = server.request([*prompt[:128], *range(2, 30)], GREEDY)
        left = [one for index, one in enumerate(requests) if index not in gone]
        cancel = Cancel(requests=tuple(requests[index].id for index in gone))
        steps = 0

        def around(engine: Engine, work: Work) -> Iterable[Send] | None:
            nonlocal steps
            steps += engine.stage == "prefill"
            if steps == 3:
                steps += 1
                server._to_router(cancel, CLIENT)
            return work()

        for index in gone:
            server._to_router(Submit(request=requests[index]), CLIENT)
        with server.instrumented(around):
            answers = server.complete([*left, follower])
        while server.booked_bytes:
            time.sleep(0.01)
        stats = server.pool.stat()
        assert stats.request_pages == stats.prefix_pages
        assert server.counters["cancelled"] == len(gone)
    assert [outcome(one) for one in answers[:-1]] == [alone] * len(left)
    assert answers[-1].error is None


def test_requests_that_begin_alike_read_their_beginning_from_the_cache(tiny_model: Path) -> None:
    beginning = random.Random(1).choices(range(2, 250), k=PROMPT)
    prompts = [[*beginning, *random.Random(n).choices(range(2, 250), k=9)] for n in (2, 3, 4)]
    alone = list[tuple[list[int], list[float]]]()
    for prompt in prompts:
        with server_of(tiny_model, DIFFKV, "auto") as server:
            (answer,) = server.complete([server.request(prompt, GREEDY)])
        alone.append(outcome(answer))
    with server_of(tiny_model, DIFFKV, "auto") as server:
        answers = server.complete([server.request(prompt, GREEDY) for prompt in prompts])
        block = server.plan.block_tokens
        assert server.counters["wait:shared_prompt"] == 2
        assert server.counters["shared_prompt:tokens"] == 2 * (PROMPT // block * block)
    assert [outcome(one) for one in answers] == alone
    assert [one.cached_tokens for one in answers] == [0, *2 * [PROMPT // block * block]]


@pytest.mark.parametrize("prompts", ["equal", "others"])
def test_an_answer_that_cannot_begin_fails_alone(
    prefills: Prefills, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = prefills.engine.answers.start
    seeds = [0, 0, 0] if prompts == "equal" else [1, 2, 3]
    asked = [request(name, seed) for name, seed in zip("abc", seeds, strict=True)]
    prefills.take(*asked)
    prefills.finish()
    expected = {name: prefills.done[name].first_token for name in "ac"}
    prefills.done.clear()

    def start(one: Request) -> object:
        if one.id == "b":
            raise ValueError("no such grammar")
        return begin(one)

    monkeypatch.setattr(type(prefills.engine.answers), "start", lambda _, one: start(one))
    prefills.take(*asked)
    prefills.finish()
    assert prefills.refused == ["b"]
    assert {name: done.first_token for name, done in prefills.done.items()} == expected


def test_a_prompt_that_cannot_begin_fails_alone_and_keeps_no_pages(
    prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(prefills.engine._statistics)
    make, made = kind.make, list[object]()

    def fail_second(*arguments: object) -> object:
        made.append(arguments)
        if len(made) == 2:
            raise RuntimeError("out of memory on a device")
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "make", fail_second)
    freed = list[int]()
    free = prefills.engine.pool.free
    monkeypatch.setattr(
        prefills.engine.pool, "free", lambda ids: freed.append(ids.size) or free(ids)
    )
    prefills.take(*(request(name, seed) for seed, name in enumerate("abc")))
    prefills.finish()
    assert prefills.refused == ["b"]
    assert list(prefills.done) == ["a", "c"]
    assert sum(freed) == prefills.pages("a").shape[0]  # what was allocated for it
