"""The pool's shell: a replica that owns the arena of its node."""

import time
from contextlib import ExitStack

from triptych.deployments.app_plan import AppPlan
from triptych.deployments.transport import run_dir
from triptych.deployments.transport.node_context import NodeContext
from triptych.kvpool import PREFIX_WORKER, PoolServer, PrefixSettings, is_guest

LEAVING_S = 5.0
"""How long a pool that is told to leave waits for the workers to do so before it."""


class PoolReplica:
    """Starts the pool service when it is created; its pages outlive every worker.

    It is a replica of a deployment, one on each node, since Serve looks at replicas once a second
    and at actors of deployments every ten seconds.
    """

    def __init__(self, plan: AppPlan) -> None:
        run_dir.remove_orphans()
        self._site = NodeContext.arrive(plan)
        # Serve begins a successor before one that it gave up has ended, which would then take
        # the successor's socket with it
        plan, network = self._site.plan, self._site.network
        self._alone = ExitStack()
        self._alone.enter_context(self._site.run_dir.only_one(plan.named("pool")))
        self._server = PoolServer(
            plan.config.pool,
            plan.pages.page_bytes,
            address=plan.pool_address,
            prefixes=PrefixSettings.of(plan.config.pool, plan.pages),
            outside=(network.host, network.access) if network else None,
        )
        self._server.start()
        if network and self._server.outside:
            network.announce_pool(self._server.arena, self._server.outside)

    def __del__(self) -> None:
        """Serve ends the application, or this replica: the workers of this node go first."""
        until = time.monotonic() + LEAVING_S
        while self._has_workers() and time.monotonic() < until:
            time.sleep(0.1)
        if self._site.network:
            self._site.network.forget_pool()
        self._server.stop()
        self._alone.close()
        self._site.run_dir.leave()

    def _has_workers(self) -> bool:
        """Processes of this node; the cache of prefixes has a line in the books, but is here."""
        lines = self._server.stat().workers
        return any(
            line.pid and line.name != PREFIX_WORKER and not is_guest(line.name) for line in lines
        )
