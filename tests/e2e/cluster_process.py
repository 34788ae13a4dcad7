"""The application on a Ray cluster of two nodes on this machine: PORT ARGS (as JSON).

The first node has the resource ``front``, the second ``back``. Says ``ready`` when it serves, and
ends when its input does.
"""

import json
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster

from triptych.deployments.app import build_app

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
"""Loopback, like 127.0.0.1, which Ray would replace by an address that others reach."""


def main(port: str, args: str) -> None:
    both = {"num_cpus": 1, "include_dashboard": False}
    first = {"node_ip_address": FIRST, "resources": {"front": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=both | first)
    cluster.add_node(**both, node_ip_address=SECOND, resources={"back": 1})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, _node_ip_address=FIRST)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, proxy_location="HeadOnly")
    serve.run(build_app(json.loads(args)), name="triptych")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
