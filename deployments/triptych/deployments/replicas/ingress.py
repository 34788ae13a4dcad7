# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""The Serve deployment of the ingress: the HTTP and gRPC servers over one ``RouterClient``."""

import asyncio
import time
from collections.abc import Sequence

from fastapi import FastAPI
from ray import serve

from triptych.deployments.app_plan import AppPlan
from triptych.deployments.grpc import GrpcServer
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.deployments.replicas.gc_tuning import settle_heap
from triptych.deployments.replicas.router_client import RouterClient
from triptych.deployments.replicas.router_stats import RouterHandle, WorkerHandle
from triptych.deployments.transport.node_context import NodeContext
from triptych.workers.models.tokenizer import open_tokenizer


@serve.ingress()
class IngressReplica:
    """One copy of the HTTP server's application."""

    async def __init__(
        self,
        plan: AppPlan,
        routers: Sequence[RouterHandle],
        workers: Sequence[WorkerHandle],
        *_pools: object,
    ) -> None:
        """``plan``: of the first cell; what an ingress looks at is the same in all of them."""
        self._site = await asyncio.to_thread(NodeContext.arrive, plan)
        self._plan = self._site.plan
        tokenizer = await asyncio.to_thread(open_tokenizer, self._plan.model_path)
        self._engine = RouterClient(self._plan, routers, workers, self._site.routes)
        self._intake = OpenAIServing(
            engine=self._engine,
            tokenizer=tokenizer,
            model=ModelCard(
                name=self._plan.config.model.public_name,
                context_tokens=self._plan.longest_tokens,
                window_tokens=self._plan.context_tokens,
                created=int(time.time()),
                fidelity=self._plan.fidelity,
                plugins=self._plan.offers,
            ),
            config=self._plan.config.ingress,
        )
        self._rpc = GrpcServer(self._intake)
        await self._engine.start()
        await self._rpc.start()
        settle_heap()
        self._warming = asyncio.create_task(asyncio.to_thread(tokenizer.warm_up))

    async def __del__(self) -> None:
        await self._rpc.stop()
        await self._engine.stop()
        self._site.run_dir.leave()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._intake,
            gauges=self._engine.stats.gauges,
            board=self._engine.stats.board,
            reasons=self._engine.stats,
            profiles=self._engine.stats.profile,
            send_request_id=False,
        )
