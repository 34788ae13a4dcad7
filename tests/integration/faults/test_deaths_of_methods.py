"""Requests of several compression methods at once, while a compressor and a decode worker die."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.faults.cluster import Answer, Cluster
from tests.learned import save_networks
from tests.tiny import save_tiny_model
from triptych.core.messages import Request, Sampling

METHODS = (
    ("uniform:k8v4", "learned:merge", "uniform:fp16"),
    ("snapkv", "learned:score", "adakv"),
    ("kvarn", "fp8", "uniform:k8v2"),
    ("cake", "expected_attention", "kvcrush"),
    ("h2o:generate", "h2o", "tova"),
    ("kvmerger", "learned:paper", "leankv"),
    ("epicache", "snapkv", "pyramidkv"),
)
"""Beside the default. ``make test`` runs the first, ``make conformance`` the others too."""
CLIENTS, ANSWER_TOKENS = 16, 60


def request(number: int, methods: tuple[str, ...]) -> Request:
    prompt = tuple(random.Random(number).choices(range(2, 250), k=20 + 9 * number))
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    method = ("", *methods)[number % 4]
    return Request(id="", prompt=prompt, sampling=sampling, reply_to="", method=method)


async def crowd(cluster: Cluster, methods: tuple[str, ...]) -> list[Answer]:
    return await asyncio.gather(*(cluster.answer(request(n, methods)) for n in range(CLIENTS)))


@pytest.mark.parametrize(
    "methods",
    [METHODS[0], *(pytest.param(more, marks=pytest.mark.conformance) for more in METHODS[1:])],
    ids=lambda methods: methods[0],
)
@pytest.mark.timeout(600)
async def test_no_answer_is_lost_or_wrong_and_no_page_is_held(
    tmp_path: Path, methods: tuple[str, ...]
) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    save_networks(model)
    async with Cluster(model, methods=methods) as cluster:
        alone = [await cluster.answer(request(n, methods)) for n in range(CLIENTS)]
        assert {one.ending for one in alone} == {"length"}
        for role in ("decode", "compress"):
            clients = asyncio.create_task(crowd(cluster, methods))
            await cluster.until(
                lambda: any(len(one.output_tokens) > 8 for one in cluster.engine.attempts),
                "some stream",
            )
            cluster.kill(role)
            answers = await clients
            assert {one.ending for one in answers} == {"length"}
            assert [one.tokens for one in answers] == [one.tokens for one in alone]
            await cluster.settled()
        assert sum(cluster.deaths.values()) == 2, cluster.deaths
