"""Several shards behind one ingress: their names, and what they say together."""

import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import RayActorError
from ray.serve._private.build_app import build_app

from tests.unit.deployments.monitoring.test_dashboard_state import (
    board,
    handle,
    owner,
    page_map,
    trace,
)
from triptych.cli.checks.validate import actors_of
from triptych.core.config import AppConfig
from triptych.core.errors import Cancelled, Overloaded, QueueFull, ShuttingDown
from triptych.core.layout import Geometry
from triptych.core.messages import (
    Cancel,
    Drain,
    Failed,
    FinishReason,
    Request,
    Sampling,
    Submit,
    Tokens,
    failed,
)
from triptych.core.pages import PagePlan
from triptych.deployments.app import bind_deployments
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.monitoring.dashboard_state import merge_states
from triptych.deployments.monitoring.status import Status
from triptych.deployments.replicas import router_client
from triptych.deployments.replicas.router_client import RouterClient
from triptych.deployments.replicas.router_stats import RouterStats
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.router import RouterSnapshot, WorkerLoad

TWO = {"actor": {"num_replicas": 2}}
STAGES = {"prefill": TWO, "compressor": TWO, "decode": {"actor": {"num_replicas": 4}}}


def plans(shards: int, run_dir: Path = Path("/tmp/app"), longest_tokens: int = 0) -> list[AppPlan]:
    model = {"max_model_len": longest_tokens or "auto"}
    config = AppConfig.from_mapping({"router": {"shards": shards}, "model": model, **STAGES})
    first = AppPlan(
        config=config,
        model_path=Path(),
        pages=PagePlan.of(config, Geometry(layers=30, kv_heads=3, head_dim=64)),
        context_tokens=8192,
        revision="hash",
        run_dir=run_dir,
        shards=shards,
    )
    return [first.of_shard(config, index) for index in range(shards)]


def test_no_two_shards_share_a_socket_or_a_deployment() -> None:
    one, two = plans(2)
    assert one.router_addresses == two.router_addresses
    assert one.router_addresses == (one.router_address, two.router_address)
    assert len({one.router_address, two.router_address, one.pool_address, two.pool_address}) == 4
    assert one.turns == two.turns  # they share the cores of the machine
    built = build_app(bind_deployments([one, two]), name="triptych")
    replicas = {part.name: part._deployment_config.num_replicas for part in built.deployments}
    each = {"Router": 1, "Pool": 1, "Prefill": 1, "Compressor": 1, "Decode": 2}
    shards = {f"{name}-{shard}": count for name, count in each.items() for shard in range(2)}
    assert replicas == {"Ingress": 1, **shards}


def test_one_shard_has_the_names_that_it_always_had() -> None:
    (plan,) = plans(1)
    assert plan.router_addresses == ("unix:/tmp/app/router.sock",)
    assert plan.pool_address == "unix:/tmp/app/pool.sock"
    built = build_app(bind_deployments([plan]), name="triptych")
    names = {"Ingress", "Router", "Pool", "Prefill", "Compressor", "Decode"}
    assert {part.name for part in built.deployments} == names


def test_what_a_configuration_starts_counts_routers_and_pools() -> None:
    config = AppConfig.from_mapping({"router": {"shards": 2}, **STAGES})
    copies = {name: actor["num_replicas"] for name, actor in actors_of(config).items()}
    assert copies == {
        "ingress": 1, "router": 2, "pool": 2, "prefill": 2, "compressor": 2, "decode": 4
    }  # fmt: skip


# ------------------------------------------------------------------ what shards say together


def status(arena: str, *stages: Any, booked: int = 5, waiting: int = 1) -> Status:
    workers = tuple(
        WorkerLoad(f"{stage}-{arena}", "", arena, (stage,), is_full=False) for stage in stages
    )
    snapshot = RouterSnapshot(
        requests={"waiting": waiting, "decoding": 2},
        booked_bytes={arena: booked},
        capacity_bytes=100,
        blocked_reason="no_bytes" if waiting > 1 else "",
        oldest_waiting_s=float(waiting),
        counters={"finished": 3},
        workers=workers,
    )
    return Status(snapshot, (None,), ())


