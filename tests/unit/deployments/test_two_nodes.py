"""The shells of two nodes, without Ray: one reads the prompts, the other writes the answers."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import CONTEXT_TOKENS, save_tiny_model
from tests.unit.deployments.transport.test_network import FakeDirectory
from tests.unit.kvpool.transfer.slow_line import Line
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, MethodChoice, Request, Sampling, Stage
from triptych.core.methods.frontier import MeasuredMethod
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.core.profile import Fidelity
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.replicas.pool import PoolReplica
from triptych.deployments.replicas.router import RouterReplica
from triptych.deployments.replicas.router_client import RouterClient
from triptych.deployments.replicas.worker import WorkerReplica
from triptych.deployments.transport.addressing import Network
from triptych.deployments.transport.node_context import NodeContext
from triptych.deployments.transport.run_dir import RunDir
from triptych.kvpool import Access, PoolAddress
from triptych.kvpool.transfer import link_meter
from triptych.router.policies.method_choice import Position
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe

pytestmark = pytest.mark.slow

ARGS = {
    "model": {"name": "tiny", "dtype": "float32"},
    "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
    "compressor": {"policy": "uniform:k8v4", "recent_window_tokens": 20},
    "prefill": {"max_num_batched_tokens": 48, "actor": {"threads": 1}},
    "decode": {"actor": {"threads": 1}},
}
ROUGH, FINE = "uniform:k4v2", "uniform:k8v8"
CHOICE = {
    "others": tuple(Policy(name=f"uniform:{form}", high_format=form) for form in ("k4v2", "k8v8")),
    "measured": tuple(
        MeasuredMethod(
            name=name,
            fidelity=(
                Fidelity(
                    context=200, bytes_ratio=ratio, kl=kl, top1_agreement=1, perplexity_ratio=1
                ),
            ),
        )
        for name, ratio, kl in ((ROUGH, 0.26, 0.02), (FINE, 0.58, 0.0001))
    ),
    "adaptive": (ROUGH, FINE),
}
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


def prompts() -> list[tuple[int, ...]]:
    generator = random.Random(3)
    return [tuple(generator.randrange(2, 258) for _ in range(n)) for n in (5, 60, 130, 200)]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """The path of a socket must be short."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def plan(tiny_model: Path, short_dir: Path, request: pytest.FixtureRequest) -> AppPlan:
    """``request.param``: methods among which the router chooses."""
    config, facts = AppConfig.from_mapping(ARGS), describe(tiny_model)
    return AppPlan(
        config=config,
        model_path=tiny_model,
        pages=replace(PagePlan.of(config, facts.geometry), **getattr(request, "param", {})),
        context_tokens=CONTEXT_TOKENS,
        revision=facts.revision,
        run_dir=short_dir,
        nodes=2,
        token="a token of the tests",
    )


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The line over which pages of the node ``front`` travel."""
    monkeypatch.setattr(link_meter, "LEAST_BYTES", 1)
    announce, lines = Network.announce_pool, list[Line]()

    def announce_line(network: Network, arena: str, address: PoolAddress) -> None:
        if network.node == "front":
            lines.append(Line(address.pages))
            address = replace(address, pages=lines[0].port)
        announce(network, arena, address)

    class Later:
        """The line, once the pool is there."""

        def __setattr__(self, name: str, value: object) -> None:
            setattr(lines[0], name, value)

    monkeypatch.setattr(Network, "announce_pool", announce_line)
    yield Later()  # type: ignore[misc]
    for one in lines:
        one.close()


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray would say: a plan's directory is named after the node."""
    directory = FakeDirectory()

    def enter(plan: AppPlan) -> NodeContext:
        network = Network(
            plan.run_dir.name, "127.0.0.1", plan.run_dir, directory, Access(plan.token)
        )
        return NodeContext(plan, RunDir.enter(plan.run_dir), network)

    monkeypatch.setattr(NodeContext, "enter", enter)


class Worker(WorkerReplica):
    """One that says when it leaves, where Serve would."""

    async def leave(self) -> None:
        await super().__del__()

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Router(RouterReplica):
    async def leave(self) -> None:
        await super().__del__()

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Pool(PoolReplica):
    def leave(self) -> None:
        super().__del__()

    def __del__(self) -> None:
        pass


