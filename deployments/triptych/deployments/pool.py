"""The pool's shell: an actor of the Serve controller that owns the arena of its node."""

from triptych.deployments.plan import AppPlan
from triptych.kvpool import PoolServer


class PoolShell:
    """Starts the pool service when it is created; its pages outlive every worker."""

    def __init__(self, plan: AppPlan) -> None:
        self._server = PoolServer(
            plan.config.pool, plan.pages.page_bytes, address=plan.pool_address
        )
        self._server.start()