WHOLE = ("prefill", "compress", "decode")


def test_the_books_of_shards_add_up() -> None:
    one, two = status("a", *WHOLE), status("b", "prefill", booked=7, waiting=4)
    both = Status.of([one, two])
    assert both.router.requests == {"waiting": 5, "decoding": 4}
    assert both.router.booked_bytes == {"a": 5, "b": 7}
    assert (both.router.capacity_bytes, both.router.blocked_reason) == (200, "no_bytes")
    assert both.router.oldest_waiting_s == 4.0
    assert both.router.counters == {"finished": 6}
    gauges = both.gauges()
    assert gauges["triptych_router_booked_bytes"] == 12
    assert gauges['triptych_workers{stage="prefill"}'] == 2
    assert gauges["triptych_pool_up"] == 0
    assert Status.of([one]) == one


def test_boards_of_shards_are_one_board() -> None:
    first = board(
        page_map([0, 1, 2], owner("request", "d", "x"), owner("extent", "d")),
        (trace(1, "x"),),
        x=handle(fp16=[1]),
    )
    second = board(
        page_map([1, 2, 0], owner("request", "e", "y"), owner("extent", "e")),
        (trace(1, "y"),),
        y=handle(k8v4=[0]),
    )
    boards = [
        replace(one, shards=2, shard=shard).json() for shard, one in enumerate([first, second])
    ]
    seen: Any = merge_states(boards)
    assert [one["number"] for one in seen["requests"]] == [1, 2]
    assert seen["router"]["states"] == {"waiting": 2}
    assert (seen["router"]["booked_bytes"], seen["router"]["capacity_bytes"]) == (10, 18)
    assert (seen["pool"]["pages"], seen["pool"]["page_bytes"]) == (80, 256)
    assert len(seen["workers"]) == 2
    shown = seen["map"]
    kinds = [shown["kinds"][kind] for kind in base64.b64decode(shown["kind_of"])]
    assert kinds == ["free", "fp16", "stock", "k8v4", "stock", "free"]
    owners = np.frombuffer(base64.b64decode(shown["owner_of"]), "<u2")
    assert list(owners) == [0, 1, 0, 2, 1, 0]
    assert shown["workers"] == ["d", "e"]
    assert (shown["pages"], shown["stride"]) == (6, 1)
    assert merge_states(boards[:1]) is boards[0]


class FakeRouter:
    """A handle of a router that answers, or of one that is dead."""

    def __init__(self, is_dead: bool = False, **answers: object) -> None:
        async def call(answer: object) -> object:
            if is_dead:
                raise RayActorError
            return answer

        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(remote=lambda *_, a=answer: call(a)))


def stats(routers: Sequence[FakeRouter], *, up: str) -> RouterStats:
    made = RouterClient(plans(len(routers))[0], cast("Any", routers))
    for shard in up:
        made.shards.found(shard)
    return made.stats


async def test_the_ingress_asks_all_shards_and_leaves_out_who_is_dead() -> None:
    trace = {"request": "r", "came_s_ago": 1.0}
    one = FakeRouter(status=status("a", *WHOLE), explain=[trace], decision="prefill=sent")
    two = FakeRouter(
        status=status("b", "prefill"), explain=[{**trace, "came_s_ago": 9.0}], decision=""
    )
    asked = stats([one, two], up="01")
    gauges = await asked.gauges()
    assert gauges['triptych_router_requests{state="decoding"}'] == 4
    assert (gauges["triptych_shards"], gauges["triptych_shards_up"]) == (2, 2)
    assert gauges['triptych_shard_bytes{shard="1"}'] == 0
    assert (await asked.health()).ok  # one shard has all stages
    told = await asked.explain("r")
    assert [(entry["shard"], entry["came_s_ago"]) for entry in told] == [("1", 9.0), ("0", 1.0)]
    assert await asked.decision("r") == "shard=0; prefill=sent"

    dead = FakeRouter(is_dead=True, status=None, decision="")
    asked = stats([dead, two], up="01")
    gauges = await asked.gauges()
    assert gauges['triptych_router_requests{state="decoding"}'] == 2
    health = await asked.health()
    assert (health.ok, health.reason) == (False, "no compress and no decode worker is running")
    with pytest.raises(Overloaded, match="the router does not answer"):
        await stats([dead, dead], up="01").gauges()
    assert await stats([dead, dead], up="01").decision("r") == ""


