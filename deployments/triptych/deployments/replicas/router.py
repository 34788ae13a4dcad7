"""The Serve deployment of the router: clock and message channel around the pure ``Scheduler``."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from triptych.core.errors import PoolError, TriptychError
from triptych.core.messages import (
    POOL,
    ROUTER,
    BorrowCacheMemory,
    Drain,
    Expel,
    Message,
    Register,
    Report,
    Send,
    Stage,
)
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.monitoring.dashboard_state import SHOWN_PAGES, DashboardState
from triptych.deployments.monitoring.explain import explanations, summary
from triptych.deployments.monitoring.pool_group import PoolGroup
from triptych.deployments.monitoring.status import Status
from triptych.deployments.monitoring.tracing import Tracer
from triptych.deployments.replicas.memory_tuning import tune_memory
from triptych.deployments.transport.node_context import NodeContext
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.kvpool import guest_name
from triptych.router.events.peers import Timeouts
from triptych.router.passes.autoscaling import wanted
from triptych.router.replay import end_recording, open_scheduler

logger = logging.getLogger(__name__)

WORKER_LOST = "worker %s counts as lost: %s"
TICK_S = 0.25
TRACE_S = 1.0
REFUSE_S = 3.0
"""How long a request waits for a missing stage before its shard rejects it for another one."""
SHOWN_TRACES = 256
"""Request traces that the dashboard shows, over all shards."""
RECLAIM_S = 2.0
"""The pool finds a dead process of its node in its next sweep, well before a lease expires."""
LEAVING_S = 5.0
"""How long a router that is shut down waits for the workers to exit first."""


class RouterReplica:
    """Passes messages, lost peers and the clock to the scheduler, and posts what it returns."""

    async def __init__(self, plan: AppPlan) -> None:
        self._node = await asyncio.to_thread(NodeContext.enter, plan)
        plan = self._node.plan
        timeouts = Timeouts(reclaim_s=RECLAIM_S, refuse_s=REFUSE_S if plan.shards > 1 else None)
        self._silent_s = timeouts.silent_s
        self._scheduler = open_scheduler(
            plan.config.router,
            plan.pages,
            plan.bookable_bytes,
            timeouts,
        )
        self._pools = PoolGroup(plan.pool_address, self._node.network)
        self._names = dict[str, str]()
        """Names of workers, by address."""
        self._watched = set[str]()
        self._reports = dict[str, Report]()
        self._asking = set[asyncio.Task[None]]()
        self._in_order = asyncio.Lock()
        self._channel = PeerChannel(
            plan.router_address,
            self._receive,
            self._on_lost,
            self._node.routes,
            self._on_undeliverable,
        )
        tune_memory()
        await self._channel.start()
        self._ticking = asyncio.create_task(self._tick())
        url = plan.config.router.otlp_traces_endpoint
        self._tracing = asyncio.create_task(self._trace(Tracer(url))) if url else None

    async def status(self) -> Status:
        """Workers, reserved memory and counters, for /health and /metrics."""
        snapshot = self._scheduler.snapshot(time.monotonic())
        pool_stats = await asyncio.to_thread(self._pools.stat)
        return Status(
            snapshot, pool_stats, tuple(self._reports.values()), stages=self._node.plan.stages
        )

    async def dashboard_state(self) -> DashboardState:
        """A snapshot of this shard, for the dashboard."""
        plan, router = self._node.plan, self._scheduler
        status, pages = await asyncio.gather(
            self.status(), asyncio.to_thread(self._pools.map, SHOWN_PAGES // plan.shards)
        )
        now = time.monotonic()
        return DashboardState(
            status,
            pages,
            router.traces(SHOWN_TRACES // plan.shards),
            router.handles(),
            router.report_ages_s(now),
            now,
            plan.shards,
            plan.shard,
        )

    async def explain(self, client_id: str) -> list[dict[str, object]]:
        """The decisions about a client's request; empty if it is no longer in the history."""
        now, router = time.monotonic(), self._scheduler
        traces = router.decisions(client_id)
        under_way = {
            trace.request: found
            for trace in traces
            if (found := router.explain(trace.request, now))
        }
        return explanations(traces, under_way, now)

    async def decision(self, client_id: str) -> str:
        """The decisions in one line, for the response header."""
        return summary(self._scheduler.decisions(client_id))

    async def wanted_replicas(self, stages: Sequence[Stage]) -> float:
        """How many replicas with these stages the load needs, for Serve's autoscaling."""
        demand = self._scheduler.demand(time.monotonic())
        config = self._node.plan.config
        return max(
            wanted(stage, demand, config.autoscaling(stages[-1]).target_utilization)
            for stage in stages
        )

    async def drain(self) -> None:
        """Refuse new requests, and return when none is left.

        Requests that still run after ``ingress.graceful_shutdown_timeout_s`` fail.
        """
        grace_s = self._node.plan.config.ingress.graceful_shutdown_timeout_s
        self._post(self._scheduler.on(Drain(timeout_s=grace_s), ROUTER, time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + LEAVING_S):
                while not self._scheduler.is_drained:  # noqa: ASYNC110
                    await asyncio.sleep(TICK_S)

    async def __del__(self) -> None:
        """Drain, then wait until the workers have exited, as they still need the router."""
        await self.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S):
                while self._scheduler.snapshot(time.monotonic()).workers:  # noqa: ASYNC110
                    await asyncio.sleep(TICK_S)
        self._ticking.cancel()
        if self._tracing is not None:
            self._tracing.cancel()
        await self._channel.stop()
        end_recording(self._scheduler)
        await asyncio.to_thread(self._pools.close)
        self._node.run_dir.leave()

    async def check_health(self) -> None:
        # Serve calls a function that is not a coroutine in a thread, which costs more than this.
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
                    self._channel.watch(message.address)
        self._post(self._scheduler.receive(messages, sender, time.monotonic()))

    def _on_lost(self, address: str) -> None:
        self._watched.discard(address)
        self._reports.pop(address, None)
        name = self._names.pop(address, "")
        if name:  # no warning: all connections end when the server stops
            logger.info(WORKER_LOST, name, "its connection ended")
        if name and self._node.network:
            self._begin_to_ask(
                Expel(worker=guest_name(name))
            )  # frees the pages that it was fetching
        self._post(self._scheduler.lost(address, time.monotonic()))

    def _on_undeliverable(self, message: Message, error: TriptychError) -> None:
        self._post(self._scheduler.undeliverable(message, error, time.monotonic()))

    async def _tick(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(TICK_S)
                self._post(self._scheduler.tick(time.monotonic()))

    async def _trace(self, tracer: Tracer) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(TRACE_S)
                epoch_s = time.time() - time.monotonic()
                await tracer.post(self._scheduler.traces(), epoch_s)

    def _post(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, Expel) and send.message.worker in self._names.values():
                why = f"no report for {self._silent_s:g} s, or a step without an end"
                logger.warning(WORKER_LOST, send.message.worker, why)
            if isinstance(send.message, Expel | BorrowCacheMemory):
                self._begin_to_ask(send.message)
            else:
                self._channel.post(send.to, send.message)

    def _begin_to_ask(self, message: Expel | BorrowCacheMemory) -> None:
        task = asyncio.create_task(self._ask_pools(message))
        self._asking.add(task)  # keeps the garbage collector away
        task.add_done_callback(self._asking.discard)

    async def _ask_pools(self, message: Expel | BorrowCacheMemory) -> None:
        try:
            if isinstance(message, Expel):
                await asyncio.to_thread(self._pools.expel, message.worker)
                return
            async with self._in_order:  # so that answers are handled in the order of the calls
                lent = await asyncio.to_thread(self._pools.lend, message.bytes)
                if lent is not None:
                    self._post(self._scheduler.on(lent, POOL, time.monotonic()))
        except PoolError as error:  # a pool that is gone holds no pages, and lends none
            logger.warning("pool unavailable for %s: %s", message, error)
