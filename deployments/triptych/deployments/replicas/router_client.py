"""The engine of the HTTP app: requests go to routers, tokens come from workers, losses are retried.

Which shard takes a request is decided in ``shard_links``; what an operator may see comes from
``router_stats``.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from triptych.core.errors import Cancelled, Overloaded, ShuttingDown, StageLost, TriptychError
from triptych.core.images import Image
from triptych.core.messages import (
    Drain,
    Failed,
    Message,
    Register,
    RegisterAgain,
    Request,
    Submit,
    Tokens,
    Unknown,
    WantImages,
    failed,
    pixels_for,
)
from triptych.deployments.app_plan import AppPlan, new_name
from triptych.deployments.http import Health
from triptych.deployments.replicas.router_stats import RouterHandle, RouterStats, WorkerHandle
from triptych.deployments.replicas.shard_links import ShardLinks
from triptych.deployments.transport.addressing import LOCAL, Routes
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.router import AttemptTable, RequestAttempts, Shards
from triptych.router.frontend.shards import may_pass_on, names_of

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval of the checks whether attempts make progress."""
CONFIRM_S = 5.0
"""Interval at which routers are asked about attempts that do not."""
ROUTER_GRACE_S = 30.0
"""How long requests wait for a router to be restarted, if there is no other one."""

MAX_EVENTS = 16_384
"""Events that wait for one client at most; each is a token or more."""

Event = Tokens | Failed