async def test_of_several_routers_those_that_were_lost_are_not_asked() -> None:
    never = FakeRouter(status=None)
    cast("Any", never).status.remote = lambda: asyncio.sleep(3600)
    asked = stats([FakeRouter(status=status("a", *WHOLE)), never], up="0")
    assert (await asked.gauges())["triptych_shards_up"] == 1


async def test_a_single_router_is_asked_as_before() -> None:
    asked = stats([FakeRouter(status=status("a", *WHOLE), explain=[], decision="x")], up="")
    assert not [name for name in await asked.gauges() if "shard" in name]
    assert await asked.explain("r") == []
    assert await asked.decision("r") == "x"


# ------------------------------------------------------------------ over real sockets


class FakeShard:
    """A router that answers with the tokens that a test tells it, and can die."""

    def __init__(self, plan: AppPlan) -> None:
        self.asked = dict[str, Request]()
        self.cancelled = set[str]()
        self.submits = 0
        self.retry_after_s = 0.0
        """Above 0: it refuses everything."""
        self.peer_channel = PeerChannel(plan.router_address, self._receive, lambda _: None)

    def _receive(self, messages: Sequence[Any], sender: str) -> None:
        for message in messages:
            if isinstance(message, Submit) and self.retry_after_s:
                refusal = QueueFull(9, 9, self.retry_after_s)
                for request in message.requests:
                    self.peer_channel.post(sender, failed(request.id, refusal))
            elif isinstance(message, Submit):
                self.submits += 1
                self.asked |= {request.id: request for request in message.requests}
            elif isinstance(message, Cancel):
                self.cancelled |= set(message.requests)

    def say(self, name: str, *tokens: int, at: int = 0, finish: FinishReason | None = None) -> None:
        output_tokens = Tokens(request=name, index=at, tokens=tokens, text="", finish=finish)
        self.peer_channel.post(self.asked[name].reply_to, output_tokens)


