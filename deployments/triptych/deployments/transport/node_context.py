# Ray's runtime context lacks types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""The node that an actor runs on: its run directory, model path and network to other nodes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import ray
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from triptych.deployments.app_plan import AppPlan
from triptych.deployments.transport.addressing import LOCAL, Network, Routes
from triptych.deployments.transport.run_dir import RunDir, base_dir
from triptych.kvpool import Access

NAMESPACE = "triptych"


@dataclass(frozen=True)
class RayDirectory:
    """The directory of one application's endpoints, in the key-value store of the Ray cluster.

    Any process that can write there can run code in the cluster anyway.
    """

    app: str

    def put(self, key: str, value: bytes) -> None:
        _internal_kv_put(self._key(key), value, overwrite=True, namespace=NAMESPACE)

    def get(self, key: str) -> bytes | None:
        return _internal_kv_get(self._key(key), namespace=NAMESPACE)

    def remove(self, key: str) -> None:
        _internal_kv_del(self._key(key), namespace=NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        found: list[bytes] = _internal_kv_list(self._key(prefix), namespace=NAMESPACE)
        return [key.decode().removeprefix(self._key("")) for key in found]

    def nodes(self) -> set[str]:
        nodes = cast("list[dict[str, object]]", ray.nodes())
        return {str(node["NodeID"]) for node in nodes if node["Alive"]}

    def clear(self) -> None:
        """Remove all entries of the application."""
        _internal_kv_del(self._key(""), del_by_prefix=True, namespace=NAMESPACE)

    def _key(self, key: str) -> str:
        return f"{self.app}/{key}"


@dataclass(frozen=True)
class NodeContext:
    """What an actor needs to know about the node that it runs on."""

    plan: AppPlan
    """The plan with the paths of this node."""
    run_dir: RunDir
    network: Network | None
    """None if the application runs on one node."""

    @classmethod
    def enter(cls, plan: AppPlan) -> "NodeContext":
        """Find this process's node, and hold its run directory until ``run_dir.leave()``.

        Raises: ConfigError, ModelError if this node lacks files that the builder's node has
        """
        if plan.nodes == 1:
            return cls(plan, RunDir.enter(plan.run_dir), None)
        node = str(ray.get_runtime_context().get_node_id())
        run_dir = base_dir() / f"{plan.run_dir.name}-{node[:8]}"
        path = plan.model_path
        here = replace(
            plan, run_dir=run_dir, model_path=path if path.exists() else _model_here(plan)
        )
        network = Network(
            node=node,
            host=_address_of(node),
            run_dir=run_dir,
            directory=RayDirectory(plan.run_dir.name),
            access=Access.of(plan.config.network, plan.token),
            pool=plan.named("pool"),
        )
        return cls(here, RunDir.enter(run_dir), network)

    @property
    def routes(self) -> Routes:
        return self.network or LOCAL


def _address_of(node: str) -> str:
    """The IP address under which a node is known to the Ray cluster."""
    nodes = cast("list[dict[str, object]]", ray.nodes())
    return next(str(one["NodeManagerAddress"]) for one in nodes if one["NodeID"] == node)


def _model_here(plan: AppPlan) -> Path:
    # It imports torch, which pool, router and ingress do without to start seconds earlier.
    from triptych.workers.models.store.model_store import resolve  # noqa: PLC0415

    return resolve(plan.config.model.name)
