"""The pool's shell: an actor of the Serve controller that owns the arena of its node."""

from ray.actor import exit_actor

from triptych.deployments import rundir
from triptych.deployments.plan import AppPlan
from triptych.kvpool import PoolServer, PrefixSettings


class PoolShell:
    """Starts the pool service when it is created; its pages outlive every worker."""

    def __init__(self, plan: AppPlan) -> None:
        rundir.remove_orphans()
        self._run_dir = rundir.RunDir.enter(plan.run_dir)
        self._server = PoolServer(
            plan.config.pool,
            plan.pages.page_bytes,
            address=plan.pool_address,
            prefixes=PrefixSettings.of(plan.config.pool, plan.pages),
        )
        self._server.start()

    def close(self) -> None:
        """Remove the arena and end this actor: Serve would kill it, and leave the file behind."""
        self._server.stop()
        self._run_dir.leave()
        exit_actor()
