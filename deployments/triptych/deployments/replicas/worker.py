# Ray's handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The Serve deployment of a worker: model, stage engines and step loop, linked to the router."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from ray import serve

from triptych.core.errors import PoolError
from triptych.core.messages import (
    ROUTER,
    Confirm,
    Drain,
    Drained,
    Message,
    Register,
    RegisterAgain,
    Send,
    Stage,
)
from triptych.deployments.app_plan import AppPlan, new_name
from triptych.deployments.monitoring.live_profiler import Json, LiveProfiler
from triptych.deployments.placement.autoscaling import WANTED
from triptych.deployments.replicas.memory_tuning import tune_memory
from triptych.deployments.transport.node_context import NodeContext
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.deployments.transport.router_link import RouterLink
from triptych.kvpool import HOST, CudaDriver, Driver, Fetcher, PoolClient
from triptych.workers.decode.checkpoint import checkpoint_bytes
from triptych.workers.factory import (
    capture_usual_steps,
    cores_for,
    device_of,
    load_model,
    load_vision,
    make_engines,
    prefix_store,
)
from triptych.workers.kv.remote_fetch import RemoteFetch
from triptych.workers.loop import StageLoop

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
CONFIRM_EVERY_S = 10.0
"""How often the router is asked whether the requests that are here are still to be."""
STUCK_STEP_S = 120.0
DRAIN_NOTICE_S = 1.0
"""How long a worker that is to exit waits for the news that the whole application stops."""
DRAIN_MARGIN_S = 5.0
"""How much longer than the grace period a worker waits for the router's last message."""
POOL_ANSWER_S = 30.0
"""How long one attempt to connect to the pool waits; another attempt follows."""
POOL_GRACE_S = 300.0
"""How long a worker without a pool waits for a new one before it fails its health check.

Replacing the worker does not help: its replacement waits for the same pool, and loads the model on
cores that the pool needs to start. This limit is for a worker that alone cannot connect.
"""


def _checkpoint_bytes(plan: AppPlan, stages: Sequence[Stage]) -> int:
    """Bytes for the decode checkpoint; 0 for workers without the decode stage."""
    slots = plan.config.decode.max_num_seqs
    return checkpoint_bytes(plan.pages, slots, plan.context_tokens) if "decode" in stages else 0


def _own_gpu(plan: AppPlan) -> tuple[Driver, str] | None:
    """The GPU of this process and its driver, if pages are to be on GPUs."""
    if plan.config.pool.arena == "host":
        return None
    driver = CudaDriver()
    return driver, next(iter(driver.devices), HOST)


