"""The pool's calls over a socket."""

from typing import Protocol, TypeVar, cast

from triptych.core.errors import MessageError
from triptych.core.messages import pack, unpack
from triptych.kvpool.rpc.calls import RegisterWorker
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.local_pool import PoolCall
from triptych.kvpool.rpc.messages import PoolRefused, Registered, refused

R = TypeVar("R")


class PoolProxy(Protocol):
    """A pool to call: a ``PoolStub`` over a socket, or the ``LockedPool`` of this process."""

    def call(self, asked: PoolCall[R]) -> R:
        """Make a call, and return its reply.

        Raises: what the call raises, on either side of a socket with the same type
        """
        ...


class PoolStub:
    """A ``PoolProxy`` over a channel."""

    def __init__(
        self, channel: FrameChannel, connect_timeout_s: float, *, wait: bool = True
    ) -> None:
        """``wait`` for a pool that is still starting, or fail at once if it is not there."""
        self._channel = channel
        self._wait = wait
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = connect_timeout_s

    def call(self, asked: PoolCall[R]) -> R:
        """Send a call, and return its reply.

        Raises: what the call raises; PoolUnavailable; MessageError for a reply of another type
        """
        reply = _reply(self._send(asked), asked)
        self._set_timeout(reply)
        return reply

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _send(self, asked: PoolCall[object]) -> bytes:
        is_first = isinstance(asked, RegisterWorker)
        timeout_s = self._connect_timeout_s if is_first else self._timeout_s
        return self._channel.ask(pack([asked]), timeout_s, wait=is_first and self._wait)

    def _set_timeout(self, reply: object) -> None:
        if isinstance(reply, Registered):
            # A worker that waited longer than this for an answer has lost its leases anyway.
            # A guest calls several pools: one that is stuck must not cost it its leases at others.
            self._timeout_s = reply.lease_ttl_s if self._wait else reply.lease_ttl_s / 4


def _reply(frame: bytes, asked: PoolCall[R]) -> R:
    match unpack(frame):
        case [PoolRefused() as no]:
            raise refused(no)
        case [answer] if isinstance(answer, asked.reply):
            return cast("R", answer)  # ``reply`` is the class that R stands for
        case other:
            raise MessageError(f"the pool answered {other!r:.80}: expected {asked.reply.__name__}")
