"""The link of a worker or ingress to its router: registration, and reconnection after a loss."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from triptych.core.messages import Message, Register
from triptych.deployments.transport.peer_channel import PeerChannel

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 0.1, 1.0
"""Delay of an attempt to reconnect; short, since all requests wait for the router. It doubles with
each attempt that fails."""
REGISTER_AGAIN_S = 2.0
"""Minimum time between two registrations at a router that does not know this process: some of its
messages were under way when it registered."""


class RouterLink:
    """Registers a process with its router, and again whenever the router was restarted.

    The owner of the channel must call ``lost`` for each lost peer, and ``forgotten`` when the
    router does not know this process. ``on_lost`` is called each time a registration has ended:
    the router's decisions are void, so a worker drops its requests and an ingress sends its own
    again. The next registration has a higher epoch, which tells the router the same.
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
        self._channel, self.router, self._registration = peer_channel, router, registration
        self._on_found, self._on_lost = on_found, on_lost
        self.is_up = False
        """Whether the router is connected, as far as is known."""
        self._retry: asyncio.Task[None] | None = None
        self._delay_s = RETRY_S
        self._registered_at = 0.0

    def start(self) -> None:
        """Connect to the router; the channel must have been started."""
        self._connect()

    def register(self, registration: Register) -> None:
        """Register under a new name; the process of the old name is gone."""
        self._registration = registration
        self._register()

    def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    def post(self, message: Message) -> None:
        """Send a message to the router."""
        self._channel.post(self.router, message)

    def lost(self, address: str) -> None:
        """The channel lost a peer; other peers than the router are ignored."""
        if address != self.router:
            return
        was_up, self.is_up = self.is_up, False
        self._end_registration(was_up=was_up)
        self._retry = asyncio.create_task(self._reconnect_later())

    def forgotten(self) -> None:
        """The router has no registration of this process: register again."""
        if time.monotonic() - self._registered_at < REGISTER_AGAIN_S:
            return
        logger.warning("the router does not know this process any more; registering again")
        self._end_registration(was_up=True)
        self._register()
        if self.is_up:
            self._on_found()

    def _end_registration(self, *, was_up: bool) -> None:
        """Raise the epoch: what the router has on record of this process is void."""
        self._registration = replace(self._registration, epoch=self._registration.epoch + 1)
        if was_up:
            self._on_lost()

    def _register(self) -> None:
        self._registered_at = time.monotonic()
        self.post(self._registration)

    def _connect(self) -> None:
        self._channel.watch(self.router, found=self._found)
        self._register()

    def _found(self) -> None:
        self.is_up, self._delay_s = True, RETRY_S
        self._on_found()

    async def _reconnect_later(self) -> None:
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(MAX_RETRY_S, 2 * self._delay_s)
        self._connect()
