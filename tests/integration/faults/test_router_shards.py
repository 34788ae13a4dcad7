"""Two shards behind one ingress: a router's death is felt in its own shard alone."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.faults.cluster import Answer, Cluster
from tests.tiny import save_tiny_model
from triptych.core.messages import Request, Sampling

CLIENTS, ANSWER_TOKENS = 8, 200
KILLED = "1"


def request(number: int, max_tokens: int = ANSWER_TOKENS) -> Request:
    prompt = tuple(random.Random(number).choices(range(2, 250), k=24))
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id="", prompt=prompt, sampling=sampling, reply_to="")


def note_places(cluster: Cluster) -> dict[str, list[str]]:
    """From now on, the shards of each request, first to last."""
    places, place = dict[str, list[str]](), cluster.engine.shards.place

    def note(name: str, key: bytes, nbytes: int) -> str | None:
        shard = place(name, key, nbytes)
        places.setdefault(name, []).append(shard or "nowhere")
        return shard

    cluster.engine.shards.place = note  # type: ignore[method-assign]
    return places


async def crowd(cluster: Cluster) -> dict[str, Answer]:
    """All clients at once, each in a conversation of its own."""
    answers = await asyncio.gather(
        *(cluster.answer(request(n), f"s{n}", f"s{n}") for n in range(CLIENTS))
    )
    return {f"s{n}": answer for n, answer in enumerate(answers)}


@pytest.mark.timeout(240)
async def test_a_router_that_dies_cuts_off_nobody_of_another_shard(tmp_path: Path) -> None:
    async with Cluster(save_tiny_model(tmp_path), shards=2) as cluster:
        await cluster.until(lambda: cluster.engine.shards.up == ["0", "1"], "both are found")
        for session in ("a", "b", "c", "d"):
            places = note_places(cluster)
            for turn in range(2):
                await cluster.answer(request(turn, max_tokens=4), session, session)
            (one,), (other,) = places.values()
            assert one == other
        whole = await crowd(cluster)
        assert {answer.ending for answer in whole.values()} == {"length"}

        places = note_places(cluster)
        clients = asyncio.create_task(crowd(cluster))
        await cluster.until(lambda: len(places) == CLIENTS, "all were sent")
        journeys = list(cluster.engine.attempts)
        await cluster.until(
            lambda: all(len(one.output_tokens) > 4 for one in journeys), "all stream"
        )
        there = [one for one in journeys if places[one.request.id] == [KILLED]]
        cluster.kill("router", shard=int(KILLED))
        answers = await clients

        assert 0 < len(there) < CLIENTS
        assert any(one.attempt for one in there), "all had ended before"
        for one in journeys:
            session = one.request.session
            assert answers[session].ending == "length"
            assert len(answers[session].tokens) == ANSWER_TOKENS
            if one not in there:
                assert one.attempt == 0
                assert places[one.request.id] == ["0"]
                assert answers[session] == whole[session]
        for one in there:
            assert places[one.request.id][1:] == ["0"] * one.attempt
        await cluster.until(lambda: cluster.engine.shards.up == ["0", "1"], "both are back")
        await cluster.settled()
        places = note_places(cluster)
        again = await crowd(cluster)
        assert {answer.ending for answer in again.values()} == {"length"}
        assert {shard for shards in places.values() for shard in shards} == {"0", "1"}
        await cluster.settled()
