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
from collections.abc import Sequence
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
_STATE = np.dtype(
    [
        ("freed", "<i8"),
        ("processes", "<i8"),
        ("revoked", _KEY, 4096),
        ("queued", "<i8"),
        ("done", "<i8"),
        ("refused", "<i8"),
        ("queue", [*_KEY, ("offset", "<i8"), ("count", "<i8"), ("value", "<i8")], 1024),
    ]
)


class DeviceFault(Exception):
    """What a device would answer with an error, or do to the memory of somebody else."""


class FakeDriver:
    """Devices of a machine; ``directory`` is the same in all processes."""

    granularity = mmap.PAGESIZE

    def __init__(
        self, directory: Path, apart: Sequence[tuple[str, str]] = (), *, revokes: bool = True
    ) -> None:
        """``apart``: pairs of devices without access to each other. Without ``revokes`` it
        forgets that processes die, as a pool that does not ask would have it."""
        self._apart, self._revokes = {frozenset(pair) for pair in apart}, revokes
        path = directory / "devices"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.truncate(descriptor, _STATE.itemsize)
        self._state = np.frombuffer(mmap.mmap(descriptor, _STATE.itemsize), _STATE)
        os.close(descriptor)
        self._mapped = dict[int, list[bool]]()
        """By address, of each part whether the device has access."""

    # ---------------------------------------------------------------- the Driver protocol

    def refusal(self, devices: Sequence[str]) -> str:
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

    def map(self, parts: Sequence[tuple[int, int]], device: str) -> int:
        size = sum(nbytes for _, nbytes in parts)
        start = _map(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        at, access = start, list[bool]()
        for index, (descriptor, nbytes) in enumerate(parts):
            access.append(index == 0 or device != "")
            if access[-1]:
                both = mmap.PROT_READ | mmap.PROT_WRITE
                _map(at, nbytes, both, mmap.MAP_SHARED | _FIXED, descriptor)
            at += nbytes
        self._mapped[start] = access
        return start

    def unmap(self, address: int, nbytes: int) -> None:
        del self._mapped[address]
        assert _libc.munmap(address, nbytes) == 0

    def revoke(self, process: ProcessKey) -> bool:
        if self._revokes and not self._is_revoked(process.pid, process.started):
            state = self._state[0]
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
        me = this_process()
        if self._is_revoked(me.pid, me.started):
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
        me, state = this_process(), self._state[0]
        offset = page * arenas.page_bytes
        state["queue"][state["queued"]] = (me.pid, me.started, offset, arenas.page_bytes, value)
        state["queued"] += 1

    def run_queue(self, address: int) -> None:
        """Do what is queued; ``address``: of this process's mapping, with access to all."""
        state = self._state[0]
        while state["done"] < state["queued"]:
            pid, started, offset, count, value = state["queue"][state["done"]].tolist()
            state["done"] += 1
            if self._is_revoked(pid, started):
                state["refused"] += 1
            else:
                ctypes.memset(address + offset, value, count)

    @property
    def refused(self) -> int:
        """Queued writes that were not done."""
        return int(self._state[0]["refused"])

    def _is_revoked(self, pid: int, started: int) -> bool:
        state = self._state[0]
        revoked = state["revoked"][: state["processes"]]
        return bool(((revoked["pid"] == pid) & (revoked["started"] == started)).any())


def _map(at: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(at, size, protection, flags, descriptor, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)
