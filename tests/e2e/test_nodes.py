"""Two nodes behind a head: prompts are read and compressed on one, answers written on the other."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Server, free_port
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer
from triptych.workers.models.pretrained import read_tokenizer
from triptych.workers.models.store.model_store import resolve

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
STORY = "Once upon a time there was a king who had two sons and a garden full of apple trees. "
PROMPTS = [f"{STORY * 8} Part {index}:" for index in range(4)]
TOKENS = 48
ACTORS = 8
"""Ingress, router, two pools, prefill, compressor, two decode workers."""


def on(resource: str, replicas: int = 1) -> dict[str, Any]:
    resources = {resource: 0.01}
    return {"actor": {"num_replicas": replicas, "threads": 1, "resources": resources}}


ARGS: dict[str, Any] = {
    "model": {"name": MODEL, "dtype": "float32"},
    "node_resource": "triptych",
    "min_nodes": 2,
    "prefill": on("front"),
    "compressor": on("front"),
    "decode": on("back", replicas=2),
    "pool": {"kv_cache_memory_bytes": 256 << 20, "prefix_bytes": 0, "extent_pages": 256},
}


@dataclass(frozen=True)
class Cluster:
    """The server, and what happens to its nodes."""

    server: Server
    process: "subprocess.Popen[str]"

    def tell(self, word: str) -> list[str]:
        """Have a node join or die, and wait until it has; what was said meanwhile."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        said = list[str]()
        for line in iter(self.process.stdout.readline, ""):
            if line == "done\n":
                return said
            said.append(line.strip())
        raise AssertionError(f"the cluster ended when it was told {word!r}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port, log = free_port(), tmp_path_factory.mktemp("nodes") / "log"
    script = Path(__file__).with_name("cluster_process.py")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), str(port), json.dumps(ARGS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,
        )
    served = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    try:
        assert "ready\n" in lines, log.read_text()[-4000:]
        served.wait_until(served.is_healthy, timeout_s=60)
        yield Cluster(served, process)
    finally:
        tree = served.process.children(recursive=True)
        process.communicate(timeout=90)
        _, alive = psutil.wait_procs(tree, timeout=15)
        for left in alive:
            left.kill()


@pytest.fixture
def server(cluster: Cluster) -> Server:
    return cluster.server


@pytest.fixture(scope="module")
def of_one_process() -> list[str]:
    """What the same engines answer in one process, over one arena."""
    config = AppConfig.from_mapping({k: v for k, v in ARGS.items() if k in ("model", "pool")})
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    tokenizer = read_tokenizer(resolve(MODEL))
    with LocalServer(config) as local:
        requests = [local.request(tokenizer.encode(prompt), sampling) for prompt in PROMPTS]
        return [done.text for done in local.complete(requests)]


def test_every_actor_goes_to_a_node_that_has_the_resource(cluster: Cluster) -> None:
    """On the head, which is there first, nothing is taken: it has no such resource."""
    cluster.server.wait_until(lambda: cluster.tell("taken")[-1] == str(ACTORS), 30)
    assert len(cluster.server.metrics("triptych_node_pool_pages_free")) == 2


def test_answers_are_those_of_one_node(server: Server, of_one_process: list[str]) -> None:
    crowd = server.crowd(PROMPTS, max_tokens=TOKENS)
    assert crowd.join() == {"length": len(PROMPTS)}
    assert crowd.texts == of_one_process
    assert server.metric("triptych_pool_sent_bytes") > 0
    copied = server.metrics("triptych_workers_bytes_copied")
    assert {name for name, count in copied.items() if count} <= {
        name for name in copied if 'worker="decode-' in name
    }
    assert sum(copied.values()) == server.metric("triptych_pool_sent_bytes")
    assert server.metrics("triptych_router_decisions")['reason="fetched"'] == len(PROMPTS)
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=10)


def test_streams_go_on_when_workers_and_a_pool_are_killed(
    server: Server, of_one_process: list[str]
) -> None:
    crowd = server.crowd(PROMPTS, max_tokens=TOKENS)
    crowd.wait_for_chunks(4)
    os.kill(server.replicas("Decode")[0].pid, signal.SIGKILL)
    assert crowd.join() == {"length": len(PROMPTS)}
    assert crowd.texts == of_one_process
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)
    crowd = server.crowd(PROMPTS, max_tokens=TOKENS)
    crowd.wait_for_chunks(4)
    os.kill(server.replicas("Pool")[0].pid, signal.SIGKILL)
    assert crowd.join() == {"length": len(PROMPTS)}
    server.wait_until(lambda: server.metric("triptych_pool_up") == 1, timeout_s=60)
    server.wait_until(lambda: server.pages_held() == 0, timeout_s=20)


def decode_workers(server: Server) -> set[str]:
    return {line for line in server.metrics("triptych_workers_requests") if '"decode-' in line}


def test_a_node_that_joins_late_takes_the_place_of_one_that_dies(
    cluster: Cluster, of_one_process: list[str]
) -> None:
    server = cluster.server
    before, workers = server.metrics("triptych_node_pool_pages_free"), decode_workers(server)
    cluster.tell("join")
    server.wait_until(lambda: len(server.metrics("triptych_node_pool_pages_free")) == 3, 60)
    (late,) = set(server.metrics("triptych_node_pool_pages_free")) - set(before)
    cluster.tell("die")
    server.wait_until(lambda: len(server.metrics("triptych_node_pool_pages_free")) == 2, 60)
    server.wait_until(lambda: len(decode_workers(server) - workers) == 2, 120)
    crowd = server.crowd(PROMPTS, max_tokens=TOKENS)
    assert crowd.join() == {"length": len(PROMPTS)}
    assert crowd.texts == of_one_process
    assert late in server.metrics("triptych_node_pool_pages_free")
    assert server.metric("triptych_pool_up") == 1
