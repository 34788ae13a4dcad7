"""The store of the disk tier: objects in one directory, complete or absent, evicted by LRU."""

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from triptych.core.errors import ConfigError, PoolError
from triptych.kvpool.disk.block_file import (
    Damaged,
    ObjectMeta,
    Rows,
    object_bytes,
    read_header,
    read_pages,
    write_object,
)
from triptych.kvpool.pool.arena import free_bytes, require_room

logger = logging.getLogger(__name__)

_OBJECT = re.compile(r"([0-9a-f]{64})\.kv")
_PARTIAL = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.partial")
_LOCK = "triptych.lock"
_CLOSED = -1
LOCK_POLL_S = 0.05
_PRIVATE = 0o600
_OURS_TO_BLAME = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: a pipe must not make us wait


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load."""

    meta: ObjectMeta
    nbytes: int
    """Bytes of pages."""
    reads: int
    """Reads of pages; the header takes one or two more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStoreStats:
    """The tier's numbers; those after ``capacity_bytes`` count since the start."""

    objects: int
    nbytes: int
    """Of all files, headers included."""
    capacity_bytes: int
    stored: int
    stored_bytes: int
    loaded: int
    loaded_bytes: int
    missed: int
    """Loads of objects that were absent or damaged."""
    evicted: int
    damaged: int
    """Files that were torn, corrupt or foreign, and were removed."""
    failed: int
    """Writes that failed, in most cases because the disk was full."""


@dataclass(frozen=True, slots=True)
class _Entry:
    meta: ObjectMeta
    nbytes: int