@dataclass
class Cluster:
    """All that runs on both nodes."""

    plan: AppPlan
    router: Router
    engine: RouterClient
    pools: dict[str, Pool]
    choices: list[MethodChoice] = field(default_factory=list[MethodChoice])
    """Methods that the router has chosen."""

    def on(self, node: str) -> AppPlan:
        return replace(self.plan, run_dir=self.plan.run_dir / node)

    async def work(self, node: str, *stages: Stage) -> Worker:
        worker = Worker.__new__(Worker)
        await worker.__init__(self.on(node), stages)
        return worker

    async def ask(self, asked: Sequence[tuple[int, ...]], **more: Any) -> list[list[int]]:
        """The tokens of each answer."""
        at = self.engine.address
        requests = [
            Request(id=f"r{i}", prompt=prompt, sampling=GREEDY, reply_to=at, **more)
            for i, prompt in enumerate(asked)
        ]
        answers = {request.id: list[int]() for request in requests}
        async with asyncio.timeout(60):
            async for event in self.engine.generate(requests):
                assert not isinstance(event, Failed), event.message
                self.choices += [event.choice] if event.choice else []
                answers[event.request] += event.tokens
        return list(answers.values())

    def held(self) -> dict[str, int]:
        return {
            label: count
            for pool in self.pools.values()
            for label, count in pool._server.stat().by_request.items()
        }


@pytest.fixture
async def cluster(plan: AppPlan, sites: None) -> AsyncIterator[Cluster]:
    nodes = {node: replace(plan, run_dir=plan.run_dir / node) for node in ("front", "back")}
    pools = {node: await asyncio.to_thread(Pool, at) for node, at in nodes.items()}
    router = Router.__new__(Router)
    await router.__init__(nodes["front"])
    network = NodeContext.enter(nodes["front"]).network
    assert network is not None
    engine = RouterClient(nodes["front"], routes=network)
    await engine.start()
    yield Cluster(plan, router, engine, pools)
    await engine.stop()
    await router.leave()
    for pool in pools.values():
        await asyncio.to_thread(pool.leave)


@pytest.fixture
def of_one_process(plan: AppPlan) -> list[list[int]]:
    """What the same engines answer over one arena."""
    with LocalServer(plan.config, plan.model_path) as local:
        requests = [local.request(prompt, GREEDY) for prompt in prompts()]
        return [answer.tokens for answer in local.complete(requests)]


@pytest.mark.parametrize("split", [("prefill", "compress"), ("prefill",)])
async def test_answers_are_those_of_one_node(
    cluster: Cluster, of_one_process: list[list[int]], split: tuple[Stage, ...]
) -> None:
    """Compressed pages travel or, if no compressor is beside the prefill, raw ones."""
    stages: tuple[Stage, ...] = ("prefill", "compress", "decode")
    front = await cluster.work("front", *split)
    back = await cluster.work("back", *(stage for stage in stages if stage not in split))
    assert await cluster.ask(prompts()) == of_one_process
    status = await cluster.router.status()
    counters = status.router.counters
    assert counters["fetched"] == len(prompts())
    assert status.gauges()["triptych_pool_sent_bytes"] == back._pool.bytes_copied > 0
    assert front._pool.bytes_copied == 0
    assert cluster.held() == {}
    await back.leave()
    await front.leave()


@pytest.mark.parametrize("plan", [CHOICE], indirect=True)
async def test_a_slow_line_makes_the_router_choose_few_bytes_and_a_fast_one_many(
    line: Line, cluster: Cluster
) -> None:
    """The worker measures the line, and answers are those of the same method by name."""
    front = await cluster.work("front", "prefill", "compress")
    back = await cluster.work("back", "decode")
    costs, asked = cluster.router._scheduler._cluster.method_costs, prompts()[-1:]
    answers = dict[str, list[list[int]]]()
    for speed, method, expected in ((1e5, ROUGH, (1e4, 2e5)), (0.0, FINE, (1e6, 1e12))):
        line.bytes_s = speed
        async with asyncio.timeout(30):
            while not expected[0] < costs.link_bytes_s < expected[1]:
                answers[method] = await cluster.ask(asked, method=method)
                await asyncio.sleep(0.6)  # until the worker has reported
        cluster.router._scheduler._submission.adaptive.position = Position()
        assert await cluster.ask(asked, adapts=True) == answers[method]
        choice = cluster.choices.pop()
        assert choice.method == method
        assert expected[0] < choice.link_bytes_s < expected[1]
    await back.leave()
    await front.leave()


async def test_a_decode_worker_that_goes_leaves_its_requests_to_another(
    cluster: Cluster, of_one_process: list[list[int]]
) -> None:
    front = await cluster.work("front", "prefill", "compress")
    back = await cluster.work("back", "decode")
    asking = asyncio.create_task(cluster.ask(prompts()))
    while not any(len(journey.output_tokens) > 2 for journey in cluster.engine.attempts):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await back.leave()
    other = await cluster.work("back", "decode")
    answers = await asking
    assert [len(answer) for answer in answers] == [len(answer) for answer in of_one_process]
    for _ in range(100):
        if not cluster.held():
            break
        await asyncio.sleep(0.1)
    assert cluster.held() == {}
    await other.leave()
    await front.leave()
