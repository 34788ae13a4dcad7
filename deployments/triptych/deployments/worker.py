"""A worker's shell: model, engines and their loop in one replica, a link to the router."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from triptych.core.messages import ROUTER, Hello, Message, Send, Stage
from triptych.deployments.link import RouterLink
from triptych.deployments.plan import AppPlan, new_name
from triptych.deployments.rundir import RunDir
from triptych.kvpool import PoolClient
from triptych.workers.build import build_engines, cores_for
from triptych.workers.journal import journal_bytes
from triptych.workers.loop import StageLoop

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
STUCK_STEP_S = 120.0


def _journal_bytes(plan: AppPlan, stages: Sequence[Stage]) -> int:
    """Only decode has more to leave than can be computed again at once."""
    slots = plan.config.decode.max_batch_requests
    return journal_bytes(plan.pages, slots, plan.context_tokens) if "decode" in stages else 0


class WorkerShell:
    """One replica of a stage, or of all three when they are colocated."""

    async def __init__(self, plan: AppPlan, stages: Sequence[Stage]) -> None:
        self.name = new_name("-".join(stages))
        self._run_dir = RunDir.enter(plan.run_dir)
        self._events = asyncio.get_running_loop()
        self._pool = await asyncio.to_thread(
            PoolClient, plan.pool_address, self.name, journal_bytes=_journal_bytes(plan, stages)
        )
        engines = await asyncio.to_thread(
            build_engines, plan.config, plan.pages, plan.model_path, self._pool, stages
        )
        cores = cores_for(plan.config, stages, plan.turns)
        self._loop = StageLoop(self.name, engines, self._deliver, cores)
        address = plan.address(self.name)
        hello = Hello(
            name=self.name,
            address=address,
            stages=tuple(stages),
            arena=self._pool.arena.id,
            max_requests=plan.config.decode.max_batch_requests if "decode" in stages else 0,
        )
        self._link = RouterLink(
            address,
            plan.router_address,
            hello,
            self._receive,
            on_router_found=lambda: None,
            on_router_lost=self._on_router_lost,
        )
        self._loop.start()
        await self._link.start()
        self._reporting = asyncio.create_task(self._report())

    def check_health(self) -> None:
        """Fail, so that Serve replaces this replica, if it can do no more work."""
        if not self._loop.is_alive:
            raise RuntimeError(f"{self.name}: the compute loop ended")
        if self._loop.step_age_s > STUCK_STEP_S:
            raise RuntimeError(f"{self.name}: a step is stuck for {self._loop.step_age_s:.0f} s")
        if self._pool.is_lost:
            raise RuntimeError(f"{self.name}: the pool does not know this worker any more")

    async def __del__(self) -> None:
        self._reporting.cancel()
        await asyncio.to_thread(self._loop.stop)
        await self._link.stop()
        await asyncio.to_thread(self._pool.close)
        self._run_dir.leave()

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        for message in messages:
            self._loop.post(message)

    def _deliver(self, sends: Sequence[Send]) -> None:
        """From the compute thread into the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: we are shutting down
            self._events.call_soon_threadsafe(self._post, sends)

    def _post(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if send.to == ROUTER:
                self._link.to_router(send.message)
            else:
                self._link.mailbox.post(send.to, send.message)

    def _on_router_lost(self) -> None:
        logger.warning("%s: the router is gone; dropping every request", self.name)
        self._loop.cancel_all()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            report = self._loop.report(self._pool.taken_pages, self._pool.bytes_copied)
            self._link.to_router(report)
