# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""The shell of HTTP and gRPC: their apps in a Serve replica, fed with tokens by its mailbox."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

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
from triptych.deployments.board import Board
from triptych.deployments.http import Health, Intake, ModelCard, create_app
from triptych.deployments.link import RouterLink
from triptych.deployments.plan import AppPlan, new_name
from triptych.deployments.routes import LOCAL, Routes
from triptych.deployments.rpc import RpcServer
from triptych.deployments.site import Site
from triptych.deployments.status import Status
from triptych.router import Journey, Journeys
from triptych.workers.tokenizer import open_tokenizer

logger = logging.getLogger(__name__)

ROUTER_GRACE_S = 30.0
"""How long requests wait for a router that is being started anew."""

Event = Tokens | Failed
RouterHandle = DeploymentHandle[Any]
WorkerHandle = DeploymentHandle[Any]


class RouterEngine:
    """What the HTTP app talks to: requests go to the router, tokens come from the workers.

    A request whose worker or router dies is sent again, with what its client has so far; the
    stream goes on where it stopped.
    """

    def __init__(
        self,
        plan: AppPlan,
        router: RouterHandle,
        workers: Sequence[WorkerHandle] = (),
        routes: Routes = LOCAL,
    ) -> None:
        """``workers``: one handle for each deployment of workers."""
        name = new_name("ingress")
        self.address = plan.address(name)
        self._router, self._workers = router, workers
        self._journeys = Journeys()
        self._unsent = dict[str, Journey]()
        """Attempts that wait for a router, by the request's id."""
        self._giving_up: asyncio.TimerHandle | None = None
        self._link = RouterLink(
            Hello(name=name, address=self.address),
            plan.router_address,
            self._receive,
            routes=routes,
            on_router_found=self._on_router_found,
            on_router_lost=self._on_router_lost,
        )

    async def start(self) -> None:
        await self._link.start()

    async def stop(self) -> None:
        await self._link.stop()

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """Tokens of all the requests as they come; leaving early cancels the rest."""
        events = asyncio.Queue[Event]()
        open_journeys = {r.id: self._journeys.start(r, events.put_nowait) for r in requests}
        for journey in open_journeys.values():
            self._submit(journey)
        try:
            while open_journeys:
                event = await events.get()
                if isinstance(event, Failed) or event.finish is not None:
                    del open_journeys[event.request]
                yield event
        finally:
            for journey in open_journeys.values():
                self._end(journey)
            if open_journeys and self._link.is_up:
                ids = (journey.id for journey in open_journeys.values())
                self._link.to_router(Cancel(requests=tuple(sorted(ids))))

    async def health(self) -> Health:
        missing = (await self._status()).missing_stages
        return Health(ok=not missing, reason=f"no {' and no '.join(missing)} worker is running")

    async def gauges(self) -> Mapping[str, float]:
        """What router and pool know, for /metrics."""
        return (await self._status()).gauges()

    async def board(self) -> Mapping[str, object]:
        """What router and pool know, for the dashboard."""
        try:
            board = cast("Board", await self._router.board.remote())
        except RayError as error:
            raise Overloaded("the router does not answer") from error
        return await asyncio.to_thread(board.json)

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        """What the router decided about a client's request."""
        try:
            return await self._router.explain.remote(client_id)
        except RayError as error:
            raise Overloaded("the router does not answer") from error

    async def decision(self, client_id: str) -> str:
        """The same in one line; empty if the router does not answer."""
        try:
            return await self._router.decision.remote(client_id)
        except RayError:
            return ""

    async def profile(
        self, steps: int, seconds: float, *, trace: bool
    ) -> list[Mapping[str, object]]:
        """What the next steps are made of: of each deployment of workers one replica tells.

        Raises: Overloaded if one is looked on already, or does not answer
        """
        asked = [one.profile.remote(steps, seconds, trace=trace) for one in self._workers]
        try:
            told: list[Mapping[str, object] | None] = await asyncio.gather(*asked)
        except RayError as error:
            raise Overloaded("a worker does not answer") from error
        if None in told:
            raise Overloaded("another profile is being taken; try again when it is done")
        return [one for one in told if one is not None]

    async def _status(self) -> Status:
        try:
            return await self._router.status.remote()
        except RayError as error:
            raise Overloaded("the router does not answer") from error

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        for message in messages:
            if not isinstance(message, Tokens | Failed):
                continue
            journey = self._journeys.get(message.request)
            if journey is None:
                continue  # of an attempt that was given up, or whose client is gone
            if isinstance(message, Failed):
                self._failed(journey, message)
            elif journey.hear(message):
                self._end(journey)

    def _failed(self, journey: Journey, failure: Failed) -> None:
        if failure.resumable and self._journeys.again(journey):
            logger.info("request %s goes on: %s", journey.id, failure.message)
            self._submit_later(journey, journey.id)
        else:
            self._end(journey)
            journey.fail(failure)

    def _submit_later(self, journey: Journey, attempt: str) -> None:
        def submit() -> None:
            if self._journeys.get(attempt) is journey:  # its client still waits for it
                self._submit(journey)

        asyncio.get_running_loop().call_later(journey.delay_s, submit)

    def _submit(self, journey: Journey) -> None:
        """Send the present attempt to the router, now or when there is one."""
        if self._link.is_up:
            self._link.to_router(Submit(request=journey.present()))
            return
        self._unsent[journey.request.id] = journey
        if self._giving_up is None:
            later = asyncio.get_running_loop().call_later
            self._giving_up = later(ROUTER_GRACE_S, self._give_up_on_router)

    def _end(self, journey: Journey) -> None:
        self._journeys.end(journey)
        self._unsent.pop(journey.request.id, None)

    def _on_router_found(self) -> None:
        for journey in self._take_unsent():
            self._submit(journey)

    def _on_router_lost(self) -> None:
        for journey in self._journeys:
            self._failed(journey, failed(journey.id, StageLost("router")))

    def _give_up_on_router(self) -> None:
        for journey in self._take_unsent():
            self._end(journey)
            journey.fail(failed(journey.id, Overloaded("the router does not answer")))

    def _take_unsent(self) -> list[Journey]:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        unsent, self._unsent = self._unsent, {}
        return list(unsent.values())


@serve.ingress()
class IngressShell:
    """One copy of the HTTP server's application."""

    async def __init__(
        self, plan: AppPlan, router: RouterHandle, _pools: object, *workers: WorkerHandle
    ) -> None:
        self._site = await asyncio.to_thread(Site.arrive, plan)
        self._plan = self._site.plan
        tokenizer = await asyncio.to_thread(open_tokenizer, self._plan.model_path)
        self._engine = RouterEngine(self._plan, router, workers, self._site.routes)
        self._intake = Intake(
            engine=self._engine,
            tokenizer=tokenizer,
            model=ModelCard(
                name=self._plan.config.model.public_name,
                context_tokens=self._plan.context_tokens,
                created=int(time.time()),
                fidelity=self._plan.fidelity,
            ),
            config=self._plan.config.ingress,
        )
        self._rpc = RpcServer(self._intake)
        await self._engine.start()
        await self._rpc.start()
        self._warming = asyncio.create_task(asyncio.to_thread(tokenizer.warm_up))

    async def __del__(self) -> None:
        await self._rpc.stop()
        await self._engine.stop()
        self._site.run_dir.leave()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._intake,
            gauges=self._engine.gauges,
            board=self._engine.board,
            reasons=self._engine,
            profiles=self._engine.profile,
            send_request_id=False,
        )