class DiskStore:
    """Objects by their key, in files that outlive the process.

    An object is written under another name, made durable, and then renamed. Whoever dies in
    between leaves a file that the next scan removes. The directory itself is not made durable:
    after a loss of power the newest objects may be gone, which for a cache is no loss.

    Names come from keys alone. A file is opened without following links, and must be a regular
    file of this user; the directory must be one that nobody else can write to, and belongs to
    one tier at a time. Files with other names are left alone.

    A use of a block is a use of all blocks before it, without which it cannot be found. So of a
    chain the last block is evicted first.

    What is damaged is a miss: it is counted and removed, and the caller computes it anew. All
    methods may be called from several threads. Only ``store``, ``load``, ``drop`` and ``scan`` wait
    for the disk; the others answer at once even while it hangs.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        page_bytes: int,
        tenant_bytes: int | None = None,
        *,
        wait_s: float = 0.0,
    ) -> None:
        """Lock the directory, which is made if it is missing, and index its objects.

        ``tenant_bytes`` is the most that the objects of one tenant take; None: all. ``wait_s``
        is how long another tier, which may be about to end, is waited for.

        Raises: PoolError if it cannot be had, or another tier has it
        """
        self.directory, self.capacity_bytes, self.page_bytes = directory, capacity_bytes, page_bytes
        self.tenant_bytes = capacity_bytes if tenant_bytes is None else tenant_bytes
        self._objects = OrderedDict[bytes, _Entry]()
        """The oldest used first, and no block before those that follow it in its chain."""
        self._nbytes = self._reserved = 0
        self._taken = Counter[str]()
        """Bytes of each tenant, with what is reserved."""
        self._count = Counter[str]()
        self._lock = threading.Lock()
        """Of the index; nobody who has it waits for the disk."""
        self._files = threading.Lock()
        """Held while a file that the index names comes or goes; taken before the other."""
        self._open_folder = _open_directory(directory)
        self._pin = _CLOSED
        try:
            self._pin = _lock_directory(self._folder, directory, time.monotonic() + wait_s)
            self.scan()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the directory; the objects stay. Nothing else may use the tier any more."""
        for descriptor in {self._pin, self._open_folder} - {_CLOSED}:
            os.close(descriptor)
        self._pin = self._open_folder = _CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -------------------------------------------------------------- readers

    def keys(self) -> list[bytes]:
        """The keys of all objects, the oldest used first."""
        with self._lock:
            return list(self._objects)

    def describe(self, key: bytes) -> ObjectMeta | None:
        """The description of the object with this key, if it is there."""
        with self._lock:
            entry = self._objects.get(key)
        return entry.meta if entry else None

    def touch(self, key: bytes) -> bool:
        """Note a use of an object that needs no load; False if it is not there."""
        with self._lock:
            self._touch(key)
            return key in self._objects

    def load(self, key: bytes, into: Sequence[Rows]) -> Loaded | None:
        """Read an object's pages, in their order, into buffers; None if it is not there.

        ``page_runs`` makes the buffers of any pages of an arena. If the object turns out to be
        damaged, they hold anything afterwards, and it is not there any more.

        Shapes: into (n, page_bytes) each, or the bytes of as many; ``meta.pages`` rows in all
        Raises: ValueError if the buffers do not fit; PoolError if this process has no more
            descriptors or memory: then the object stays
        """
        with self._lock:
            entry = self._objects.get(key)
            if entry is None:
                self._count["missed"] += 1
                return None
            self._touch(key)
        try:
            reads = self._read(_name(key), entry.meta, into)
        except Damaged as error:
            self._lost(key, entry, error)
            return None
        nbytes = entry.meta.pages * self.page_bytes
        self._add(loaded=1, loaded_bytes=nbytes)
        return Loaded(entry.meta, nbytes, reads)

    def stat(self) -> DiskStoreStats:
        """The numbers as they are."""
        with self._lock:
            return DiskStoreStats(
                objects=len(self._objects),
                nbytes=self._nbytes,
                capacity_bytes=self.capacity_bytes,
                stored=self._count["stored"],
                stored_bytes=self._count["stored_bytes"],
                loaded=self._count["loaded"],
                loaded_bytes=self._count["loaded_bytes"],
                missed=self._count["missed"],
                evicted=self._count["evicted"],
                damaged=self._count["damaged"],
                failed=self._count["failed"],
            )

    # -------------------------------------------------------------- writers

    def store(self, meta: ObjectMeta, pages: Iterable[Rows]) -> bool:
        """Write an object; False if it is there already, and then ``pages`` is not touched.

        Objects that were not used for longest go first, until it fits: the tenant's own if it
        would be over its quota, then anybody's.

        Shapes: pages (n, page_bytes) each, or the bytes of as many; ``meta.pages`` rows in all
        Raises: PoolError if it cannot be written; ValueError if the pages are not those that
            ``meta`` counts. Both leave no trace of it, and the tier goes on.
        """
        if meta.page_bytes != self.page_bytes:
            raise ValueError(f"pages of {meta.page_bytes} bytes: expected {self.page_bytes}")
        size = object_bytes(meta)
        try:
            if not self._reserve(meta, size):
                return False
            try:
                self._write(meta, size, pages)
            finally:
                with self._lock:
                    self._reserved -= size
                    self._take(meta.tenant, -size)
        except OSError as error:
            self._add(failed=1)
            raise PoolError(self._complaint(size, error.strerror or str(error))) from error
        return True

    def drop(self, key: bytes) -> bool:
        """Remove an object; False if it was not there.

        Raises: PoolError if the file cannot be removed
        """
        try:
            with self._files:
                with self._lock:
                    was_there = self._forget(key)
                self._unlink(_name(key))
                return was_there
        except OSError as error:
            raise PoolError(f"{self.directory}: {error.strerror}") from error

    def scan(self) -> int:
        """Read all headers anew, remove what is no whole object, and count those that are.

        The order of use comes from the files' times, which a load renews. Nothing else may use
        the tier meanwhile.
        """
        found = list[tuple[int, _Entry]]()
        with os.scandir(self._folder) as listing:
            names = [entry.name for entry in listing]
        for name in names:
            if _PARTIAL.fullmatch(name):
                with suppress(OSError):
                    self._unlink(name)
            elif match := _OBJECT.fullmatch(name):
                found += self._scanned(name, bytes.fromhex(match[1]))
        with self._lock:
            found.sort(key=lambda pair: pair[0])
            self._objects, self._nbytes = OrderedDict[bytes, _Entry](), 0
            self._taken.clear()
            for _, entry in found:
                self._insert(entry)
            gone = self._make_room(0)
            for tenant in list(self._taken):
                gone += self._make_room_of(tenant, 0)
            left = len(self._objects)
        for name in gone:
            self._unlink(name)
        return left

    # -------------------------------------------------------------- files

    @property
    def _folder(self) -> int:
        if self._open_folder == _CLOSED:
            raise PoolError(f"the disk tier in {self.directory} is closed")
        return self._open_folder

    def _read(self, name: str, meta: ObjectMeta, into: Sequence[Rows]) -> int:
        with self._opened(name) as descriptor:
            header = read_header(descriptor, self.page_bytes)
            if header.meta != meta:
                raise Damaged("it holds another block than before")
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            reads = read_pages(descriptor, header, into)
            _stamp(descriptor)
            return reads

    def _scanned(self, name: str, key: bytes) -> list[tuple[int, _Entry]]:
        """The object in a file and when it was used last, or nothing and the file is removed."""
        try:
            with self._opened(name) as descriptor:
                meta = read_header(descriptor, self.page_bytes).meta
                status = os.fstat(descriptor)
            if meta.key != key:
                raise Damaged("it holds another key than its name says")
        except Damaged as error:
            self._discard(name, error)
            return []
        return [(status.st_mtime_ns, _Entry(meta, status.st_size))]

    @contextmanager
    def _opened(self, name: str) -> Generator[int, None, None]:
        """A file for reading.

        Raises: Damaged if it is none, not ours, or cannot be read, now or in the body;
            PoolError if this process cannot open any file
        """
        try:
            descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._folder)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                    raise Damaged("it is no file of this user")
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            kind = PoolError if error.errno in _OURS_TO_BLAME else Damaged
            raise kind(f"{name} cannot be read: {error.strerror}") from error

    def _write(self, meta: ObjectMeta, size: int, pages: Iterable[Rows]) -> None:
        name = _name(meta.key)
        partial = f"{meta.key.hex()}.{secrets.token_hex(8)}.partial"
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _OPEN
            descriptor = os.open(partial, flags, _PRIVATE, dir_fd=self._folder)
            try:
                os.posix_fallocate(descriptor, 0, size)
                write_object(descriptor, meta, pages)
                _stamp(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            with self._files:
                os.rename(partial, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                with self._lock:
                    self._forget(meta.key)
                    self._insert(_Entry(meta, size))
                    self._count["stored"] += 1
                    self._count["stored_bytes"] += meta.pages * meta.page_bytes
        except BaseException:
            with suppress(OSError):
                self._unlink(partial)
            raise

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def _reserve(self, meta: ObjectMeta, size: int) -> bool:
        """Make room for an object and keep it free; False if the object is there already."""
        if size > min(self.capacity_bytes, self.tenant_bytes):
            raise PoolError(self._complaint(size, "the tier is too small for it"))
        space = os.statvfs(self._folder)
        with self._files:
            with self._lock:
                if meta.key in self._objects:
                    self._touch(meta.key)
                    return False
                to_free = max(0, self._nbytes + self._reserved + size - self.capacity_bytes)
                if to_free > self._nbytes:
                    raise OSError(errno.ENOSPC, "others are writing into the room that is left")
                if size > space.f_bavail * space.f_frsize + to_free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                gone = [*self._make_room_of(meta.tenant, size), *self._make_room(size)]
                self._reserved += size
                self._take(meta.tenant, size)
            for name in gone:
                self._unlink(name)
        return True

    # -------------------------------------------------------------- the index; all with its lock

    def _make_room(self, size: int) -> list[str]:
        """Forget the oldest used; the names of their files, which are to be removed."""
        gone = list[str]()
        while self._objects and self._nbytes + self._reserved + size > self.capacity_bytes:
            gone.append(self._evict(next(iter(self._objects))))
        return gone

    def _make_room_of(self, tenant: str, size: int) -> list[str]:
        gone = list[str]()
        if self._taken[tenant] + size <= self.tenant_bytes:
            return gone
        for key in [k for k, entry in self._objects.items() if entry.meta.tenant == tenant]:
            if self._taken[tenant] + size <= self.tenant_bytes:
                break
            gone.append(self._evict(key))
        return gone

    def _evict(self, key: bytes) -> str:
        self._forget(key)
        self._count["evicted"] += 1
        return _name(key)

    def _touch(self, key: bytes) -> None:
        """Put a block behind all others, and those before it in its chain behind it."""
        for _ in range(len(self._objects)):  # forged parents may go round in a circle
            entry = self._objects.get(key)
            if entry is None:
                return
            self._objects.move_to_end(key)
            key = entry.meta.parent

    def _insert(self, entry: _Entry) -> None:
        self._objects[entry.meta.key] = entry
        self._nbytes += entry.nbytes
        self._take(entry.meta.tenant, entry.nbytes)
        self._touch(entry.meta.key)

    def _forget(self, key: bytes) -> bool:
        entry = self._objects.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes
            self._take(entry.meta.tenant, -entry.nbytes)
        return entry is not None

    def _take(self, tenant: str, nbytes: int) -> None:
        self._taken[tenant] += nbytes
        if not self._taken[tenant]:
            del self._taken[tenant]

    # -------------------------------------------------------------- reports

    def _lost(self, key: bytes, entry: _Entry, error: Exception) -> None:
        """Note that an object cannot be read; if it was evicted meanwhile, that is no damage."""
        with self._files:
            with self._lock:
                self._count["missed"] += 1
                is_ours = self._objects.get(key) is entry
                if is_ours:
                    self._forget(key)
            if is_ours:
                self._discard(_name(key), error)

    def _discard(self, name: str, error: Exception) -> None:
        """Remove a file that is not a complete object."""
        logger.warning("%s/%s is removed: %s", self.directory, name, error)
        self._add(damaged=1)
        with suppress(OSError):  # a directory, say: it stays, and is never an object
            self._unlink(name)

    def _add(self, **counts: int) -> None:
        with self._lock:
            self._count.update(counts)

    def _complaint(self, size: int, reason: str) -> str:
        space = os.statvfs(self._folder)
        return (
            f"the disk tier needs {size:,} bytes in {self.directory}, where "
            f"{space.f_bavail * space.f_frsize:,} are free ({reason}): change pool.disk_bytes, "
            f"which is {self.capacity_bytes:,}, or make room there"
        )


def usable_bytes(directory: Path, capacity_bytes: int) -> int:
    """Bytes that a tier could take in a directory, which need not be there yet.

    Nothing is made or changed.

    Raises: ConfigError if it cannot be had, or has less room than ``capacity_bytes``
    """
    free = free_bytes("pool.disk_path", directory)
    if directory.exists():
        try:
            os.close(_open_directory(directory))
        except PoolError as error:
            raise ConfigError(f"pool.disk_path={directory}: {error}") from error
        free += sum(path.stat().st_size for path in directory.glob("*.kv"))
    require_room(free, "pool.disk_path", directory, "pool.disk_bytes", capacity_bytes)
    return free


def _stamp(descriptor: int) -> None:
    """Set a file's time of use to now; the kernel's own times advance in steps of milliseconds."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))


def _name(key: bytes) -> str:
    return f"{key.hex()}.kv"


def _open_directory(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PoolError(f"the disk tier cannot use {directory}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise PoolError(
            f"{directory} can be changed by others (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): the disk tier needs a directory of its own"
        )
    return descriptor


def _lock_directory(folder: int, directory: Path, until: float) -> int:
    """Lock the directory until the descriptor is closed, however the process ends."""
    try:
        flags = os.O_CREAT | os.O_RDWR | _OPEN
        descriptor = os.open(_LOCK, flags, _PRIVATE, dir_fd=folder)
    except OSError as error:
        raise PoolError(f"the disk tier cannot lock {directory}: {error.strerror}") from error
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(LOCK_POLL_S)
                continue
            os.close(descriptor)
            raise PoolError(f"another pool has its disk tier in {directory}") from None
        return descriptor
