"""The CUDA driver as documented, answered by a fake library: calls, and sentences of refusals."""

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from triptych.core.config import PoolConfig
from triptych.core.errors import PoolError
from triptych.kvpool import DeviceMemory, PoolClient, PoolServer
from triptych.kvpool.pool import cuda_driver
from triptych.kvpool.pool.cuda_driver import CudaDriver
from triptych.kvpool.pool.processes import this_process

OUT_OF_MEMORY = 2
ONE, TWO = "01" * 16, "02" * 16
"""UUIDs of the GPUs."""


class Library:
    """libcuda and NVML of a machine with GPUs; ``errors``: what functions return, by name."""

    def __init__(self, gpus: int = 2) -> None:
        self.gpus, self.errors = gpus, dict[str, int]()
        self.lacking = 0
        """An attribute that is 0."""
        self.has_peers, self.pids = True, list[int]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            answer = getattr(self, f"do_{name}", None) if not self.errors.get(name) else None
            if answer is not None:
                answer(*arguments)
            return self.errors.get(name, 0)

        if name.startswith("do_"):
            raise AttributeError(name)
        return call

    def watch(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of the calls of a function from now on."""
        calls, do = list[tuple[Any, ...]](), getattr(self, name)

        def call(*arguments: Any) -> int:
            calls.append(arguments)
            return do(*arguments)

        self.__dict__[name] = call
        return calls

    def do_cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.gpus

    def do_cuDeviceGetUuid_v2(self, uuid: Any, ordinal: int) -> None:
        uuid[:] = bytes([ordinal + 1] * 16)

    def do_cuDeviceGetAttribute(self, value: Any, attribute: int, _ordinal: int) -> None:
        value._obj.value = int(attribute != self.lacking)

    def do_cuDeviceCanAccessPeer(self, can: Any, _one: int, _other: int) -> None:
        can._obj.value = int(self.has_peers)

    def do_cuMemExportToShareableHandle(self, descriptor: Any, *_: object) -> None:
        descriptor._obj.value = os.memfd_create("arena")

    def do_nvmlDeviceGetComputeRunningProcesses_v3(self, _: Any, count: Any, found: Any) -> None:
        count._obj.value = len(self.pids)
        for index, pid in enumerate(self.pids):
            found[index].pid = pid


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _name: made)
    return made


def test_gpus_are_named_by_uuid_and_accepted(library: Library) -> None:
    driver = CudaDriver()
    assert driver.devices == {ONE: 0, TWO: 1}
    assert driver.refusal([ONE, TWO]) == ""


def test_a_process_is_gone_when_no_gpu_has_a_context_of_it(library: Library) -> None:
    driver, process = CudaDriver(), this_process()
    library.pids = [7, process.pid]
    assert not driver.revoke(process)
    library.pids = [7]
    assert driver.revoke(process)
    library.errors["nvmlInit_v2"] = 9
    assert not driver.revoke(process)


def test_no_driver_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    driver = CudaDriver()
    assert driver.devices == {}
    assert driver.refusal([ONE]) == (
        "no CUDA driver (libcuda.so.1: cannot open shared object file): install that of NVIDIA"
    )


REFUSALS = {
    "hidden": ("the pool's process sees no GPU", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0"),
    "another": (f"does not see GPU {TWO}, of 1 that it sees", "CUDA_VISIBLE_DEVICES"),
    "virtual memory": (f"GPU {ONE} has no virtual memory", "(attribute 102 is 0, expected 1): use"),
    "descriptors": (f"GPU {ONE} has no export of memory", "(attribute 103 is 0, expected 1): use"),
    "mig uuid": ("NVML does not list the processes of GPU", "turn MIG off (nvidia-smi -mig 0)"),
    "error": ("answers with an error (cuDeviceGetAttribute: CUDA error 999", "nvidia-smi"),
    "memory": ("no 1,048,576 bytes on GPU", "lower pool.kv_cache_memory_bytes"),
    "host memory": ("no 2,097,152 bytes on the host", "lower pool.prefix_bytes"),
    "map": ("cuMemMap: CUDA error 1", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSALS))
def test_each_refusal_says_why_and_what_to_do_and_the_pool_starts_in_host_memory(
    library: Library, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [ONE, TWO]
    match case:
        case "hidden":
            names = []
        case "another":
            library.gpus = 1
        case "virtual memory" | "descriptors":
            library.lacking = 102 if case == "virtual memory" else 103
        case "mig uuid":
            library.errors["nvmlDeviceGetHandleByUUID"] = 2
        case "error":
            library.errors["cuDeviceGetAttribute"] = 999
        case "memory" | "host memory":
            library.errors["cuMemCreate"] = OUT_OF_MEMORY
        case _:
            library.errors["cuMemMap"] = 1
    driver = CudaDriver()
    driver.granularity = 4096
    config = PoolConfig(kv_cache_memory_bytes=1 << 20, prefix_bytes=0)
    host = 2 << 20 if case == "host memory" else 4096
    if case == "memory":  # the arena of the host is created first
        answers = iter((0, OUT_OF_MEMORY))
        library.__dict__["cuMemCreate"] = lambda *_: next(answers)
        library.errors.clear()
    memory = DeviceMemory(driver, tuple(names), host)
    server = PoolServer(config, 4096, directory=tmp_path, device_memory=memory)
    with caplog.at_level(logging.WARNING), server:
        assert len(server.stat().arenas) == 1
        with PoolClient(server.address, "worker", directory=tmp_path) as worker:
            assert worker.arena.data.shape == (256, 4096)
    (line,) = [each for each in caplog.messages if "pool.arena=device" in each]
    assert line.startswith("pool.arena=device: pages are in host memory, and each GPU keeps copies")
    for part in REFUSALS[case]:
        assert part in line


def test_gpus_without_access_to_each_other_have_arenas_of_their_own(
    library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory of a GPU is allocated for the first worker that stores there, and mapped for it."""
    library.has_peers = False
    driver = CudaDriver()
    driver.granularity = 4096
    assert driver.refusal([ONE, TWO]) == ""
    config = PoolConfig(kv_cache_memory_bytes=1 << 20, prefix_bytes=0)
    memory = DeviceMemory(driver, (ONE, TWO), 4096)
    created, mapped = library.watch("cuMemCreate"), library.watch("cuMemMap")
    server = PoolServer(config, 4096, directory=tmp_path, device_memory=memory)
    with caplog.at_level(logging.WARNING), server:
        assert len(created) == len(mapped) == 1  # the host's
        with PoolClient(server.address, "prefill", directory=tmp_path, device=(driver, TWO)):
            assert len(created) == 2
            assert len(mapped) == 3
        copies = PoolClient(
            server.address, "decode", directory=tmp_path, device=(driver, ONE), keeps_copies=True
        )
        with copies as worker:
            assert worker.home == server.arena
            assert worker.capacity_pages == 257 + 2 * 256
        assert len(created) == 2
        library.errors["cuMemCreate"] = OUT_OF_MEMORY
        with pytest.raises(PoolError, match=rf"no 1,048,576 bytes on GPU {ONE}.*lower pool"):
            PoolClient(server.address, "compress", directory=tmp_path, device=(driver, ONE))
        del library.errors["cuMemCreate"]
    (line,) = [each for each in caplog.messages if "pool.arena=device" in each]
    assert "raw pages stay on the GPU of their prefill worker" in line
    assert f"because GPU {ONE} cannot access GPU {TWO}: turn MIG off (nvidia-smi -mig 0)" in line


def test_parts_that_are_mapped_are_unmapped_one_by_one(library: Library) -> None:
    driver, unmapped = CudaDriver(), library.watch("cuMemUnmap")
    address = driver.map([(3, 4096), (None, 8192), (4, 4096)], ONE)
    driver.unmap(address, 16384)
    assert [(at.value, size.value) for at, size in unmapped] == [
        (address, 4096), (address + 12288, 4096),
    ]  # fmt: skip


def test_an_error_of_the_driver_names_the_call(library: Library) -> None:
    library.errors["cuMemAddressReserve"] = 201
    with pytest.raises(PoolError, match="cuMemAddressReserve: CUDA error 201"):
        CudaDriver().map([(3, 4096)], ONE)
    assert ctypes.sizeof(cuda_driver._Properties) == 32  # as in cuda.h
