"""The Serve deployment of the KV page pool: one replica per node, which owns the node's arena."""

import time
from contextlib import ExitStack

from triptych.deployments.app_plan import AppPlan
from triptych.deployments.replicas.memory_tuning import tune_memory
from triptych.deployments.transport import run_dir
from triptych.deployments.transport.node_context import NodeContext
from triptych.kvpool import (
    OWN_WORKERS,
    CudaDriver,
    DeviceMemory,
    PoolServer,
    PrefixSettings,
    is_guest,
)

LEAVING_S = 5.0
"""How long a pool that is shut down waits for the workers of its node to exit first, after the
grace period in which they finish their requests."""


class PoolReplica:
    """Runs the pool service of a node; its pages outlive every worker.

    It is a Serve replica and not a plain actor since Serve checks replicas every second, and
    actors that replicas own only every ten seconds.
    """

    def __init__(self, plan: AppPlan) -> None:
        run_dir.remove_orphans()
        self._node = NodeContext.enter(plan)
        # Serve may start a replacement before the old replica has ended, which would then remove
        # the replacement's socket.
        plan, network = self._node.plan, self._node.network
        self._alone = ExitStack()
        self._alone.enter_context(self._node.run_dir.only_one(plan.named("pool")))
        self._server = PoolServer(
            plan.config.pool,
            plan.pages.page_bytes,
            address=plan.pool_address,
            prefixes=PrefixSettings.of(plan.config.pool, plan.pages),
            outside=(network.host, network.access) if network else None,
            device_memory=_device_memory(plan),
        )
        self._server.start()
        tune_memory()
        if network and self._server.outside:
            network.announce_pool(self._server.arena, self._server.outside)

    def __del__(self) -> None:
        """Wait until the workers of this node have exited, then stop the service."""
        grace_s = self._node.plan.config.ingress.graceful_shutdown_timeout_s
        until = time.monotonic() + grace_s + LEAVING_S
        while self._has_workers() and time.monotonic() < until:
            time.sleep(0.1)
        if self._node.network:
            self._node.network.forget_pool()
        self._server.stop()
        self._alone.close()
        self._node.run_dir.leave()

    def _has_workers(self) -> bool:
        """Whether workers of this node are connected, the pool's own and guests aside."""
        lines = self._server.stat().workers
        return any(
            line.pid and line.name not in OWN_WORKERS and not is_guest(line.name) for line in lines
        )


def _device_memory(plan: AppPlan) -> DeviceMemory | None:
    """The GPUs that this process sees, if pages are to be there."""
    if plan.config.pool.arena == "host":
        return None
    driver = CudaDriver()
    return DeviceMemory(driver, tuple(driver.devices), plan.host_arena_bytes)