class RouterClient:
    """Runs requests on the stages, and retries those whose worker or router dies.

    A retry carries the tokens that the client has so far, so the stream continues where it stopped.
    """

    def __init__(
        self,
        plan: AppPlan,
        routers: Sequence[RouterHandle] = (),
        workers: Sequence[WorkerHandle] = (),
        routes: Routes = LOCAL,
    ) -> None:
        """``routers``: one of each shard; ``workers``: one of each deployment of workers."""
        name = new_name("ingress")
        self.address = plan.address(name)
        names = list(names_of(plan.shards))
        self.shards = Shards(names, plan.config.router.shard_overload, plan.readers)
        self.stats = RouterStats(self.shards, names, routers, workers)
        self.attempts = AttemptTable(plan.windows)
        """The present attempt at each running request."""
        self._images = dict[str, Sequence[Image]]()
        """Images of the requests that run, by the client's request; ``ImageDecoder`` bounds their
        bytes."""
        self._unsent = dict[str, RequestAttempts]()
        """Attempts that wait for a router, by the request's id."""
        self._grace: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None
        self._channel = PeerChannel(
            self.address, self._receive, self._on_lost, routes, self._on_undeliverable
        )
        self._links = ShardLinks(
            plan,
            self._channel,
            Register(name=name, address=self.address),
            self.shards,
            on_found=self._on_router_found,
            on_lost=self._on_router_lost,
        )

    async def start(self) -> None:
        await self._channel.start()
        self._links.start()
        self._checking = asyncio.create_task(self._keep_checking())

    async def stop(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        self._links.stop()
        await self._channel.stop()

    async def health(self) -> Health:
        """Whether any shard has a worker of each stage, and the application does not stop."""
        if self._links.are_draining:
            return Health(ok=False, reason=str(ShuttingDown()))
        return await self.stats.health()

    async def generate(
        self, requests: Sequence[Request], images: Sequence[Image] = ()
    ) -> AsyncGenerator[Event, None]:
        """Yield tokens of all the requests as they arrive; closing it cancels what still runs.

        Raises: ShuttingDown; Cancelled if ``MAX_EVENTS`` of them wait, since the client reads too
            slowly
        """
        if self._links.are_draining:
            raise ShuttingDown
        events = asyncio.Queue[Event]()
        is_stalled = False

        def tell(event: Event) -> None:
            nonlocal is_stalled
            if events.qsize() < MAX_EVENTS:
                events.put_nowait(event)
            elif not is_stalled:
                is_stalled = True
                self._abort(list(running.values()))

        self._images |= dict.fromkeys((r.id for r in requests), images) if images else {}
        running = {r.id: self.attempts.start(r, tell) for r in requests}
        self._submit(list(running.values()))
        try:
            while running:
                if is_stalled:
                    raise Cancelled(f"the client has not read {MAX_EVENTS} events")
                event = await events.get()
                if isinstance(event, Failed) or event.finish is not None:
                    del running[event.request]
                yield event
        finally:
            self._abort(list(running.values()))
            for request in requests:
                self._images.pop(request.id, None)

    def _receive(self, messages: Sequence[Message], sender: str) -> None:
        for message in messages:
            match message:
                case Tokens() | Failed():
                    self._event(message)
                case Unknown():
                    self._unknown(message)
                case WantImages():
                    self._send_images(message, sender)
                case Drain():
                    self._links.drain(sender)
                case RegisterAgain():
                    self._links.forgotten(sender)
                case _:
                    pass

    def _send_images(self, message: WantImages, encoder: str) -> None:
        """Send pixels to an encode worker; it asks only for images that it has not cached."""
        attempts = self.attempts.get(message.request)
        held = self._images.get(attempts.request.id, ()) if attempts is not None else ()
        for data in pixels_for(message, held):
            self._channel.post(encoder, data)

    def _event(self, message: Event) -> None:
        """Take output of an attempt, or its failure."""
        attempts = self.attempts.get(message.request)
        if attempts is None:
            return  # of an attempt that was given up, or whose client is gone
        if isinstance(message, Failed):
            self._failed(attempts, message)
        elif attempts.hear(message):
            self._end(attempts)
        elif attempts.is_at_window_end:
            self.attempts.again(attempts)
            self._submit([attempts])
        elif attempts.is_torn:
            self._torn(attempts)

    def _torn(self, attempts: RequestAttempts) -> None:
        """Some of an attempt's output is lost: cancel it, and make another one."""
        self._links.abort(attempts)
        self._failed(attempts, failed(attempts.id, StageLost("decode")))

    def _unknown(self, message: Unknown) -> None:
        """Attempts that will have no more output; what was sent before may still be under way."""
        for name in message.requests:
            attempts = self.attempts.get(name)
            if attempts is not None and attempts.unknown():
                self._failed(attempts, failed(attempts.id, StageLost("decode")))

    async def _keep_checking(self) -> None:
        """Find attempts without progress: a message about them may be lost."""
        confirmed = 0.0
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            quiet = list[RequestAttempts]()
            for attempts in self.attempts:
                progress = attempts.progress(now)
                if progress == "torn":
                    self._torn(attempts)
                elif progress == "quiet":
                    quiet.append(attempts)
            if now - confirmed >= CONFIRM_S:
                confirmed = now
                self._links.confirm(quiet)

    def _on_undeliverable(self, message: Message, error: TriptychError) -> None:
        """A router cannot take a message; if it is a request, that one fails."""
        for request in message.requests if isinstance(message, Submit) else ():
            if attempts := self.attempts.get(request.id):
                self._end(attempts)
                attempts.fail(failed(attempts.id, error))

    def _failed(self, attempts: RequestAttempts, failure: Failed) -> None:
        if failure.resumable and self.attempts.again(attempts):
            logger.info("request %s is retried: %s", attempts.id, failure.message)
            self._submit_later(attempts, attempts.id)
        elif attempts.is_untouched and may_pass_on(failure):
            self._refused(attempts, failure)
        else:
            self._end(attempts)
            attempts.fail(failure)

    def _refused(self, attempts: RequestAttempts, refusal: Failed) -> None:
        """Try another shard; if none is left, fail with the refusal that has the soonest retry."""
        soonest = attempts.refused(refusal)
        if not self._links.resubmit(attempts):
            self._end(attempts)
            attempts.fail(soonest)

    def _submit_later(self, attempts: RequestAttempts, attempt: str) -> None:
        def submit() -> None:
            if self.attempts.get(attempt) is attempts:  # its client still waits for it
                self._submit([attempts])

        asyncio.get_running_loop().call_later(attempts.delay_s, submit)

    def _submit(self, attempts: Sequence[RequestAttempts]) -> None:
        """Send the present attempts to routers, now or when one is connected."""
        unsent = self._links.submit(attempts)
        self._unsent.update((one.request.id, one) for one in unsent)
        if unsent and self._grace is None:
            later = asyncio.get_running_loop().call_later
            self._grace = later(ROUTER_GRACE_S, self._fail_unsent)

    def _abort(self, unfinished: Sequence[RequestAttempts]) -> None:
        """Their client is gone: cancel them in their shards."""
        self._links.abort_all(unfinished)
        for attempts in unfinished:
            self._end(attempts)

    def _end(self, attempts: RequestAttempts) -> None:
        self.attempts.end(attempts)
        self.shards.remove(attempts.request.id)
        self._unsent.pop(attempts.request.id, None)

    def _on_lost(self, address: str) -> None:
        self._links.peer_lost(address)

    def _on_router_found(self) -> None:
        self._submit(self._take_unsent())

    def _on_router_lost(self, shard: str) -> None:
        if self._links.are_draining:
            self._fail_all(ShuttingDown())
            return
        for attempts in self.attempts:
            if self.shards.where(attempts.request.id) == shard:
                self._failed(attempts, failed(attempts.id, StageLost("router")))

    def _fail_all(self, error: TriptychError) -> None:
        for attempts in list(self.attempts):
            self._end(attempts)
            attempts.fail(failed(attempts.id, error))

    def _fail_unsent(self) -> None:
        for attempts in self._take_unsent():
            self._end(attempts)
            attempts.fail(failed(attempts.id, Overloaded("the router does not answer")))

    def _take_unsent(self) -> list[RequestAttempts]:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        unsent, self._unsent = self._unsent, {}
        return list(unsent.values())
