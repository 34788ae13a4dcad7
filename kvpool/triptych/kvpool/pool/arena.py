"""Arenas: shared memory for pages, owned by the pool process, and the space of a directory."""

import ctypes
import fcntl
import logging
import mmap
import os
import re
import secrets
import struct
import tempfile
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import ConfigError, PoolError, StaleHandle

logger = logging.getLogger(__name__)

_MAGIC = b"TRIPTYCH"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, pid of the owner, pages, bytes per page
_HEADER_BYTES = 4096  # one page of the machine, so that the first KV page is aligned to it
_NAME = re.compile(r"triptych-(\d+)-[0-9a-f]{16}")
# Python's own call holds the interpreter's lock, and a disk with much to do lets it wait.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


def shared_memory_dir() -> Path:
    """The default directory of arenas: ``/dev/shm``, or else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Arena:
    """A region of ``pages`` x ``page_bytes`` that any process of this user and machine can map.

    The file is reserved before it is written: without that, a full ``/dev/shm`` would kill the
    first process that writes. Its owner locks it for as long as it lives. The kernel drops the
    lock however the owner dies, so a file without a lock is an orphan; a pid in the file could
    belong to another process by now.

    It lies in memory, or on a disk: then the kernel keeps recently used pages in memory.
    """

    def __init__(self, name: str, mapping: mmap.mmap, shape: tuple[int, int], path: Path | None):
        self.id = name
        """Name of the arena, unique per start of the pool."""
        self.pages, self.page_bytes = shape
        self._mapping = mapping
        self._path = path
        self.is_on_disk = path is not None and path.parent != shared_memory_dir()
        """Whether pages that were not used for long may have to be read from disk."""
        # What lies beside a page on a disk is another row's: reading it as well costs more room
        # in memory than the page itself.
        mapping.madvise(mmap.MADV_RANDOM)
        self._data: NDArray[np.uint8] | None = np.frombuffer(
            mapping, np.uint8, self.pages * self.page_bytes, _HEADER_BYTES if path else 0
        ).reshape(shape)

    @classmethod
    def create(
        cls,
        pages: int,
        page_bytes: int,
        directory: Path | None = None,
        *,
        reserved: int | None = None,
    ) -> Self:
        """Make a new arena and own it.

        ``reserved``: pages to reserve now, if not all; ``reserve`` does the rest.

        Raises: PoolError if there is not enough space in ``directory``, or it cannot be had
        """
        directory = directory or shared_memory_dir()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, descriptor = _create_locked(directory)
        except OSError as error:
            raise PoolError(f"no arena can be made in {directory}: {error.strerror}") from error
        size = pages * page_bytes + _HEADER_BYTES
        first = size if reserved is None else reserved * page_bytes + _HEADER_BYTES
        try:
            _require_space(size, directory)
            _reserve(descriptor, 0, first, directory)
            os.truncate(descriptor, size)
            header = _HEADER.pack(_MAGIC, _VERSION, os.getpid(), pages, page_bytes)
            os.pwrite(descriptor, header, 0)
            mapping = mmap.mmap(descriptor, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)  # the mapping keeps a duplicate, and with it the lock
        return cls(path.name, mapping, (pages, page_bytes), path)

    @classmethod
    def open(cls, name: str, shape: tuple[int, int], directory: Path | None = None) -> Self:
        """Map an arena that another process owns.

        Raises: StaleHandle if it is gone; PoolError if it is not the arena it should be
        """
        if not _NAME.fullmatch(name):
            raise PoolError(f"{name!r} is not the name of an arena")
        path = (directory or shared_memory_dir()) / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise StaleHandle(0, f"arena {name} is gone: the pool was started anew") from None
        try:
            _check_header(descriptor, path, shape)
            mapping = mmap.mmap(descriptor, shape[0] * shape[1] + _HEADER_BYTES)
        finally:
            os.close(descriptor)
        return cls(name, mapping, shape, path)

    @classmethod
    def private(cls, pages: int, page_bytes: int) -> Self:
        """Make an arena of this process alone, for stages that run in one process."""
        mapping = mmap.mmap(-1, max(1, pages * page_bytes))
        return cls(f"private-{secrets.token_hex(8)}", mapping, (pages, page_bytes), None)

    @property
    def data(self) -> NDArray[np.uint8]:
        """The pages themselves. Shapes: (pages, page_bytes)."""
        if self._data is None:
            raise PoolError(f"arena {self.id} is closed")
        return self._data

    def will_need(self, ids: NDArray[np.int32]) -> None:
        """Have the kernel read these pages from disk ahead of their use, many at once.

        In memory they are all there, and this does nothing.
        """
        if not self.is_on_disk or not ids.size:
            return
        grain, base = mmap.PAGESIZE, self.data.ctypes.data
        starts = base + np.unique(ids).astype(np.int64) * self.page_bytes
        firsts, lasts = starts // grain, -(-(starts + self.page_bytes) // grain)
        begins = np.flatnonzero(np.append(True, firsts[1:] > lasts[:-1]))
        ends = np.append(begins[1:], starts.size) - 1
        for first, last in zip(firsts[begins].tolist(), lasts[ends].tolist(), strict=True):
            _madvise(first * grain, (last - first) * grain, mmap.MADV_WILLNEED)

    def reserve(self, first: int, end: int) -> None:
        """Reserve the space of pages from ``first`` to before ``end``.

        Raises: PoolError if there is not enough
        """
        assert self._path is not None
        offset, size = _HEADER_BYTES + first * self.page_bytes, (end - first) * self.page_bytes
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise PoolError(f"arena {self.id} is gone: {error.strerror}") from error
        try:
            _reserve(descriptor, offset, size, self._path.parent)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap the pages; if arrays still show them, the last of these unmaps them."""
        self._data = None
        try:
            self._mapping.close()
        except BufferError:
            logger.debug("arena %s stays mapped: there are still arrays over it", self.id)

    def unlink(self) -> None:
        """Remove the file; processes that have it mapped keep the memory until they unmap it."""
        if self._path:
            self._path.unlink(missing_ok=True)