@dataclass
class Front:
    """An ingress and its shards."""

    engine: RouterClient
    shards: list[FakeShard]

    def ask(
        self, name: str, session: str, prompt: tuple[int, ...] = (1, 2), answer: int = 16
    ) -> "asyncio.Task[list[Tokens | Failed]]":
        request = Request(
            id=name,
            prompt=prompt,
            sampling=Sampling(max_tokens=answer),
            reply_to=self.engine.address,
            session=session,
        )

        async def heard() -> list[Tokens | Failed]:
            return [event async for event in self.engine.generate([request])]

        return asyncio.create_task(heard())

    def where(self, name: str) -> list[int]:
        return [index for index, shard in enumerate(self.shards) if name in shard.asked]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # what is awaited happens on a socket
            await asyncio.sleep(0.01)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """The path of a socket ends at 107 bytes, which pytest's directories may reach."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)


LONGEST = 32_768


@pytest.fixture
async def front(short_dir: Path) -> AsyncIterator[Front]:
    both = plans(2, short_dir, LONGEST)
    shards = [FakeShard(plan) for plan in both]
    for shard in shards:
        await shard.peer_channel.start()
    engine = RouterClient(both[0])
    await engine.start()
    await until(lambda: engine.shards.up == ["0", "1"])
    yield Front(engine, shards)
    await engine.stop()
    for shard in shards:
        await shard.peer_channel.stop()


SESSIONS = [f"s{number}" for number in range(8)]


async def test_conversations_keep_to_a_shard_and_a_routers_death_stays_in_its_own(
    front: Front,
) -> None:
    clients = {name: front.ask(name, session=name) for name in SESSIONS}
    await until(lambda: sum(len(shard.asked) for shard in front.shards) == len(SESSIONS))
    before = {name: front.where(name)[0] for name in SESSIONS}
    assert set(before.values()) == {0, 1}
    for name, shard in before.items():
        front.shards[shard].say(name, 7, 8, 9)
    journeys = {one.request.id: one for one in front.engine.attempts}
    await until(lambda: all(len(one.output_tokens) == 3 for one in journeys.values()))

    await front.shards[1].peer_channel.stop()
    orphans = [name for name, shard in before.items() if shard == 1]
    again = [f"{name}~1" for name in orphans]
    await until(lambda: set(again) <= set(front.shards[0].asked))
    assert set(front.shards[0].asked) == {n for n, shard in before.items() if shard == 0} | {*again}
    assert {front.shards[0].asked[name].output_tokens for name in again} == {(7, 8, 9)}
    for name in SESSIONS:
        front.shards[0].say(f"{name}~1" if name in orphans else name, 5, at=3, finish="length")
    heard = {name: await client for name, client in clients.items()}
    for events in heard.values():
        tokens = [token for one in events if isinstance(one, Tokens) for token in one.tokens]
        assert tokens == [7, 8, 9, 5]
    assert set(front.engine.shards.held_bytes.values()) == {0}


async def test_the_choices_of_a_request_are_one_message(front: Front) -> None:
    bias = tuple((token, 1.0) for token in range(300))
    requests = [
        Request(
            id=f"r-{index}",
            prompt=(1, 2, index // 4),
            sampling=Sampling(seed=index, max_tokens=4, logit_bias=bias),
            reply_to=front.engine.address,
            session="s",
        )
        for index in range(8)
    ]

    async def collected() -> list[Tokens | Failed]:
        return [event async for event in front.engine.generate(requests)]

    answer = asyncio.create_task(collected())
    await until(lambda: sum(len(shard.asked) for shard in front.shards) == len(requests))
    for shard in front.shards:  # the second one gets what is above the bound of the first
        assert shard.submits == bool(shard.asked)
        for name, received in shard.asked.items():
            assert received in requests
            shard.say(name, 5, finish="stop")
    assert len(await answer) == len(requests)


async def test_a_request_whose_client_does_not_read_is_cancelled(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "MAX_EVENTS", 8)
    request = Request(
        id="r", prompt=(1,), sampling=Sampling(max_tokens=99), reply_to=front.engine.address
    )
    events = front.engine.generate([request])
    first = asyncio.create_task(anext(events))
    await until(lambda: bool(front.where("r")))
    [index] = front.where("r")
    for at in range(20):
        front.shards[index].say("r", 5, at=at)
    await first
    await until(lambda: front.shards[index].cancelled == {"r"})
    with pytest.raises(Cancelled, match="has not read 8 events"):
        await anext(events)
    assert not list(front.engine.attempts)


async def test_the_same_conversation_comes_back_to_its_shard(front: Front) -> None:
    for session in SESSIONS:
        homes = set[int]()
        for turn in range(2):
            name = f"{session}-{turn}"
            client = front.ask(name, session)
            await until(lambda name=name: bool(front.where(name)))
            (shard,) = front.where(name)
            homes.add(shard)
            front.shards[shard].say(name, 1, finish="stop")
            await client
        assert len(homes) == 1


async def test_what_one_shard_refuses_the_other_is_asked_for(front: Front) -> None:
    first, second = front.shards
    first.retry_after_s = 9.0
    clients = [front.ask(name, session=name) for name in SESSIONS]
    await until(lambda: len(second.asked) == len(SESSIONS))
    second.retry_after_s = 4.0
    refused = await front.ask("late", session="late")
    assert [one.retry_after_s for one in refused if isinstance(one, Failed)] == [4.0]
    clients[0].cancel()
    await until(lambda: second.cancelled == {SESSIONS[0]})
    assert not first.cancelled
    for name in SESSIONS[1:]:
        second.say(name, 1, finish="stop")
    await asyncio.gather(*clients[1:])
    assert front.engine.shards.counters["refused"] >= 1


async def test_an_answer_goes_on_in_the_next_window_and_its_client_sees_no_seam(
    front: Front,
) -> None:
    """A context of 8,192 tokens; each window begins with half of the one before."""
    prompt = tuple(range(8190))
    client = front.ask("long", "", prompt, answer=5)
    await until(lambda: bool(front.where("long")))
    (home,) = front.where("long")
    first = front.shards[home].asked["long"]
    assert (first.known, first.sampling.max_tokens, first.goes_on) == (prompt, 2, True)
    front.shards[home].say("long", 7)
    front.shards[home].say("long", 8, at=1, finish="length")
    await until(lambda: bool(front.where("long~1")))
    (home,) = front.where("long~1")
    second = front.shards[home].asked["long~1"]
    assert second.known == (*prompt, 7, 8)[4096:]
    assert (second.sampling.max_tokens, second.goes_on) == (5, False)
    front.shards[home].say("long~1", 9, at=2)
    front.shards[home].say("long~1", 6, at=3, finish="stop")
    heard = [event for event in await client if isinstance(event, Tokens)]
    assert [event.tokens for event in heard] == [(7,), (8,), (9,), (6,)]
    assert [event.finish for event in heard] == [None, None, None, "stop"]
    assert set(front.engine.shards.held_bytes.values()) == {0}
    assert not list(front.engine.attempts)


async def test_while_all_routers_drain_the_ingress_refuses_and_then_fails_what_is_left(
    front: Front,
) -> None:
    client = front.ask("running", session="s")
    await until(lambda: bool(front.where("running")))
    (home,) = front.where("running")
    front.shards[1 - home].peer_channel.post(front.engine.address, Drain(timeout_s=9.0))
    await asyncio.sleep(0.2)
    other = front.ask("other", session="s")  # one shard still accepts requests
    await until(lambda: front.where("other") == [home])
    front.shards[home].say("other", 1, finish="stop")
    assert len(await other) == 1
    front.shards[home].peer_channel.post(front.engine.address, Drain(timeout_s=9.0))
    front.shards[home].say("running", 7)
    await asyncio.sleep(0.2)
    with pytest.raises(ShuttingDown):
        await front.ask("new", session="s")
    assert (await front.engine.health()).reason == str(ShuttingDown())
    for shard in front.shards:
        await shard.peer_channel.stop()
    tokens, failure = await client
    assert isinstance(tokens, Tokens)
    assert isinstance(failure, Failed)
    assert (failure.status, failure.code) == (503, "shutting_down")
    assert not list(front.engine.attempts)


async def test_routers_that_replace_drained_ones_are_asked_again(front: Front) -> None:
    for shard in front.shards:
        shard.peer_channel.post(front.engine.address, Drain(timeout_s=9.0))
    await asyncio.sleep(0.2)
    for shard in front.shards:
        await shard.peer_channel.stop()
    await until(lambda: not front.engine.shards.up)
    front.shards = [FakeShard(plan) for plan in plans(2, Path(front.engine.address[5:]).parent)]
    for shard in front.shards:
        await shard.peer_channel.start()
    await until(lambda: front.engine.shards.up == ["0", "1"])
    client = front.ask("new", session="s")
    await until(lambda: bool(front.where("new")))
    (home,) = front.where("new")
    front.shards[home].say("new", 1, finish="stop")
    assert len(await client) == 1
    for shard in front.shards:
        await shard.peer_channel.stop()
