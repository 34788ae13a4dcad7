# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""The shell of HTTP and gRPC: their apps in a Serve replica, fed with tokens by its mailbox."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from triptych.core.errors import Overloaded, StageLost
from triptych.core.messages import (
    Cancel,
    Failed,
    Message,
    Register,
    Request,
    Submit,
    Tokens,
    failed,
)
from triptych.deployments.app_plan import AppPlan, new_name
from triptych.deployments.grpc import GrpcServer
from triptych.deployments.http import Health, ModelCard, OpenAIServing, create_app
from triptych.deployments.monitoring.dashboard_state import DashboardState, joined
from triptych.deployments.monitoring.status import Status
from triptych.deployments.replicas.gc_tuning import settle_heap
from triptych.deployments.transport.addressing import LOCAL, Routes
from triptych.deployments.transport.node_context import NodeContext
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.deployments.transport.router_link import RouterLink
from triptych.router import AttemptTable, RequestAttempts, Shards
from triptych.router.frontend.shards import bytes_of, key_of, may_pass_on, names_of
from triptych.workers.models.tokenizer import open_tokenizer

logger = logging.getLogger(__name__)

ROUTER_GRACE_S = 30.0
"""How long requests wait for a router that is being started anew, if there is no other one."""
ROUTER_ANSWER_S = 2.0
"""How long one of several routers is waited for; less than whoever asks this ingress waits."""

Event = Tokens | Failed
RouterHandle = DeploymentHandle[Any]
WorkerHandle = DeploymentHandle[Any]


