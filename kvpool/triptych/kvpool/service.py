"""The pool process: it owns the arena and the books, and answers workers over a socket."""

import logging
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import Self

from triptych.core.config import PoolConfig
from triptych.core.errors import ConfigError, MessageError, PoolError, TriptychError
from triptych.core.messages import Lend, Message, pack, unpack
from triptych.kvpool import protocol, runs
from triptych.kvpool.arena import Arena, remove_orphans, shared_memory_dir
from triptych.kvpool.blocks import Publication, decode
from triptych.kvpool.disklevel import Disk, DiskSettings
from triptych.kvpool.ledger import Ledger
from triptych.kvpool.locked import LockedPool
from triptych.kvpool.pool import Pool
from triptych.kvpool.prefixcache import PrefixSettings
from triptych.kvpool.processes import is_alive
from triptych.kvpool.wire import FrameServer

logger = logging.getLogger(__name__)

SWEEP_PERIOD_S = 0.5
_SOCKET_PATH_LIMIT = 107


class PoolServer:
    """One device's page pool: arena, books, socket, and a sweeper for what the dead left."""

    def __init__(
        self,
        config: PoolConfig,
        page_bytes: int,
        *,
        address: str = "",
        directory: Path | None = None,
        prefixes: PrefixSettings | None = None,
    ) -> None:
        """Reserve all page memory at once.

        ``address`` is ``unix:/path`` or ``127.0.0.1:port``; empty: a socket in a new private
        directory. ``directory`` is where the arena lies, ``/dev/shm`` unless given. Without
        ``prefixes`` none is kept.

        Raises: ConfigError if not one page fits; PoolError if there is not enough memory
        """
        pages = config.capacity_bytes // page_bytes
        if pages < 1:
            raise ConfigError(
                f"pool.capacity_bytes={config.capacity_bytes}: expected at least one page "
                f"({page_bytes} bytes)"
            )
        directory = directory or shared_memory_dir()
        for orphan in remove_orphans(directory):
            shutil.rmtree(_socket_dir(orphan), ignore_errors=True)
        self._arena = Arena.create(pages, page_bytes, directory)
        pool = Pool(pages, page_bytes, self._arena.id, config.lease_ttl_s)
        self._disk, disk_fault = _open_disk(config, self._arena) if prefixes else (None, "")
        self._calls = LockedPool(
            pool,
            config.extent_pages,
            lambda pages, size: Arena.create(pages, size, directory),
            prefixes=prefixes,
            disk=self._disk,
            disk_fault=disk_fault,
        )
        self._address = address or f"unix:{_socket_dir(self._arena.id)}/pool.sock"
        self._server: FrameServer | None = None
        self._stopping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="pool-sweeper", daemon=True)

    def start(self) -> str:
        """Begin to answer, and return the address at which.

        Raises: PoolError if the address cannot be had
        """
        try:
            _prepare_socket(self._address)
            self._server = FrameServer(lambda frame: answer(self._calls, frame), self._address)
        except PoolError:
            self.stop()
            raise
        self._sweeper.start()
        logger.info("pool of %d pages at %s", self._calls.pages, self._server.address)
        return self._server.address

    def stop(self) -> None:
        """Stop answering and remove the arena; workers keep what they mapped until they close."""
        self._stopping.set()
        if self._server:
            self._server.stop()
        if self._sweeper.is_alive():
            self._sweeper.join()
        self._calls.close()
        if self._disk:
            self._disk.close()
            self._disk = None
        self._arena.unlink()
        self._arena.close()
        shutil.rmtree(_socket_dir(self._arena.id), ignore_errors=True)

    def stat(self) -> Ledger:
        """The books as they are."""
        return self._calls.stat()

    def check(self) -> list[str]:
        """Contradictions in the books; empty if there are none."""
        return self._calls.check()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where workers find the pool; known once it has started."""
        return self._server.address if self._server else self._address

    def _sweep(self) -> None:
        while not self._stopping.wait(SWEEP_PERIOD_S):
            for worker in self._calls.sweep(is_alive):
                logger.warning("worker %s is lost: its pages were taken back", worker)


def answer(calls: LockedPool, frame: bytes) -> bytes:
    """Answer one frame; what goes wrong is part of the answer, and changes nothing."""
    try:
        questions = unpack(frame)
        if len(questions) != 1:
            raise MessageError(f"{len(questions)} messages in one frame: expected 1")
        return pack([_answer(calls, questions[0])])
    except TriptychError as error:
        return pack([protocol.refusal(error)])


def _answer(calls: LockedPool, asked: Message) -> Message:
    match asked:
        case protocol.RegisterWorker():
            return calls.register(asked.name, asked.process, asked.journal_bytes)
        case protocol.RenewWorker():
            return protocol.Renewed(lacking_pages=calls.renew(asked.worker))
        case protocol.GrantPages():
            ids = calls.grant(asked.worker, asked.pages, asked.at_least)
            return protocol.Granted(pages=runs.pack(ids))
        case protocol.GiveBackPages():
            calls.give_back(asked.worker, runs.unpack(asked.pages, calls.pages))
        case protocol.HandOff():
            commits = [(c.label, runs.unpack(c.pages, calls.pages)) for c in asked.commits]
            made = calls.handoff(asked.worker, commits, asked.releases, keep=asked.keep)
            return protocol.Claims(claims=tuple(made))
        case protocol.AttachLeases():
            wanted = [(w.claim, runs.unpack(w.pages, calls.pages)) for w in asked.wanted]
            return protocol.Claims(claims=tuple(calls.attach(asked.worker, wanted)))
        case protocol.ReleaseLeases():
            calls.release(asked.worker, asked.leases, keep=asked.keep)
        case protocol.WithdrawRequests():
            ended = calls.withdraw(asked.worker, asked.labels)
            return protocol.Withdrawn(leases=tuple(ended))
        case protocol.WithdrawAll():
            return protocol.Withdrawn(leases=tuple(calls.withdraw_all(asked.worker)))
        case protocol.UnregisterWorker():
            calls.unregister(asked.worker)
        case protocol.ExpelWorker():
            return protocol.Expelled(was_there=calls.expel(asked.name))
        case protocol.InheritFrom():
            return calls.inherit(asked.former)
        case protocol.AdoptRequest():
            ids = runs.unpack(asked.pages, calls.pages)
            claim = calls.adopt(asked.worker, asked.former, asked.label, asked.lease, ids)
            return protocol.Claims(claims=(claim,))
        case (
            protocol.FindPrefix()
            | protocol.KnowPrefix()
            | protocol.PublishPrefix()
            | protocol.RestorePrefix()
        ):
            return _answer_prefix(calls, asked)
        case protocol.ReleasePrefix():
            calls.release_prefix(asked.worker, asked.hold)
        case Lend():
            return calls.lend(asked.bytes)
        case protocol.StatPool():
            return calls.stat()
        case protocol.MapPages():
            return calls.map(asked.max_cells)
        case protocol.CheckPool():
            return protocol.Checked(faults=tuple(calls.check()))
        case _:
            raise MessageError(f"{type(asked).__name__} is not a question to the pool")
    return protocol.PoolDone()


def _answer_prefix(
    calls: LockedPool,
    asked: protocol.FindPrefix
    | protocol.KnowPrefix
    | protocol.PublishPrefix
    | protocol.RestorePrefix,
) -> Message:
    tokens = decode(asked.tokens)
    match asked:
        case protocol.FindPrefix():
            found = calls.find_prefix(asked.worker, asked.namespace, tokens)
            return protocol.PrefixFound.of(found)
        case protocol.KnowPrefix():
            blocks = calls.known_prefix(asked.worker, asked.namespace, tokens)
            return protocol.PrefixBlocks(blocks=blocks)
        case protocol.RestorePrefix():
            coming = calls.restore_prefix(asked.worker, asked.namespace, tokens, asked.tenant)
            return protocol.PrefixComing(blocks=coming.blocks, seconds=coming.seconds)
        case protocol.PublishPrefix():
            new = Publication(
                namespace=asked.namespace,
                tokens=tokens,
                blocks=[runs.unpack(packed, calls.pages) for packed in asked.blocks],
                seconds=asked.seconds,
                tenant=asked.tenant,
            )
            return protocol.PrefixBlocks(blocks=calls.publish_prefix(asked.worker, new))


def _open_disk(config: PoolConfig, arena: Arena) -> tuple[Disk | None, str]:
    """The disk tier, or why there is none: a pool without one is better than no pool."""
    settings = DiskSettings.of(config)
    try:
        return (Disk.open(settings, arena.data) if settings else None), ""
    except PoolError as error:
        logger.error("prefixes are not kept on disk: %s", error)
        return None, str(error)


def _socket_dir(arena: str) -> Path:
    return Path(tempfile.gettempdir(), arena)


def _prepare_socket(address: str) -> None:
    """Make the directory of a unix socket, for this user alone."""
    if not address.startswith("unix:"):
        return
    path = Path(address.removeprefix("unix:"))
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
        raise PoolError(f"socket path {path}: longer than {_SOCKET_PATH_LIMIT} bytes")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PoolError(f"socket directory {path.parent}: expected it to be yours, with mode 0700")
