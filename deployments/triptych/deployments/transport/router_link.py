"""The link of a worker or ingress to its router: registration, and reconnection after a loss."""

import asyncio
import logging
from collections.abc import Callable

from triptych.core.messages import Message, Register
from triptych.deployments.transport.peer_channel import PeerChannel

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Interval of attempts to reconnect; short, since all requests wait for the router."""


class RouterLink:
    """Registers a process with its router, and again whenever the router was restarted.

    The owner of the channel must call ``lost`` for each lost peer. ``on_lost`` is called each time
    the router dies: its decisions are void, so a worker drops its requests and an ingress sends
    its own again.
    """

    def __init__(
        self,
        peer_channel: PeerChannel,
        registration: Register,
        router: str,
        *,
        on_found: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None],
    ) -> None:
        self._channel, self._router, self._registration = peer_channel, router, registration
        self._on_found, self._on_lost = on_found, on_lost
        self.is_up = False
        """Whether the router is connected, as far as is known."""
        self._retry: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect to the router; the channel must have been started."""
        self._connect()

    def register(self, registration: Register) -> None:
        """Register under a new name; the process of the old name is gone."""
        self._registration = registration
        self.post(registration)

    def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    def post(self, message: Message) -> None:
        """Send a message to the router."""
        self._channel.post(self._router, message)

    def lost(self, address: str) -> None:
        """The channel lost a peer; other peers than the router are ignored."""
        if address != self._router:
            return
        self._retry = asyncio.create_task(self._reconnect_later())
        if self.is_up:
            self.is_up = False
            self._on_lost()

    def _connect(self) -> None:
        self._channel.watch(self._router, found=self._found)
        self.post(self._registration)

    def _found(self) -> None:
        self.is_up = True
        self._on_found()

    async def _reconnect_later(self) -> None:
        await asyncio.sleep(RETRY_S)
        self._connect()
