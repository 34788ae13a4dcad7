"""A Ray cluster as KubeRay starts it: a head without CPUs, and a node that joins later."""

import json
import subprocess
import sys

from tests.e2e.conftest import MODEL, free_port

ACTORS = 6
"""Ingress, router, pool, and three stages."""
SCRIPT = """
import json, sys, threading, time, urllib.request
import ray
from ray import serve
from ray.cluster_utils import Cluster
from triptych.deployments.app import build_app
from triptych.deployments.placement import SLIVER

port, model, store = int(sys.argv[1]), sys.argv[2], {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
ray.init(address=cluster.address, log_to_driver=False)
built, args = [], {"node_resource": "triptych", "pool": {"capacity_bytes": 2**28}}
build = threading.Thread(target=lambda: built.append(build_app(args)))
build.start()
time.sleep(3)
has_waited = build.is_alive()
cluster.add_node(num_cpus=2, resources={"triptych": 1}, **store)
build.join()
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(built[0], name="triptych")
body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
request = urllib.request.Request(
    f"http://127.0.0.1:{port}/v1/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["text"]
for _ in range(100):  # nodes report what is taken of them once in a while
    taken = round((1 - ray.available_resources()["triptych"]) / SLIVER)
    if taken >= 6:
        break
    time.sleep(0.2)
print("RESULT", json.dumps([has_waited, taken, answer]), flush=True)
serve.shutdown()
ray.shutdown()
cluster.shutdown()
"""


def test_every_actor_goes_to_the_node_that_has_the_resource() -> None:
    """On the head, which is there first, nothing is taken: it has no such resource."""
    command = [sys.executable, "-c", SCRIPT, str(free_port()), MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-2000:]
    has_waited, taken, answer = json.loads(lines[0].removeprefix("RESULT "))
    assert has_waited
    assert taken == ACTORS
    assert "Paris" in answer
