"""Several replicas of the stages: the work is shared, and one dead replica costs its own only."""

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
STORY = "Once upon a time there was a king who had two sons and a garden full of apple trees. "
SURE = [f"{STORY} Part {index}:" for index in (5, 9, 10, 14, 15, 17, 19, 20, 24, 28, 29, 31)]
"""Prompts whose answers are the same in every batch, although batches round by their size: each of
112 words is ahead of the next likely one by 0.04 nats (those of part 3 by 0.003)."""


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    def two(threads: int) -> dict[str, Any]:
        return {"actor": {"num_replicas": 2, "threads": threads}}

    return start(
        model={"name": MODEL, "dtype": "float32"},
        # Batches of other sizes round differently, and limits of classes turn that into words.
        compressor={"policy": "uniform:k8v4"},
        prefill=two(threads=1),
        decode=two(threads=1),
        pool={"kv_cache_memory_bytes": 512 << 20, "prefix_bytes": 0},
    )


def by_worker(values: Mapping[str, float], role: str) -> list[float]:
    """The values of one stage's workers, which have the stage in their names."""
    return [value for labels, value in values.items() if f'worker="{role}-' in labels]


def answer(server: Any, prompt: str) -> str:
    with server.client(timeout=120) as client:
        made = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=16,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    return str(made.choices[0].text)


def test_answers_of_a_crowd_are_those_of_a_single_client(server: Any) -> None:
    prompts = [STORY * index + f"The {index + 2} sons said:" for index in range(8)]
    alone = [answer(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as clients:
        together = list(clients.map(lambda prompt: answer(server, prompt), prompts))
    assert together == alone
    assert len(set(alone)) > 4


def test_every_replica_takes_part(server: Any) -> None:
    def running() -> list[float]:
        return by_worker(server.metrics("triptych_workers_requests"), "decode")

    crowd = server.crowd([f"{STORY} Part {index}:" for index in range(12)], max_tokens=96)
    server.wait_until(lambda: running() == [6, 6], timeout_s=60)
    assert crowd.join() == {"length": 12}
    busy = server.metrics("triptych_workers_busy_seconds")
    assert len(by_worker(busy, "prefill")) == 2
    assert all(seconds > 0 for seconds in by_worker(busy, "prefill"))


def test_requests_move_to_the_worker_that_has_fewer(server: Any) -> None:
    """Wherever the short answers leave gaps; what is said stays the same."""
    prompts = SURE[:6]
    whole = server.crowd(prompts, max_tokens=112)
    assert whole.join() == {"length": 6}
    short = server.crowd(["The king said:"] * 6, max_tokens=2)
    crowd = server.crowd(prompts, max_tokens=112)
    assert short.join() == {"length": 6}

    def running() -> list[float]:
        return by_worker(server.metrics("triptych_workers_requests"), "decode")

    server.wait_until(lambda: running() == [3, 3], timeout_s=60)
    assert crowd.join() == {"length": 6}
    assert crowd.texts == whole.texts
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)


def test_streams_go_on_when_workers_of_every_stage_are_killed(server: Any) -> None:
    """None ends, and each says what it says when nobody dies."""
    prompts = SURE
    whole = server.crowd(prompts, max_tokens=48)
    assert whole.join() == {"length": 12}
    crowd = server.crowd(prompts, max_tokens=48)
    for stage in ("Prefill", "Compressor"):
        os.kill(server.replicas(stage)[0].pid, signal.SIGKILL)
    crowd.wait_for_chunks(4, clients=6)
    os.kill(server.replicas("Decode")[0].pid, signal.SIGKILL)
    assert crowd.join() == {"length": 12}
    assert crowd.texts == whole.texts
    assert server.metrics("triptych_router_decisions")['reason="resumed"'] > 0
    assert answer(server, "Hello") != ""
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)
    for stage, count in (("prefill", 2), ("compress", 1), ("decode", 2)):
        label = f'stage="{stage}"'
        server.wait_until(lambda: server.metrics("triptych_workers")[label] == count, 90)  # noqa: B023
    again = server.crowd(prompts, max_tokens=16)
    assert again.join() == {"length": 12}
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)


def test_a_frozen_replica_is_replaced_like_a_dead_one(server: Any) -> None:
    crowd = server.crowd([f"{STORY} Part {index}:" for index in range(6)], max_tokens=48)
    crowd.wait_for_chunks(4)
    frozen = server.replicas("Decode")[0]
    os.kill(frozen.pid, signal.SIGSTOP)
    assert crowd.join() == {"length": 6}
    server.wait_until(lambda: not frozen.is_running(), timeout_s=60)
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)
