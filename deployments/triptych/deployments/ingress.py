# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""The HTTP shell: the OpenAI app in a Serve replica, fed with tokens by its mailbox."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from triptych.core.errors import Overloaded, StageLost
from triptych.core.messages import (
    Cancel,
    Failed,
    Hello,
    Message,
    Request,
    Submit,
    Tokens,
    failed,
)
from triptych.deployments.http import Health, ModelCard, create_app
from triptych.deployments.link import RouterLink
from triptych.deployments.plan import AppPlan, new_name
from triptych.deployments.rundir import RunDir
from triptych.deployments.status import Status
from triptych.workers.models.pretrained import read_tokenizer

Event = Tokens | Failed
RouterHandle = DeploymentHandle[Any]


class RouterEngine:
    """What the HTTP app talks to: requests go to the router, tokens come from the workers."""

    def __init__(self, plan: AppPlan, router: RouterHandle) -> None:
        self.address = plan.address(new_name("ingress"))
        hello = Hello(name=new_name("ingress"), address=self.address)
        self._router = router
        self._streams = dict[str, asyncio.Queue[Event]]()
        self._link = RouterLink(
            self.address, plan.router_address, hello, self._receive, self._on_router_lost
        )

    async def start(self) -> None:
        await self._link.start()

    async def stop(self) -> None:
        await self._link.stop()

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """Tokens of all the requests as they come; leaving early cancels the rest."""
        events, open_ids = asyncio.Queue[Event](), {request.id for request in requests}
        for request in requests:
            self._streams[request.id] = events
            self._link.to_router(Submit(request=request))
        try:
            while open_ids:
                event = await events.get()
                if event.request not in open_ids:
                    continue  # its worker died after the last token: the answer is whole
                if isinstance(event, Failed) or event.finish is not None:
                    open_ids.discard(event.request)
                yield event
        finally:
            for request in requests:
                self._streams.pop(request.id, None)
            if open_ids:
                self._link.to_router(Cancel(requests=tuple(sorted(open_ids))))

    async def health(self) -> Health:
        missing = (await self._status()).missing_stages
        return Health(ok=not missing, reason=f"no {' and no '.join(missing)} worker is running")

    async def gauges(self) -> Mapping[str, float]:
        """What router and pool know, for /metrics."""
        return (await self._status()).gauges()

    async def _status(self) -> Status:
        try:
            return await self._router.status.remote()
        except RayError as error:
            raise Overloaded("the router does not answer") from error

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        for message in messages:
            if isinstance(message, Tokens | Failed) and message.request in self._streams:
                self._streams[message.request].put_nowait(message)

    def _on_router_lost(self) -> None:
        for request, stream in list(self._streams.items()):
            stream.put_nowait(failed(request, StageLost("router")))


@serve.ingress()
class IngressShell:
    """One copy of the HTTP server's application."""

    async def __init__(self, plan: AppPlan, router: RouterHandle, *stages: object) -> None:
        self._plan = plan
        self._run_dir = RunDir.enter(plan.run_dir)
        self._engine = RouterEngine(plan, router)
        await self._engine.start()

    async def __del__(self) -> None:
        await self._engine.stop()
        self._run_dir.leave()

    def __serve_build_asgi_app__(self) -> FastAPI:
        plan = self._plan
        card = ModelCard(
            name=plan.config.model.public_name,
            context_tokens=plan.context_tokens,
            created=int(time.time()),
        )
        return create_app(
            engine=self._engine,
            tokenizer=read_tokenizer(plan.model_path),
            model=card,
            config=plan.config.ingress,
            gauges=self._engine.gauges,
            send_request_id=False,
        )
