"""Prefixes, takeovers, the next pool and images, with pages in arenas of devices of a fake driver.

Each process is one of the server's own. ``test_fail_points`` has deaths at named points.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.faults.cluster import Answer, Cluster
from tests.integration.faults.points import Point
from tests.integration.faults.trial import Trials
from tests.tiny import save_tiny_model
from tests.tiny_vision import Reference, random_images, save_tiny_vision_model
from triptych.core.images import Image, expand_images
from triptych.core.messages import Request, Sampling

CLIENTS, ANSWER_TOKENS = 4, 40
GREEDY = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
BEGINNING = tuple(random.Random("beginning").choices(range(2, 250), k=128))
"""Two blocks of the prefix cache."""


def request(number: int) -> Request:
    own = tuple(random.Random(number).choices(range(2, 250), k=20 + 9 * number))
    return Request(id="", prompt=BEGINNING + own, sampling=GREEDY, reply_to="")


async def crowd(cluster: Cluster, salt: str) -> list[Answer]:
    """Answers of clients that begin alike; what they begin with is cached before."""
    await cluster.answer(request(CLIENTS), salt)
    await cluster.settled()
    return await asyncio.gather(*(cluster.answer(request(n), salt) for n in range(CLIENTS)))


async def streaming(cluster: Cluster) -> None:
    """Wait until more than one client has tokens of a decode worker."""
    await cluster.until(
        lambda: sum(len(one.output_tokens) > 8 for one in cluster.engine.attempts) > 1,
        "some stream",
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("are_apart", [False, True], ids=["peers", "apart"])
async def test_prefixes_takeovers_and_the_next_pool(tmp_path: Path, are_apart: bool) -> None:
    model = save_tiny_model(tmp_path)
    async with Cluster(model, on_devices=True, are_apart=are_apart) as cluster:
        alone = [await cluster.answer(request(n)) for n in range(CLIENTS)]
        await cluster.settled()
        assert {one.ending for one in alone} == {"length"}
        tokens = [one.tokens for one in alone]
        before = cluster.ledger().prefix

        # Each reads two blocks that another request has published.
        shared = await crowd(cluster, "shared")
        found = cluster.ledger().prefix
        assert [one.tokens for one in shared] == tokens
        assert found.hits - before.hits == CLIENTS
        assert found.hit_tokens - before.hit_tokens >= CLIENTS * len(BEGINNING) // 2

        # The other decode worker of the device goes on with the pages where they are.
        clients = asyncio.create_task(crowd(cluster, "heirs"))
        await streaming(cluster)
        cluster.kill("decode")
        heirs = await clients
        assert [one.tokens for one in heirs] == tokens
        assert {one.retries for one in heirs} == {0}
        await cluster.settled()

        # A pool that dies takes all pages with it: answers are computed again on its successor's.
        pool, blocks = cluster.ledger(), cluster.ledger().prefix.blocks
        assert blocks > 0
        clients = asyncio.create_task(crowd(cluster, "next pool"))
        await streaming(cluster)
        cluster.kill("pool")
        again = await clients
        assert {one.ending for one in again} == {"length"}
        assert any(one.retries for one in again)
        await cluster.settled()
        after = cluster.ledger()
        assert len(after.arenas) == len(pool.arenas) == 3
        assert {one.arena for one in after.arenas}.isdisjoint(one.arena for one in pool.arenas)
        assert [one.tokens for one in await crowd(cluster, "after")] == tokens
        assert cluster.ledger().prefix.hits - after.prefix.hits == CLIENTS
        assert sum(cluster.deaths.values()) == 2, cluster.deaths


@pytest.mark.conformance
@pytest.mark.timeout(600)
async def test_without_revocation_late_writes_come_to_pages_of_others(tmp_path: Path) -> None:
    """So the points would show it."""
    async with Cluster(save_tiny_model(tmp_path), on_devices=True, revokes=False) as cluster:
        trials = await Trials.of(cluster)
        for place in ("read a chunk", "get pages", "commit"):
            await trials.run(Point("prefill", "before", place), seed=0)
        assert cluster.late_writes["refused"] == 0
        assert cluster.late_writes["done"] > 0


IMAGES = random_images(5, seed=3)
CASES = [
    ("a<image>b", [0]),
    ("<image>.<image>!", [1, 1]),
    ("text alone", []),
    ("<image>x<image>yy<image> z", [2, 3, 4]),
]


@pytest.mark.timeout(240)
async def test_images(tmp_path: Path) -> None:
    """Features are in the arena of the host, and pages of prompts on devices."""
    model = save_tiny_vision_model(tmp_path)
    reference, methods = Reference(model), {"policy": "uniform:fp16"}
    wanted = [
        reference.tokens(text, [IMAGES[one] for one in numbers], ANSWER_TOKENS)
        for text, numbers in CASES
    ]
    assert sum(map(len, wanted)) > 40
    async with Cluster(model, on_devices=True, compressor=methods) as cluster:
        layout = cluster.plan.vision.layout
        assert layout is not None

        async def ask(text: str, numbers: list[int]) -> Answer:
            images = [Image.of(*IMAGES[one].size, IMAGES[one].tobytes()) for one in numbers]
            prompt, spans = expand_images(reference.ids(text), images, layout)
            asked = Request(id="", prompt=tuple(prompt), sampling=GREEDY, reply_to="", images=spans)
            return await cluster.answer(asked, images=images)

        for victim in ("", "encode", "decode"):
            clients = asyncio.gather(*(ask(*case) for case in CASES * 2))
            if victim:
                await cluster.until(lambda: bool(list(cluster.engine.attempts)), "some are there")
                cluster.kill(victim)
            answers = await clients
            assert {one.ending for one in answers} == {"length"}
            for one, right in zip(answers, wanted * 2, strict=True):
                assert one.tokens[: len(right)] == right
            await cluster.settled()
        assert sum(cluster.deaths.values()) == 2, cluster.deaths
