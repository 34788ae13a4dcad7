"""The application on a Ray cluster of two nodes on this machine: PORT ARGS (as JSON).

The first node has the resource ``front``, the second ``back``. Says ``ready`` when it serves. At
the word ``join`` a third node comes that has ``back`` too, at the word ``die`` the second one goes.
Ends when its input does.
"""

import json
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster

from triptych.deployments.app import build_app

FIRST, SECOND, LATE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
"""Loopback, like 127.0.0.1, which Ray would replace by an address that others reach."""


def main(port: str, args: str) -> None:
    both = {"num_cpus": 1, "include_dashboard": False}
    first = {"node_ip_address": FIRST, "resources": {"front": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=both | first)
    second = cluster.add_node(**both, node_ip_address=SECOND, resources={"back": 1})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, _node_ip_address=FIRST)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, proxy_location="HeadOnly")
    serve.run(build_app(json.loads(args)), name="triptych")
    say("ready")
    for word in sys.stdin:
        if word == "join\n":
            cluster.add_node(**both, node_ip_address=LATE, resources={"back": 1})
        elif word == "die\n":
            cluster.remove_node(second, allow_graceful=False)
        say("done")
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
