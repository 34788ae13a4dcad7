"""How workers and ingresses keep in touch with a router, and find it again after its death."""

import asyncio
import logging
from collections.abc import Callable

from triptych.core.messages import Message, Register
from triptych.deployments.transport.peer_channel import PeerChannel

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""How often one looks for a router that is gone: everybody's requests wait for it."""


class RouterLink:
    """Introduces a mailbox to a router, and again whenever the router is new.

    Whoever owns the mailbox passes on whom it lost. ``on_lost`` is called each time the router
    dies: what it had decided is void, so a worker drops its requests and an ingress sends its own
    again.
    """

    def __init__(
        self,
        peer_channel: PeerChannel,
        hello: Register,
        router: str,
        *,
        on_found: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None],
    ) -> None:
        self._mailbox, self._router, self._hello = peer_channel, router, hello
        self._on_found, self._on_lost = on_found, on_lost
        self.is_up = False
        """Whether the router is there, as far as one knows."""
        self._retry: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for the router; the mailbox must have been started."""
        self._introduce()

    def introduce(self, hello: Register) -> None:
        """Say hello under another name: who had the old one is no more."""
        self._hello = hello
        self.post(hello)

    def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    def post(self, message: Message) -> None:
        """Send the router a message."""
        self._mailbox.post(self._router, message)

    def lost(self, address: str) -> None:
        """Somebody is gone; it need not be the router, which says itself what to do of others."""
        if address != self._router:
            return
        self._retry = asyncio.create_task(self._introduce_later())
        if self.is_up:
            self.is_up = False
            self._on_lost()

    def _introduce(self) -> None:
        self._mailbox.watch(self._router, found=self._found)
        self.post(self._hello)

    def _found(self) -> None:
        self.is_up = True
        self._on_found()

    async def _introduce_later(self) -> None:
        await asyncio.sleep(RETRY_S)
        self._introduce()
