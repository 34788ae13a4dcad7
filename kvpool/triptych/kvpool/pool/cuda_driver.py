# The driver's functions have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Device memory that processes share, through virtual memory management of the CUDA driver.

No GPU has run it: it is written against the documented driver API. Nothing of it is loaded unless
a pool is asked for arenas on GPUs. torch is not needed, so a pool process has none.

Source: CUDA driver API, "Virtual Memory Management" (CUDA 12.2 and later for host memory); NVML
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from triptych.core.errors import PoolError
from triptych.kvpool.pool.device_arenas import HOST
from triptych.kvpool.pool.processes import ProcessKey

logger = logging.getLogger(__name__)

_PINNED, _DESCRIPTOR, _READ_WRITE = 1, 1, 3
"""``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR``,
``CU_MEM_ACCESS_FLAGS_PROT_READWRITE``."""
_ON_DEVICE, _ON_HOST_NODE = 1, 3
"""``CU_MEM_LOCATION_TYPE_DEVICE``, ``CU_MEM_LOCATION_TYPE_HOST_NUMA``."""
_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS = 102, 103
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`` and
``..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED``."""
_MOST_PROCESSES = 1024


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _RunningProcess(ctypes.Structure):
    """``nvmlProcessInfo_t``."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class CudaDriver:
    """The GPUs that this process sees, named by their UUIDs."""

    granularity = 2 << 20
    """Of all GPUs so far; the driver refuses if it is another one."""

    def __init__(self) -> None:
        self._library: Any = None
        self._mapped = dict[int, list[tuple[int, int]]]()
        """Address and bytes of the parts of each mapping, by its address."""
        self._fault = ""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._call("cuInit", 0)
        except (OSError, PoolError) as error:
            self._fault = f"no CUDA driver ({error}): install that of NVIDIA"

    @cached_property
    def devices(self) -> dict[str, int]:
        """Ordinal of each GPU by its UUID; none without a driver."""
        if self._fault:
            return {}
        count, found = ctypes.c_int(), dict[str, int]()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            uuid = (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGetUuid_v2", uuid, ordinal)
            found[bytes(uuid).hex()] = ordinal
        return found

    def refusal(self, devices: Sequence[str]) -> str:
        if self._fault:
            return self._fault
        if not devices:
            return (
                "the pool's process sees no GPU: set RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 where "
                "Ray starts, which hides GPUs from actors that have none"
            )
        try:
            lacks = [self._lack(device) for device in devices]
            return next((lack for lack in lacks if lack), "")
        except PoolError as error:
            return f"the driver answers with an error ({error}): see what nvidia-smi says"

    def _lack(self, device: str) -> str:
        """Why arenas cannot be on a GPU; empty: they can."""
        if device not in self.devices:
            return (
                f"the pool's process does not see GPU {device}, of {len(self.devices)} that it "
                "sees: add it to CUDA_VISIBLE_DEVICES"
            )
        for attribute, what in (
            (_HAS_VIRTUAL_MEMORY, "virtual memory management"),
            (_HAS_DESCRIPTORS, "export of memory as file descriptors"),
        ):
            value = ctypes.c_int()
            ordinal = self.devices[device]
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, ordinal)
            if not value.value:
                return (
                    f"GPU {device} has no {what} (attribute {attribute} is 0, expected 1): use a "
                    "GPU with it, on Linux with a driver of CUDA 12.2 or later"
                )
        try:
            self._pids(device)
        except PoolError as error:
            return (
                f"writes of dead workers could not be excluded: {error}; install NVML, and turn "
                "MIG off (nvidia-smi -mig 0)"
            )
        return ""

    def cut(self, devices: Sequence[str]) -> str:
        for one in devices:
            for other in devices:
                can = ctypes.c_int(one == other)
                if one != other:
                    ordinals = self.devices[one], self.devices[other]
                    self._call("cuDeviceCanAccessPeer", ctypes.byref(can), *ordinals)
                if not can.value:
                    return (
                        f"GPU {one} cannot access GPU {other}: turn MIG off (nvidia-smi -mig 0), "
                        "use GPUs with a link, or a pool for each (router.shards)"
                    )
        return ""

    def create(self, device: str, nbytes: int) -> int:
        handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
        place = _Properties(_PINNED, _DESCRIPTOR, self._location(device))
        try:
            self._call(
                "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(place),
                ctypes.c_ulonglong(0),
            )  # fmt: skip
        except PoolError as error:
            where, setting = (
                (f"GPU {device}", "kv_cache_memory_bytes")
                if device
                else ("the host", "prefix_bytes")
            )
            raise PoolError(
                f"no {nbytes:,} bytes on {where} ({error}): lower pool.{setting}"
            ) from error
        try:
            self._call(
                "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR,
                ctypes.c_ulonglong(0),
            )  # fmt: skip
        finally:
            self._call("cuMemRelease", handle)  # the descriptor keeps the memory
        return descriptor.value

    def map(self, parts: Sequence[tuple[int | None, int]], device: str) -> int:
        size, start = sum(nbytes for _, nbytes in parts), ctypes.c_ulonglong()
        none, whole = ctypes.c_ulonglong(0), ctypes.c_size_t(size)
        alignment = ctypes.c_size_t(self.granularity)
        self._call("cuMemAddressReserve", ctypes.byref(start), whole, alignment, none, none)
        address = start.value
        mapped = list[tuple[int, int]]()
        for index, (descriptor, nbytes) in enumerate(parts):
            if descriptor is None:
                address += nbytes
                continue
            handle, length = ctypes.c_ulonglong(), ctypes.c_size_t(nbytes)
            self._call(
                "cuMemImportFromShareableHandle", ctypes.byref(handle),
                ctypes.c_void_p(descriptor), _DESCRIPTOR,
            )  # fmt: skip
            at = ctypes.c_ulonglong(address)
            self._call("cuMemMap", at, length, ctypes.c_size_t(0), handle, none)
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
            readers = [HOST] * (index == 0) + [device] * (device != HOST)
            if readers:
                each = (_Access(self._location(reader), _READ_WRITE) for reader in readers)
                access = (_Access * len(readers))(*each)
                self._call("cuMemSetAccess", at, length, access, ctypes.c_size_t(len(readers)))
            mapped.append((address, nbytes))
            address += nbytes
        self._mapped[start.value] = mapped
        return start.value

    def unmap(self, address: int, nbytes: int) -> None:
        for at, length in self._mapped.pop(address):
            self._call("cuMemUnmap", ctypes.c_ulonglong(at), ctypes.c_size_t(length))
        self._call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes))

    def revoke(self, process: ProcessKey) -> bool:
        """Whether no GPU has a context of the process: its queue ends with its context.

        Pids are those of this process's pid namespace.
        """
        try:
            return all(process.pid not in self._pids(name) for name in self.devices)
        except PoolError as error:
            logger.warning("pages of process %d are not free yet: %s", process.pid, error)
            return False

    def _pids(self, device: str) -> set[int]:
        """Processes that have a context on a GPU."""
        handle, count = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
        found = (_RunningProcess * _MOST_PROCESSES)()
        text = bytes.fromhex(device).hex()
        uuid = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise PoolError(f"no NVML ({error})") from error
        for error in (
            library.nvmlInit_v2(),
            library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)),
            library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found),
        ):
            if error:
                raise PoolError(f"NVML does not list the processes of GPU {uuid} (error {error})")
        return {found[index].pid for index in range(count.value)}

    def _location(self, device: str) -> _Location:
        if device == HOST:
            return _Location(_ON_HOST_NODE, 0)
        return _Location(_ON_DEVICE, self.devices[device])

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise PoolError(f"{name}: CUDA error {error} (process {os.getpid()})")
