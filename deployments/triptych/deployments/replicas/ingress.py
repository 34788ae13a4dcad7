# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""The Serve deployment of the ingress: the HTTP and gRPC servers over one ``RouterClient``."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from ray import serve

from triptych.deployments.app_plan import AppPlan, new_name
from triptych.deployments.grpc import GrpcServer
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.deployments.http.metrics import CacheBlocks, IngressMetrics
from triptych.deployments.replicas.memory_tuning import tune_memory
from triptych.deployments.replicas.received_bodies import free_received_bodies
from triptych.deployments.replicas.router_client import RouterClient
from triptych.deployments.replicas.router_stats import RouterHandle, WorkerHandle
from triptych.deployments.replicas.shared_metrics import INTERVAL_S, SharedMetrics
from triptych.deployments.replicas.shared_usage import SharedUsage
from triptych.deployments.transport.event_relay import EventRelay
from triptych.deployments.transport.node_context import NodeContext
from triptych.workers.models.store.generation_config import read_sampling_defaults
from triptych.workers.models.tokenizer import open_tokenizer, with_chat_template, with_images

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1


@serve.ingress()
class IngressReplica:
    """The ingress replica: FastAPI app, gRPC server and the client of the routers."""

    async def __init__(
        self,
        plan: AppPlan,
        routers: Sequence[RouterHandle],
        workers: Sequence[WorkerHandle],
        *_pools: object,
    ) -> None:
        """``plan``: that of the first shard; the ingress uses only what all shards share."""
        self._node = await asyncio.to_thread(NodeContext.enter, plan)
        self._plan = self._node.plan
        self._publishing: asyncio.Task[None] | None = None
        read = await asyncio.to_thread(open_tokenizer, self._plan.model_path)
        read = with_chat_template(read, self._plan.chat_template)
        tokenizer = with_images(read, self._plan.vision.layout)
        model = self._plan.config.model
        self._engine = RouterClient(self._plan, routers, workers, self._node.routes)
        self._serving = OpenAIServing(
            engine=self._engine,
            tokenizer=tokenizer,
            model=ModelCard(
                name=model.public_name,
                aliases=model.served_names[1:],
                root=model.name,
                reasoning=model.reasoning_parser,
                fingerprint=f"fp_{self._plan.revision[:12]}",
                sampling_defaults=_sampling_defaults(self._plan),
                context_tokens=self._plan.longest_request_tokens,
                served_tokens=self._plan.max_model_len,
                window_tokens=self._plan.context_tokens,
                vocab_tokens=self._plan.vocab_tokens,
                created=int(time.time()),
                images=self._plan.vision.layout,
                images_reason=self._plan.vision.reason,
                methods=tuple(self._plan.pages.by_method),
                adaptive=self._plan.pages.adaptive,
                scoring_methods=tuple(
                    name
                    for name, one in self._plan.pages.by_method.items()
                    if one.policy.scores_tokens
                ),
                fidelity=self._plan.pages.fidelity,
                measured_on=self._plan.measured_on,
                floor=self._plan.config.compressor.floor,
                max_kl=self._plan.config.compressor.max_kl,
                plugins=self._plan.offers,
            ),
            config=self._plan.config.ingress,
            metrics=self._metrics(),
            usage=self._shared_usage(),
        )
        self._rpc = GrpcServer(self._serving)
        self._relay = EventRelay(self._node.run_dir.path / f"{new_name('events')}.sock")
        await self._relay.start()
        await self._engine.start()
        await self._rpc.start()
        tune_memory()
        free_received_bodies()
        warm_up = self._serving.request_builder.warm_up
        self._warming = asyncio.create_task(asyncio.to_thread(warm_up))

    def _metrics(self) -> IngressMetrics:
        """Metrics of this replica, or of all of the node if there are several."""
        methods, blocks = tuple(self._plan.pages.by_method), _cache_blocks(self._plan)
        if self._is_alone:
            return IngressMetrics(methods, blocks)
        shared = SharedMetrics(self._node.run_dir.path / "metrics")
        metrics = IngressMetrics(methods, blocks, shared.others)
        self._publishing = asyncio.create_task(_publish(metrics, shared))
        return metrics

    @property
    def _is_alone(self) -> bool:
        return self._plan.config.ingress.num_replicas == 1

    def _shared_usage(self) -> SharedUsage | None:
        """Where several replicas count the use of keys together; None if there is one."""
        return None if self._is_alone else SharedUsage(self._node.run_dir.path / "keys")

    async def __del__(self) -> None:
        """Serve has waited for HTTP requests; gRPC requests do not pass through it."""
        await self._finish_requests()
        if self._publishing is not None:
            self._publishing.cancel()
        await self._rpc.stop()
        await self._engine.stop()
        await self._relay.stop()
        self._node.run_dir.leave()

    async def _finish_requests(self) -> None:
        grace_s = self._plan.config.ingress.graceful_shutdown_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._serving.metrics.in_progress:  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._serving,
            gauges=self._engine.stats.gauges,
            dashboard=self._engine.stats.dashboard,
            decisions=self._engine.stats,
            profile=self._engine.stats.profile,
            send_request_id=False,
            relay=self._relay,
        )


async def _publish(metrics: IngressMetrics, shared: SharedMetrics) -> None:
    """Show the other replicas what this one has counted, until the task is cancelled."""
    try:
        while True:
            try:
                shared.write(metrics.samples())
            except OSError as error:  # a full disk must not end it
                logger.warning("other replicas do not see the metrics of this one: %s", error)
            await asyncio.sleep(INTERVAL_S)
    finally:
        shared.write(metrics.samples())


def _cache_blocks(plan: AppPlan) -> CacheBlocks:
    block = plan.pages.block_tokens
    return CacheBlocks(block_size=block, num_gpu_blocks=plan.shards * plan.cache_tokens // block)


def _sampling_defaults(plan: AppPlan) -> Mapping[str, float]:
    """Defaults of the model, unless the settings turn them off."""
    if plan.config.model.generation_config == "none":
        return {}
    return read_sampling_defaults(plan.model_path)