class RouterEngine:
    """What the HTTP app talks to: requests go to a router, tokens come from the workers.

    If there are several routers, a request goes to the cell that has what it begins with, and to
    another one if that is down, full, or would not take it. A request whose worker or router dies
    is sent again, with what its client has so far; the stream goes on where it stopped.
    """

    def __init__(
        self,
        plan: AppPlan,
        routers: Sequence[RouterHandle] = (),
        workers: Sequence[WorkerHandle] = (),
        routes: Routes = LOCAL,
    ) -> None:
        """``routers``: one of each cell; ``workers``: one for each deployment of workers."""
        name = new_name("ingress")
        self.address = plan.address(name)
        self._workers, self._pages = workers, plan.pages
        names = list(names_of(plan.cells))
        self._routers = dict(zip(names, routers, strict=False))
        self.journeys = AttemptTable(plan.windows)
        """What is under way."""
        self._unsent = dict[str, RequestAttempts]()
        """Attempts that wait for a router, by the request's id."""
        self._giving_up: asyncio.TimerHandle | None = None
        self._mailbox = PeerChannel(self.address, self._receive, self._on_lost, routes)
        self.cells = Shards(names, plan.config.router.shard_overload, plan.readers)
        hello = Register(name=name, address=self.address)
        self._links = {
            cell: RouterLink(
                self._mailbox,
                hello,
                address,
                on_found=partial(self._on_router_found, cell),
                on_lost=partial(self._on_router_lost, cell),
            )
            for cell, address in zip(names, plan.router_addresses, strict=True)
        }

    async def start(self) -> None:
        await self._mailbox.start()
        for link in self._links.values():
            link.start()

    async def stop(self) -> None:
        for link in self._links.values():
            link.stop()
        await self._mailbox.stop()

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """Tokens of all the requests as they come; leaving early cancels the rest."""
        events = asyncio.Queue[Event]()
        open_journeys = {r.id: self.journeys.start(r, events.put_nowait) for r in requests}
        for journey in open_journeys.values():
            self._submit(journey)
        try:
            while open_journeys:
                event = await events.get()
                if isinstance(event, Failed) or event.finish is not None:
                    del open_journeys[event.request]
                yield event
        finally:
            self._cancel(list(open_journeys.values()))

    async def health(self) -> Health:
        """Whether any cell has a worker of each stage."""
        missing = [status.missing_stages for status in await self._statuses()]
        least = min(missing, key=len)
        return Health(ok=not least, reason=f"no {' and no '.join(least)} worker is running")

    async def gauges(self) -> Mapping[str, float]:
        """What routers and pools know, for /metrics."""
        return {**Status.of(await self._statuses()).gauges(), **self._cell_gauges()}

    async def board(self) -> Mapping[str, object]:
        """What routers and pools know, for the dashboard."""
        boards = cast("dict[str, DashboardState]", await self._ask("board"))
        return await asyncio.to_thread(lambda: joined([one.json() for one in boards.values()]))

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        """What the routers decided about a client's request, first come first."""
        told = await self._ask("explain", client_id)
        if len(self._links) == 1:
            return told["0"]
        lives = [{"cell": cell, **life} for cell, found in told.items() for life in found]
        return sorted(lives, key=_came_s_ago, reverse=True)

    async def decision(self, client_id: str) -> str:
        """The same in one line; empty if no router answers."""
        try:
            told = await self._ask("decision", client_id)
        except Overloaded:
            return ""
        if len(self._links) == 1:
            return str(told["0"])
        return "; ".join(f"cell={cell}; {line}" for cell, line in told.items() if line)

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

    async def _statuses(self) -> list[Status]:
        return list((await self._ask("status")).values())

    async def _ask(self, method: str, *arguments: str) -> dict[str, Any]:
        """What the routers answer, by cell. Of several, those that are down are left out.

        Raises: Overloaded if none answers
        """
        asked = self.cells.up if len(self._links) > 1 else list(self._links)
        answers = await asyncio.gather(
            *(self._ask_one(cell, method, arguments) for cell in asked), return_exceptions=True
        )
        told = dict[str, Any]()
        for cell, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                told[cell] = answer
            elif not isinstance(answer, RayError | TimeoutError):
                raise answer
        if not told:
            raise Overloaded("the router does not answer")
        return told

    async def _ask_one(self, cell: str, method: str, arguments: Sequence[str]) -> object:
        async with asyncio.timeout(ROUTER_ANSWER_S if len(self._links) > 1 else None):
            return await getattr(self._routers[cell], method).remote(*arguments)

    def _cell_gauges(self) -> dict[str, float]:
        """How requests are spread over cells; nothing if there is one."""
        if len(self._links) == 1:
            return {}
        held, chosen = self.cells.held_bytes, self.cells.counters
        return {
            "triptych_cells": float(len(held)),
            "triptych_cells_up": float(len(self.cells.up)),
            **{f'triptych_cell_bytes{{cell="{cell}"}}': float(held[cell]) for cell in held},
            **{
                f'triptych_cell_choices{{reason="{reason}"}}': float(count)
                for reason, count in chosen.items()
            },
        }

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        for message in messages:
            if not isinstance(message, Tokens | Failed):
                continue
            journey = self.journeys.get(message.request)
            if journey is None:
                continue  # of an attempt that was given up, or whose client is gone
            if isinstance(message, Failed):
                self._failed(journey, message)
            elif journey.hear(message):
                self._end(journey)
            elif journey.is_at_window_end:
                self.journeys.again(journey)
                self._submit(journey)
            elif journey.is_torn:
                cell = self.cells.where(journey.request.id)
                self._links[cell].post(Cancel(requests=(journey.id,)))
                self._failed(journey, failed(journey.id, StageLost("decode")))

    def _failed(self, journey: RequestAttempts, failure: Failed) -> None:
        if failure.resumable and self.journeys.again(journey):
            logger.info("request %s goes on: %s", journey.id, failure.message)
            self._submit_later(journey, journey.id)
        elif journey.is_untouched and may_pass_on(failure):
            self._refused(journey, failure)
        else:
            self._end(journey)
            journey.fail(failure)

    def _refused(self, journey: RequestAttempts, refusal: Failed) -> None:
        """Ask another cell; when none is left, tell the client what sounds soonest."""
        told = journey.refused(refusal)
        cell = self.cells.pass_on(journey.request.id)
        if cell is None:
            self._end(journey)
            journey.fail(told)
        else:
            self._links[cell].post(Submit(request=journey.present()))

    def _submit_later(self, journey: RequestAttempts, attempt: str) -> None:
        def submit() -> None:
            if self.journeys.get(attempt) is journey:  # its client still waits for it
                self._submit(journey)

        asyncio.get_running_loop().call_later(journey.delay_s, submit)

    def _submit(self, journey: RequestAttempts) -> None:
        """Send the present attempt to a router, now or when there is one."""
        name, request = journey.request.id, journey.present()
        key, nbytes = key_of(journey.request, self._pages), bytes_of(request, self._pages)
        cell = self.cells.place(name, key, nbytes)
        if cell is not None:
            self._links[cell].post(Submit(request=request))
            return
        self._unsent[name] = journey
        if self._giving_up is None:
            later = asyncio.get_running_loop().call_later
            self._giving_up = later(ROUTER_GRACE_S, self._give_up_on_router)

    def _cancel(self, journeys: Sequence[RequestAttempts]) -> None:
        """Their clients are gone: tell the cells that have them."""
        for cell, link in self._links.items():
            there = [one for one in journeys if self.cells.where(one.request.id) == cell]
            if there and link.is_up:
                link.post(Cancel(requests=tuple(sorted(one.id for one in there))))
        for journey in journeys:
            self._end(journey)

    def _end(self, journey: RequestAttempts) -> None:
        self.journeys.end(journey)
        self.cells.remove(journey.request.id)
        self._unsent.pop(journey.request.id, None)

    def _on_lost(self, address: str) -> None:
        for link in self._links.values():
            link.lost(address)

    def _on_router_found(self, cell: str) -> None:
        self.cells.found(cell)
        for journey in self._take_unsent():
            self._submit(journey)

    def _on_router_lost(self, cell: str) -> None:
        self.cells.lost(cell)
        for journey in self.journeys:
            if self.cells.where(journey.request.id) == cell:
                self._failed(journey, failed(journey.id, StageLost("router")))

    def _give_up_on_router(self) -> None:
        for journey in self._take_unsent():
            self._end(journey)
            journey.fail(failed(journey.id, Overloaded("the router does not answer")))

    def _take_unsent(self) -> list[RequestAttempts]:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        unsent, self._unsent = self._unsent, {}
        return list(unsent.values())


def _came_s_ago(life: Mapping[str, Any]) -> float:
    return float(life["came_s_ago"])


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
        self._engine = RouterEngine(self._plan, routers, workers, self._site.routes)
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
            gauges=self._engine.gauges,
            board=self._engine.board,
            reasons=self._engine,
            profiles=self._engine.profile,
            send_request_id=False,
        )