class WorkerReplica:
    """One replica of a stage, or of all three stages when they are colocated.

    The model is loaded once. When the pool is lost, the worker connects to the next one under a
    new name: it registers again and makes new, empty engines.
    """

    _reporting: asyncio.Task[None] | None = None
    """None: it has not started yet."""

    async def __init__(self, plan: AppPlan, stages: Sequence[Stage]) -> None:
        self._node = await asyncio.to_thread(NodeContext.enter, plan)
        self._plan, self._stages = self._node.plan, tuple(stages)
        plan = self._plan
        self._events = asyncio.get_running_loop()
        self._pool, self._lost_since = await asyncio.to_thread(self._join_pool), 0.0
        self._device = await asyncio.to_thread(device_of, plan.config, self._stages)
        logger.info("%s: computes on %s", self._pool.worker, self._device.name)
        self._loaded_model = await asyncio.to_thread(
            load_model, plan.config, plan.pages, plan.model_path, stages, self._device
        )
        model = self._loaded_model
        self._tower = await asyncio.to_thread(
            load_vision, plan.config, plan.model_path, stages, self._device
        )
        if model:
            plan.check_revision(model.answers.model.revision)
        self._live_profiler = LiveProfiler(
            self._stages, model.answers.model.network.step_bytes if model else 0
        )
        self._loop = await asyncio.to_thread(self._make_loop)
        self._address = plan.address(self._pool.worker)
        self._inbound = self._make_inbound()
        self._channel = PeerChannel(self._address, self._receive, self._on_lost, self._node.routes)
        self._link = RouterLink(
            self._channel,
            self._registration,
            plan.router_address,
            on_found=self._on_router_found,
            on_lost=self._on_router_lost,
        )
        self._rejoining: asyncio.Task[None] | None = None
        self._draining, self._drained = asyncio.Event(), asyncio.Event()
        tune_memory()
        self._loop.start()
        await self._channel.start()
        self._link.start()
        self._reporting = asyncio.create_task(self._keep_reporting())

    async def check_health(self) -> None:
        """Raise, so that Serve replaces this replica, if it can do no more work."""
        if self._pool.is_lost or self._lost_since:  # the loop ended, and the next is being made
            lost_s = time.monotonic() - self._lost_since if self._lost_since else 0.0
            if lost_s > POOL_GRACE_S:
                raise RuntimeError(f"{self._pool.worker}: no pool for {lost_s:.0f} s")
        elif not self._loop.is_alive:
            raise RuntimeError(f"{self._pool.worker}: the compute loop ended")
        elif self._loop.step_age_s > STUCK_STEP_S:
            age_s = self._loop.step_age_s
            raise RuntimeError(f"{self._pool.worker}: a step is stuck for {age_s:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's autoscaling metric of this stage: how many replicas the router wants."""
        application = serve.get_replica_context().app_name
        router: Any = serve.get_deployment_handle(self._plan.named("Router"), application)
        return {WANTED: await router.wanted_replicas.remote(self._stages)}

    async def profile(self, steps: int, seconds: float, *, trace: bool) -> Json | None:
        """Profile the next steps of this worker; None if a profile is being taken already."""
        name, loop = self._pool.worker, self._loop
        return await self._live_profiler.profile(name, loop, steps, seconds, trace=trace)

    async def __del__(self) -> None:
        if self._reporting is None:  # the pool sees that the process ends
            return
        await self._finish_requests()
        self._reporting.cancel()
        if self._rejoining is not None:
            self._rejoining.cancel()
        await asyncio.to_thread(self._close_inbound)
        await asyncio.to_thread(self._loop.stop)
        self._link.stop()
        await self._channel.stop()
        await asyncio.to_thread(self._pool.close)
        self._node.run_dir.leave()

    async def _finish_requests(self) -> None:
        """Work on until no request is left, if the whole application stops.

        A worker that exits alone does so at once, and others go on with its requests. Serve stops
        router and workers at about the same time, so the news may come a little later.
        """
        grace_s = self._plan.config.ingress.graceful_shutdown_timeout_s
        with contextlib.suppress(TimeoutError):
            if self._link.is_up:
                await asyncio.wait_for(self._draining.wait(), DRAIN_NOTICE_S)
                await asyncio.wait_for(self._drained.wait(), grace_s + DRAIN_MARGIN_S)

    # ---------------------------------------------------------------- the pool

    def _join_pool(self) -> PoolClient:
        return PoolClient(
            self._plan.pool_address,
            new_name("-".join(self._stages)),
            arena_directory=self._plan.config.pool.arena_directory,
            checkpoint_bytes=_checkpoint_bytes(self._plan, self._stages),
            connect_timeout_s=POOL_ANSWER_S,
            device=_own_gpu(self._plan),
            keeps_copies=not {"prefill", "compress"} & set(self._stages),
        )

    def _make_loop(self) -> StageLoop:
        plan = self._plan
        self._prefixes = prefix_store(
            plan.config, plan.pages, self._pool, plan.revision, self._device
        )
        engines = make_engines(
            plan.config,
            plan.pages,
            self._loaded_model,
            self._pool,
            self._stages,
            prefixes=self._prefixes,
            device=self._device,
            tower=self._tower,
        )
        capture_usual_steps(engines)
        cores = cores_for(plan.config, self._stages, plan.turns)
        loaded = self._loaded_model
        grammars = loaded.answers.grammars if loaded is not None else None
        return StageLoop(self._pool.worker, engines, self._deliver, cores, grammars)

    def _make_inbound(self) -> RemoteFetch | None:
        """The fetcher of pages from other nodes; None if there is only one node."""
        network = self._node.network
        if network is None:
            return None
        fetcher = Fetcher(self._pool, network.find_pool, network.access)
        return RemoteFetch(self._pool, fetcher, self._loop.post, self._deliver)

    def _close_inbound(self) -> None:
        if self._inbound is not None:
            self._inbound.close()

    @property
    def _registration(self) -> Register:
        config = self._plan.config
        return Register(
            name=self._pool.worker,
            address=self._address,
            stages=self._stages,
            arena=self._pool.home,
            max_requests=config.decode.max_num_seqs if "decode" in self._stages else 0,
        )

    async def _rejoin_pool(self) -> None:
        """Connect to the next pool; the new registration tells the router that all is lost."""
        self._lost_since = self._lost_since or time.monotonic()
        logger.warning("%s: the pool is gone; waiting for the next one", self._pool.worker)
        await asyncio.to_thread(self._close_inbound)
        await asyncio.to_thread(self._loop.stop)
        await asyncio.to_thread(self._pool.close)
        with contextlib.suppress(PoolError):  # then the next report tries again
            self._pool = await asyncio.to_thread(self._join_pool)
        if self._pool.is_lost:
            return
        self._loop, self._lost_since = await asyncio.to_thread(self._make_loop), 0.0
        self._inbound = self._make_inbound()
        self._loop.start()
        self._link.register(self._registration)
        self._report()

    # ---------------------------------------------------------------- messages

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        if self._pool.is_lost:
            return  # the router fails these requests when this worker registers again
        take = self._inbound.take if self._inbound else self._loop.post
        for message in messages:
            match message:
                case RegisterAgain():
                    self._link.forgotten()
                case Drain():
                    self._draining.set()
                case Drained():
                    self._drained.set()
                case _:
                    take(message)

    def _deliver(self, sends: Sequence[Send]) -> None:
        """Hand messages from the compute thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: we are shutting down
            self._events.call_soon_threadsafe(self._post, sends)

    def _post(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if send.to == ROUTER:
                self._link.post(send.message)
            else:
                self._channel.post(send.to, send.message)

    def _on_lost(self, address: str) -> None:
        self._link.lost(address)

    def _on_router_found(self) -> None:
        self._draining.clear()
        self._drained.clear()
        self._report()

    def _on_router_lost(self) -> None:
        self._draining.set()  # a router that is gone has nothing more to say
        self._drained.set()
        logger.warning("%s: the router is gone; dropping every request", self._pool.worker)
        if self._inbound:
            self._inbound.cancel_all()
        self._loop.cancel_all()

    def _report(self) -> None:
        """Send a load report; without one the router treats the worker as full."""
        skipped = dict(self._prefixes.skipped) if self._prefixes else dict[str, int]()
        report = self._loop.report(self._pool.allocated_pages, self._pool.bytes_copied, skipped)
        if self._inbound:
            report = self._inbound.completed(report)
        self._link.post(report)

    def _confirm(self) -> None:
        """A request that the router has given up would keep its pages for ever."""
        if held := self._loop.held():
            self._link.post(Confirm(requests=held))

    async def _keep_reporting(self) -> None:
        confirmed = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if self._pool.is_lost and (self._rejoining is None or self._rejoining.done()):
                self._rejoining = asyncio.create_task(self._rejoin_pool())
            self._report()
            if time.monotonic() - confirmed >= CONFIRM_EVERY_S:
                confirmed = time.monotonic()
                self._confirm()