def free_bytes(setting: str, directory: Path) -> int:
    """Bytes that are free in a directory, which need not be there yet. Nothing is made or changed.

    Raises: ConfigError if this user cannot write there, or make it
    """
    above = next(path for path in (directory, *directory.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting}={directory}: {above} is no directory that this user can write to: "
            "make the directory for this user, or choose another"
        )
    space = os.statvfs(above)
    return space.f_bavail * space.f_frsize


def require_room(free: int, setting: str, directory: Path, size_setting: str, wanted: int) -> None:
    """Raise ConfigError if less is free than is wanted."""
    if free < wanted:
        raise ConfigError(
            f"{size_setting}={wanted}: {directory} has room for {free}: lower it, make room there, "
            f"or choose another {setting}"
        )


def remove_orphans(directory: Path) -> list[str]:
    """Remove this user's arenas whose owner is dead, and return their names."""
    removed = list[str]()
    for path in find_orphans(directory):
        path.unlink(missing_ok=True)
        removed.append(path.name)
        logger.info("removed arena %s of a pool that is dead", path.name)
    return removed


def find_orphans(directory: Path) -> list[Path]:
    """This user's arenas whose owner is dead."""
    found = sorted(directory.glob(f"triptych-{os.getuid()}-*"))
    return [path for path in found if _NAME.fullmatch(path.name) and _is_orphan(path)]


def _is_orphan(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"triptych-{os.getuid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        # Between open and lock another pool that starts may have taken it for an orphan.
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _require_space(size: int, directory: Path) -> None:
    """Keep a reservation that cannot succeed from filling the file system meanwhile."""
    space = os.statvfs(directory)
    if size > space.f_bavail * space.f_frsize:
        raise PoolError(_no_space(size, directory))


def _reserve(descriptor: int, offset: int, size: int, directory: Path) -> None:
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        raise PoolError(f"{_no_space(size, directory)} ({error.strerror})") from error


def _no_space(size: int, directory: Path) -> str:
    space = os.statvfs(directory)
    return (
        f"the page pool needs {size:,} bytes in {directory}, where "
        f"{space.f_bavail * space.f_frsize:,} are free: "
        "lower pool.kv_cache_memory_bytes, or make room there"
    )


def _check_header(descriptor: int, path: Path, shape: tuple[int, int]) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid():
        raise PoolError(f"{path} belongs to user {status.st_uid}, not to {os.getuid()}")
    raw = os.pread(descriptor, _HEADER.size, 0)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise PoolError(f"{path} is not an arena")
    _, version, _, pages, page_bytes = _HEADER.unpack(raw)
    if version != _VERSION:
        raise PoolError(f"{path} has version {version}: expected {_VERSION}")
    size = pages * page_bytes + _HEADER_BYTES
    if (pages, page_bytes) != shape or status.st_size != size:
        raise PoolError(
            f"{path} has {pages} pages of {page_bytes} bytes in {status.st_size} bytes: "
            f"expected {shape[0]} of {shape[1]}"
        )
