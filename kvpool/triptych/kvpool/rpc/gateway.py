"""The pool's calls for other nodes: workers that fetch pages, and readers of statistics.

A *guest* is a worker of another node. It attaches a lease as any worker does, so that no other
worker can, reads its pages, and releases it. It cannot write, allocate or hand off pages. When
its registration expires, the pool reclaims its leases.
"""

from dataclasses import dataclass

from triptych.core.errors import MessageError, PoolError
from triptych.core.messages import Message
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.processes import ELSEWHERE
from triptych.kvpool.rpc import calls
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.channel import FrameServer, Outside
from triptych.kvpool.rpc.dispatch import answer_with
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall
from triptych.kvpool.rpc.messages import PagesOffered
from triptych.kvpool.transfer.page_stream import PageSender, bracketed

GUEST = "guest/"
"""Prefix of guests' names: a message from another node cannot act for a worker of this one."""

PUBLIC = (calls.StatPool, calls.CheckPool, calls.ExpelWorker)
GUESTS = (
    calls.RenewWorker,
    calls.AttachLeases,
    calls.ReleaseLeases,
    calls.UnregisterWorker,
)


def guest_name(worker: str) -> str:
    """The name of a worker at pools of other nodes."""
    return GUEST + worker


def is_guest(name: str) -> bool:
    """Whether this is the name of a worker of another node."""
    return name.startswith(GUEST)


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """The address of a pool for other nodes."""

    host: str
    calls: int
    """Port for calls."""
    pages: int
    """Port for pages."""

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.calls}"


class Gateway:
    """Answers the frames of other nodes."""

    def __init__(self, pool: LockedPool, sender: PageSender) -> None:
        self._pool, self._sender = pool, sender

    def answer(self, frame: bytes) -> bytes:
        """Answer one frame. An error becomes the answer, and the call has changed nothing."""
        return answer_with(self._run, frame, self._pool)

    def _run(self, asked: PoolCall[Message]) -> Message:
        match asked:
            case calls.RegisterWorker():
                if asked.checkpoint_bytes:
                    raise MessageError("a worker of another node cannot have a checkpoint here")
                return self._pool.register(guest_name(asked.name), ELSEWHERE, 0)
            case calls.ReadPages():
                _require_guest(asked.worker)
                return self._offer(asked, asked.pages.ids(self._pool.pages))
            case _ if isinstance(asked, PUBLIC):
                return self._pool.call(asked)
            case _ if isinstance(asked, GUESTS):
                _require_guest(asked.worker)
                return self._pool.call(asked)
            case _:
                raise MessageError(
                    f"{type(asked).__name__} is answered on the pool's own node only"
                )

    def _offer(self, asked: calls.ReadPages, ids: PageIds) -> PagesOffered:
        def still(some: PageIds) -> None:
            self._pool.require_lease(asked.worker, asked.lease, some)

        still(ids)
        return PagesOffered(ticket=self._sender.offer(asked.lease, ids, still))


class PeerPorts:
    """The two ports of a pool for other nodes: one for calls, one for pages."""

    def __init__(self, pool: LockedPool, arena: Arena, host: str, access: Access) -> None:
        """Open free ports of ``host``.

        Raises: PoolError if the address cannot be had
        """

        def refused(_: str) -> None:
            pool.count("refused_calls")

        def sent(count: int) -> None:
            pool.count("sent_bytes", count)

        try:
            self._sender = PageSender(arena.data, host, access, sent=sent, refused=refused)
        except OSError as error:
            raise PoolError(f"the pool cannot listen on {host}: {error}") from error
        answers = Gateway(pool, self._sender)
        try:
            server = FrameServer(answers.answer, f"{bracketed(host)}:0", Outside(access, refused))
        except BaseException:
            self._sender.close()
            raise
        self._server = server
        port = int(server.address.rpartition(":")[2])
        self.address = PoolAddress(host, port, self._sender.port)

    def close(self) -> None:
        self._server.stop()
        self._sender.close()


def _require_guest(worker: WorkerId) -> None:
    if not is_guest(worker):
        raise MessageError(f"worker {worker!r:.80} is none of another node")
