"""The router's shell: clock, mailbox and peers around the pure coordinator."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from triptych.core.errors import PoolError
from triptych.core.messages import (
    POOL,
    BorrowCacheMemory,
    Expel,
    Message,
    Register,
    Report,
    Send,
    Stage,
)
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.monitoring.dashboard_state import SHOWN_PAGES, DashboardState
from triptych.deployments.monitoring.explain import explained, summary
from triptych.deployments.monitoring.pool_group import PoolGroup
from triptych.deployments.monitoring.status import Status
from triptych.deployments.monitoring.tracing import Tracer
from triptych.deployments.replicas.gc_tuning import settle_heap
from triptych.deployments.transport.node_context import NodeContext
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.kvpool import guest_name
from triptych.router import Timeouts
from triptych.router.passes.autoscaling import wanted
from triptych.router.replay import end_recording, open_scheduler

logger = logging.getLogger(__name__)

TICK_S = 0.25
TRACE_S = 1.0
REFUSE_S = 3.0
"""How long a request waits for a stage that its cell lacks before it is to ask another cell."""
SHOWN_LIVES = 256
"""Requests that the dashboard gets, of all cells."""
RECLAIM_S = 2.0
"""The pool notices a dead process of its node at its next sweep, long before a lease expires."""
LEAVING_S = 5.0
"""How long the router, told to leave, waits for the workers to do so before it."""


class RouterReplica:
    """Feeds messages, losses and the clock to the coordinator, and posts what it answers."""

    async def __init__(self, plan: AppPlan) -> None:
        self._site = await asyncio.to_thread(NodeContext.arrive, plan)
        plan = self._site.plan
        self._coordinator = open_scheduler(
            plan.config.router,
            plan.pages,
            plan.bookable_bytes,
            Timeouts(reclaim_s=RECLAIM_S, refuse_s=REFUSE_S if plan.cells > 1 else None),
        )
        self._pools = PoolGroup(plan.pool_address, self._site.network)
        self._names = dict[str, str]()
        """Of workers, by address."""
        self._watched = set[str]()
        self._reports = dict[str, Report]()
        self._asking = set[asyncio.Task[None]]()
        self._in_order = asyncio.Lock()
        self._mailbox = PeerChannel(
            plan.router_address, self._receive, self._on_lost, self._site.routes
        )
        settle_heap()
        await self._mailbox.start()
        self._ticking = asyncio.create_task(self._tick())
        url = plan.config.router.otlp_traces_endpoint
        self._tracing = asyncio.create_task(self._trace(Tracer(url))) if url else None

    async def status(self) -> Status:
        """What runs where, what is booked, and why: for /health and /metrics."""
        snapshot = self._coordinator.snapshot(time.monotonic())
        ledgers = await asyncio.to_thread(self._pools.stat)
        return Status(snapshot, ledgers, tuple(self._reports.values()))

    async def board(self) -> DashboardState:
        """What happens in this cell at this moment, for the dashboard."""
        plan, router = self._site.plan, self._coordinator
        status, pages = await asyncio.gather(
            self.status(), asyncio.to_thread(self._pools.map, SHOWN_PAGES // plan.cells)
        )
        now = time.monotonic()
        return DashboardState(
            status,
            pages,
            router.traces(SHOWN_LIVES // plan.cells),
            router.handles(),
            router.report_ages_s(now),
            now,
            plan.cells,
            plan.cell,
        )

    async def explain(self, client_id: str) -> list[dict[str, object]]:
        """What was decided about a client's request; empty if nobody knows it any more."""
        now, router = time.monotonic(), self._coordinator
        lives = router.decisions(client_id)
        under_way = {
            life.request: found for life in lives if (found := router.explain(life.request, now))
        }
        return explained(lives, under_way, now)

    async def decision(self, client_id: str) -> str:
        """The same in one line, for a client."""
        return summary(self._coordinator.decisions(client_id))

    async def wanted_replicas(self, stages: Sequence[Stage]) -> float:
        """How many replicas should have these stages: what Serve's autoscaling asks."""
        demand = self._coordinator.demand(time.monotonic())
        config = self._site.plan.config
        return max(
            wanted(stage, demand, config.autoscaling(stages[-1]).target_utilization)
            for stage in stages
        )

    async def __del__(self) -> None:
        """Serve ends the application: whoever is told something by the router goes first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S):
                while self._coordinator.snapshot(time.monotonic()).workers:  # noqa: ASYNC110
                    await asyncio.sleep(TICK_S)
        self._ticking.cancel()
        if self._tracing is not None:
            self._tracing.cancel()
        await self._mailbox.stop()
        end_recording(self._coordinator)
        await asyncio.to_thread(self._pools.close)
        self._site.run_dir.leave()

    def check_health(self) -> None:
        if self._ticking.done():
            raise RuntimeError("the router's clock stopped")

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        for message in messages:
            if isinstance(message, Report):
                self._reports[sender] = message
            if isinstance(message, Register):
                self._names[message.address] = message.name
                if message.address not in self._watched:
                    self._watched.add(message.address)
                    self._mailbox.watch(message.address)
        self._post(self._coordinator.receive(messages, sender, time.monotonic()))

    def _on_lost(self, address: str) -> None:
        self._watched.discard(address)
        self._reports.pop(address, None)
        name = self._names.pop(address, "")
        if name and self._site.network:
            self._begin_to_ask(
                Expel(worker=guest_name(name))
            )  # what it was fetching is nobody's any more
        self._post(self._coordinator.lost(address, time.monotonic()))

    async def _tick(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(TICK_S)
                self._post(self._coordinator.tick(time.monotonic()))

    async def _trace(self, tracer: Tracer) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(TRACE_S)
                epoch_s = time.time() - time.monotonic()
                await tracer.post(self._coordinator.traces(), epoch_s)

    def _post(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, Expel | BorrowCacheMemory):
                self._begin_to_ask(send.message)
            else:
                self._mailbox.post(send.to, send.message)

    def _begin_to_ask(self, message: Expel | BorrowCacheMemory) -> None:
        task = asyncio.create_task(self._ask_pools(message))
        self._asking.add(task)  # or the garbage collector may take it
        task.add_done_callback(self._asking.discard)

    async def _ask_pools(self, message: Expel | BorrowCacheMemory) -> None:
        try:
            if isinstance(message, Expel):
                await asyncio.to_thread(self._pools.expel, message.worker)
                return
            async with self._in_order:  # or an older answer may be heard last
                lent = await asyncio.to_thread(self._pools.borrow_cache_memory, message.bytes)
                if lent is not None:
                    self._post(self._coordinator.on(lent, POOL, time.monotonic()))
        except PoolError as error:  # then nothing is left of anybody, and nothing is lent
            logger.warning("a pool does not hear %s: %s", message, error)
