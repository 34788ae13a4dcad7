"""The application on a Ray cluster on this machine, as KubeRay starts it: PORT ARGS (as JSON).

The head has no CPUs. Two nodes join while the application waits for them: one has the resource
``front``, one ``back``, both have ``triptych``. Says ``ready`` when it serves. At the word ``join``
another node comes that has ``back``, at ``die`` the first that had it goes; ``taken`` asks how
many actors have a share of ``triptych``. Ends when its input does.
"""

import json
import sys
import threading
import time
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.deployment import Application

from triptych.deployments.app import build_app
from triptych.deployments.placement.nodes import AFFINITY_AMOUNT

HEAD, FRONT, BACK, LATE = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
"""Loopback, like 127.0.0.1, which Ray would replace by an address that others reach."""


def main(port: str, args: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args=node(HEAD, num_cpus=0))
    ray.init(address=cluster.address, _node_ip_address=HEAD)
    built = list[Application]()
    build = threading.Thread(target=lambda: built.append(build_app(json.loads(args))))
    build.start()
    time.sleep(1)
    cluster.add_node(**node(FRONT, front=1, triptych=1))
    back = cluster.add_node(**node(BACK, back=1, triptych=1))
    build.join()
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, proxy_location="HeadOnly")
    serve.run(built[0], name="triptych")
    say("ready")
    for line in sys.stdin:
        match line.strip():
            case "join":
                cluster.add_node(**node(LATE, back=1, triptych=1))
            case "die":
                cluster.remove_node(back, allow_graceful=False)
            case "taken":
                taken = ray.cluster_resources()["triptych"] - ray.available_resources()["triptych"]
                say(str(round(taken / AFFINITY_AMOUNT)))
            case word:
                raise ValueError(word)
        say("done")
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def node(address: str, *, num_cpus: int = 1, **resources: float) -> dict[str, Any]:
    return {
        "node_ip_address": address,
        "num_cpus": num_cpus,
        "resources": resources,
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
    }


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
