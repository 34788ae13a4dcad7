"""A driver of devices that are memory of the host, for processes of one machine.

Processes map the same memory by its descriptors, as with a real one. What a device would refuse is
refused (``DeviceFault``): a page of an arena that is not mapped for the device of the process,
memory that its owner has freed, and writes of a process whose work was revoked. Writes may be
queued: a device does them later (``run_queue``), after the death of the process that queued them
as well.
"""

import ctypes
import mmap
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import PoolError
from triptych.kvpool.pool.device_arenas import DeviceArenas
from triptych.kvpool.pool.processes import ProcessKey, this_process

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FIXED, _PROT_NONE = 0x10, 0

_KEY = [("pid", "<i8"), ("started", "<i8")]
_WRITE = [*_KEY, ("pool", "<i8"), ("page", "<i8"), ("value", "<i8"), ("waits", "<i8")]
_STATE = np.dtype(
    [
        ("freed", "<i8"),
        ("processes", "<i8"),
        ("revoked", _KEY, 1 << 16),
        ("queued", "<i8"),
        ("refused", "<i8"),
        ("done", "<i8"),
        ("queue", _WRITE, 4096),
    ]
)


class DeviceFault(Exception):
    """What a device would answer with an error, or do to the memory of somebody else."""


class FakeDriver:
    """Devices of a machine; ``directory`` is the same in all processes."""

    granularity = mmap.PAGESIZE

    def __init__(
        self,
        directory: Path,
        apart: Sequence[tuple[str, str]] = (),
        *,
        revokes: bool = True,
        linger_s: float = 0.0,
    ) -> None:
        """``apart``: pairs of devices without access to each other. ``linger_s``: how long devices
        go on with the work of a process after they were asked first. Without ``revokes`` it forgets
        that processes die, as a pool that does not ask would have it."""
        self._apart, self._revokes = {frozenset(pair) for pair in apart}, revokes
        self._linger_s, self._asked = linger_s, dict[ProcessKey, float]()
        path = directory / "devices"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.truncate(descriptor, _STATE.itemsize)
        self._state = np.frombuffer(mmap.mmap(descriptor, _STATE.itemsize), _STATE)
        os.close(descriptor)
        self._mapped = dict[int, list[bool]]()
        """By address, of each part whether the device has access."""
        self._me = this_process()
        """``check`` comes before each kernel, and to read it takes as long as some of them."""

    # ---------------------------------------------------------------- the Driver protocol

    def refusal(self, devices: Sequence[str]) -> str:
        return "" if devices else "there is no device"

    def cut(self, devices: Sequence[str]) -> str:
        pairs = [(one, other) for one in devices for other in devices if one < other]
        cut = [pair for pair in pairs if frozenset(pair) in self._apart]
        return f"{cut[0][0]} cannot access {cut[0][1]}" if cut else ""

    def create(self, device: str, nbytes: int) -> int:
        assert nbytes % self.granularity == 0
        descriptor = os.memfd_create(f"memory of {device or 'the host'}")
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise PoolError(f"no {nbytes} bytes on {device}") from error
        return descriptor

    def map(self, parts: Sequence[tuple[int | None, int]], device: str) -> int:
        size = sum(nbytes for _, nbytes in parts)
        start = _map(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        at, access = start, list[bool]()
        for index, (descriptor, nbytes) in enumerate(parts):
            access.append(descriptor is not None and (index == 0 or device != ""))
            if access[-1] and descriptor is not None:
                owner = os.readlink(f"/proc/self/fd/{descriptor}").split("memory of ")[1].split()[0]
                if frozenset((owner, device)) in self._apart:
                    raise PoolError(f"{device} cannot access memory of {owner}")
                both = mmap.PROT_READ | mmap.PROT_WRITE
                _map(at, nbytes, both, mmap.MAP_SHARED | _FIXED, descriptor)
            at += nbytes
        self._mapped[start] = access
        return start

    def unmap(self, address: int, nbytes: int) -> None:
        del self._mapped[address]
        assert _libc.munmap(address, nbytes) == 0

    def revoke(self, process: ProcessKey) -> bool:
        if not self._revokes or self._is_revoked(process.pid, process.started):
            return True
        now = time.monotonic()
        if now - self._asked.setdefault(process, now) < self._linger_s:
            return False
        state = self._state[0]
        assert state["processes"] < state["revoked"].size, "the table of dead processes is full"
        state["revoked"][state["processes"]] = (process.pid, process.started)
        state["processes"] += 1
        return True

    # ---------------------------------------------------------------- what a device does

    def array(self, arenas: DeviceArenas) -> NDArray[np.uint8]:
        """All pages; those of arenas without access end the process that touches them."""
        memory = (ctypes.c_uint8 * (arenas.pages * arenas.page_bytes)).from_address(arenas.address)
        return np.frombuffer(memoryview(memory), np.uint8).reshape(-1, arenas.page_bytes)

    def check(self, arenas: DeviceArenas, ids: Sequence[int] = ()) -> None:
        """Raise DeviceFault unless this process may read and write these pages."""
        state = self._state[0]
        if state["freed"]:
            raise DeviceFault("the owner of this memory has freed it")
        if self._is_revoked(self._me.pid, self._me.started):
            raise DeviceFault("the work of this process was revoked")
        access = self._mapped.get(arenas.address, ())
        ends = np.cumsum(arenas.shape.pages)
        for page in ids:
            index = int(np.searchsorted(ends, page, side="right"))
            if index >= len(access) or not access[index]:
                raise DeviceFault(f"page {page} is in an arena that this process has not mapped")

    def free_all(self) -> None:
        """The owner of the memory ends."""
        self._state[0]["freed"] = 1

    def queue_write(self, arenas: DeviceArenas, page: int, value: int) -> None:
        """Queue a write to all bytes of a page."""
        self.check(arenas, [page])
        me, state = self._me, self._state[0]
        slot = state["queue"][state["queued"] % state["queue"].size]
        assert not slot["waits"], "the queue is full"
        for name, number in (
            ("pid", me.pid), ("started", me.started), ("pool", _tag(arenas)), ("page", page),
            ("value", value), ("waits", 1),
        ):  # fmt: skip
            slot[name] = number
        state["queued"] += 1

    def run_queue(
        self, arenas: DeviceArenas, is_due: Callable[[int, int], bool] = lambda _pid, _page: True
    ) -> None:
        """Do what is queued, of a write by (pid, page) only if it is due.

        ``arenas``: of this process, with access to all. Writes of revoked processes are refused.
        Those to another pool's pages go to memory that nobody has any more.
        """
        state = self._state[0]
        queue = state["queue"]
        for at in np.flatnonzero(queue["waits"]).tolist():
            pid, started, pool, page, value, _ = queue[at].tolist()
            if pool != _tag(arenas):
                queue["waits"][at] = 0
            elif self._is_revoked(pid, started):
                state["refused"] += 1
                queue["waits"][at] = 0
            elif is_due(pid, page):
                ctypes.memset(arenas.address + page * arenas.page_bytes, value, arenas.page_bytes)
                state["done"] += 1
                queue["waits"][at] = 0

    @property
    def refused(self) -> int:
        """Queued writes that were refused."""
        return int(self._state[0]["refused"])

    @property
    def done(self) -> int:
        """Queued writes that were done."""
        return int(self._state[0]["done"])

    def _is_revoked(self, pid: int, started: int) -> bool:
        state = self._state[0]
        revoked = state["revoked"][: state["processes"]]
        return bool(((revoked["pid"] == pid) & (revoked["started"] == started)).any())


def _tag(arenas: DeviceArenas) -> int:
    """A number for a pool."""
    return zlib.crc32(arenas.id.encode())


def _map(at: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(at, size, protection, flags, descriptor, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)
