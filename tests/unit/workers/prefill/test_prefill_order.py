"""A short prompt behind a long one: who is read first, and that nothing of either changes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from triptych.core.config import AppConfig
from triptych.core.messages import Prefill, Prefilled, Request, Sampling, Tokens
from triptych.core.pages import PagePlan
from triptych.kvpool import LocalPool
from triptych.workers.factory import load_model, make_engines
from triptych.workers.models.facts import describe
from triptych.workers.stage import Engine

CHUNK = 32
LONG, SHORT = 400, 20


@dataclass
class Reader:
    """A prefill engine on its own, and what it has sent."""

    engine: Engine
    pool: LocalPool
    plan: PagePlan
    sent: dict[str, Tokens] = field(default_factory=dict[str, Tokens])
    done: list[Prefilled] = field(default_factory=list[Prefilled])
    steps: int = 0

    def take(self, *requests: Request) -> None:
        assert self.engine.accept(Prefill(requests=requests)) is not None

    def step(self) -> None:
        self.steps += 1
        for send in self.engine.step():
            if isinstance(send.message, Tokens):
                self.sent[send.message.request] = send.message
            elif isinstance(send.message, Prefilled):
                self.done.append(send.message)

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()

    @property
    def order(self) -> list[str]:
        return [message.request for message in self.done]

    def first_logprob(self, request: str) -> tuple[int, float]:
        (one,) = self.sent[request].logprobs
        return one.token, one.logprob


@pytest.fixture
def reader(tiny_model: Path) -> Iterator[Reader]:
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "compressor": {"profile": "none"},
            "prefill": {"max_num_batched_tokens": CHUNK},
        }
    )
    plan = PagePlan.of(config, describe(tiny_model).geometry)
    pool = LocalPool(2000, plan.page_bytes, "reader")
    model_context = load_model(config, plan, tiny_model, ("prefill",))
    (engine,) = make_engines(config, plan, model_context, pool, ("prefill",))
    yield Reader(engine, pool, plan)
    engine.abandon()
    assert pool.check() == []
    pool.close()


def request(name: str, tokens: int) -> Request:
    prompt = random.Random(name).choices(range(2, 250), k=tokens)
    sampling = Sampling(temperature=0.0, max_tokens=8, logprobs=0)
    return Request(id=name, prompt=tuple(prompt), sampling=sampling, reply_to="client")


def test_a_short_prompt_overtakes_a_long_one_at_the_next_chunk(reader: Reader) -> None:
    reader.take(request("long", LONG))
    reader.step()
    reader.take(request("short", SHORT))
    reader.step()
    assert reader.order == ["short"]
    assert reader.engine.requests() == ["long"]
    reader.finish()
    assert reader.order == ["short", "long"]
    assert reader.steps == -(-(LONG + SHORT) // CHUNK)  # no step was wasted


def test_prompts_of_one_length_are_read_as_they_came(reader: Reader) -> None:
    names = [f"r{number}" for number in range(4)]
    for name in names:
        reader.take(request(name, 3 * CHUNK))
        reader.step()
    reader.finish()
    assert reader.order == names


def test_a_long_prompt_is_overtaken_for_no_more_than_twice_its_length(reader: Reader) -> None:
    long = 4 * CHUNK
    reader.take(request("long", long))
    for number in range(30):
        reader.take(request(f"short{number}", CHUNK))
        reader.step()
    overtakers = reader.order.index("long")
    assert 0 < overtakers <= 2 * long // CHUNK
    reader.finish()


def test_nothing_of_an_answer_changes_when_its_prompt_is_interrupted(reader: Reader) -> None:
    reader.take(request("long", LONG))
    reader.finish()
    alone = reader.first_logprob("long")
    reader.take(request("short", SHORT))
    reader.finish()
    short_alone = reader.first_logprob("short")
    reader.pool.withdraw(["long", "short"])
    reader.done.clear()
    reader.take(request("long", LONG))
    for number in range(3):
        reader.step()
        reader.take(request(f"other{number}", SHORT))
    reader.take(request("short", SHORT))
    reader.finish()
    assert reader.order[-1] == "long"
    for name, (token, logprob) in {"long": alone, "short": short_alone}.items():
        drawn, again = reader.first_logprob(name)
        assert drawn == token
        # A chunk sees those before it in 16 bits, so where chunks begin shows in the last digits.
        assert np.isclose(again, logprob, atol=2e-2)


def test_a_cancelled_prompt_gives_way_and_leaves_nothing(reader: Reader) -> None:
    reader.take(request("long", LONG))
    reader.step()
    reader.take(request("short", SHORT), request("later", LONG))
    reader.engine.cancel(["long", "later"])
    reader.finish()
    assert reader.order == ["short"]
    reader.engine.cancel(["short"])
    assert reader.pool.stat().held_pages == 0
