"""How workers and ingresses keep in touch with the router, and find it again after its death."""

import asyncio
import logging
from collections.abc import Callable

from triptych.core.messages import Hello, Message
from triptych.deployments.mailbox import Mailbox, Receive
from triptych.deployments.routes import LOCAL, Routes

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""How often one looks for a router that is gone: everybody's requests wait for it."""


class RouterLink:
    """A mailbox that introduces itself to the router, and again whenever the router is new.

    ``on_router_lost`` is called each time the router dies: what it had decided is void, so
    a worker drops its requests and an ingress sends its own again.
    """

    def __init__(
        self,
        hello: Hello,
        router: str,
        receive: Receive,
        *,
        routes: Routes = LOCAL,
        on_router_found: Callable[[], None] = lambda: None,
        on_router_lost: Callable[[], None],
    ) -> None:
        self._router, self._hello = router, hello
        self._on_router_found, self._on_router_lost = on_router_found, on_router_lost
        self.is_up = False
        """Whether the router is there, as far as one knows."""
        self.mailbox = Mailbox(hello.address, receive, self._lost, routes)
        self._retry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.mailbox.start()
        self._introduce()

    def introduce(self, hello: Hello) -> None:
        """Say hello under another name: who had the old one is no more."""
        self._hello = hello
        self.to_router(hello)

    async def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        await self.mailbox.stop()

    def to_router(self, message: Message) -> None:
        self.mailbox.post(self._router, message)

    def _introduce(self) -> None:
        self.mailbox.watch(self._router, found=self._found)
        self.to_router(self._hello)

    def _found(self) -> None:
        self.is_up = True
        self._on_router_found()

    def _lost(self, address: str) -> None:
        if address != self._router:
            return  # an ingress that died: the router tells us what to cancel
        self._retry = asyncio.create_task(self._introduce_later())
        if self.is_up:
            self.is_up = False
            self._on_router_lost()

    async def _introduce_later(self) -> None:
        await asyncio.sleep(RETRY_S)
        self._introduce()
