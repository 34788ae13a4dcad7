"""Pools with arenas on devices of a fake driver: real processes, real shared memory."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.fake_driver import DeviceFault, FakeDriver
from triptych.core.config import PoolConfig
from triptych.core.errors import PoolError, PoolExhausted, StaleHandle
from triptych.core.handles import pool_of
from triptych.kvpool import Access, PoolClient, PoolServer, PoolWatcher
from triptych.kvpool.pool.device_arenas import ArenaShape, DeviceArenas, DeviceMemory
from triptych.kvpool.pool.processes import ProcessKey, this_process

PAGE_BYTES, DEVICES = 1536, ("gpu-0", "gpu-1")
STEP = 8
"""Pages whose bytes are whole pages of the machine."""


@contextmanager
def serve(directory: Path, driver: FakeDriver, pages: int = 5 * STEP) -> Generator[PoolServer]:
    config = PoolConfig(kv_cache_memory_bytes=pages * PAGE_BYTES, extent_pages=4, prefix_bytes=0)
    memory = DeviceMemory(driver, DEVICES, STEP * PAGE_BYTES)
    with PoolServer(config, PAGE_BYTES, directory=directory, device_memory=memory) as server:
        yield server


def join(server: PoolServer, directory: Path, driver: FakeDriver, device: str) -> PoolClient:
    return PoolClient(server.address, f"on {device}", directory=directory, device=(driver, device))


def arenas_of(pool: PoolClient) -> DeviceArenas:
    assert isinstance(pool.arena, DeviceArenas)
    return pool.arena


def test_a_page_has_one_id_on_all_devices_and_moves_by_handle(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    with (
        serve(tmp_path, driver) as server,
        join(server, tmp_path, driver, "gpu-0") as one,
        join(server, tmp_path, driver, "gpu-1") as other,
    ):
        first = arenas_of(one).shape.pages[0]
        ids = one.allocate(3)
        assert one.home != other.home
        assert {pool_of(one.home), pool_of(other.home)} == {server.arena}
        assert np.all((ids >= first) & (ids < first + 5 * STEP))
        driver.array(arenas_of(one))[ids] = [[3], [4], [5]]
        (lease_ref,) = one.handoff([("r", ids)])
        assert lease_ref.arena == one.home
        (mine,) = other.attach([(lease_ref, ids)])
        assert driver.array(arenas_of(other))[ids, 7].tolist() == [3, 4, 5]
        moved = other.allocate(3)
        driver.array(arenas_of(other))[moved] = driver.array(arenas_of(other))[ids]
        (lease_ref,) = other.handoff([("r", moved)], releases=[mine.lease])
        assert lease_ref.arena == other.home
        assert driver.array(arenas_of(one))[moved, 9].tolist() == [3, 4, 5]
        with pytest.raises(StaleHandle):
            one.attach([(mine, ids)])
        assert server.check() == []
        assert server.stat().by_request == {"r": 3}
    with pytest.raises(PoolError):
        arenas_of(other).address  # noqa: B018 - it is closed


def test_pages_of_another_arena_go_back_there(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    with (
        serve(tmp_path, driver) as server,
        join(server, tmp_path, driver, "gpu-0") as one,
        join(server, tmp_path, driver, "gpu-1") as other,
    ):
        before = {line.arena: line.free_pages for line in server.stat().arenas}
        ids = np.concatenate([one.allocate(2, other.home), one.allocate(1, server.arena)])
        free = {line.arena: before[line.arena] - line.free_pages for line in server.stat().arenas}
        assert free == {server.arena: 1, one.home: 0, other.home: 2}
        with pytest.raises(PoolError):
            one.handoff([("two arenas", ids)])
        with pytest.raises(PoolExhausted):
            one.allocate(5 * STEP, other.home)
        with pytest.raises(PoolError):
            one.allocate(1, "elsewhere")
        one.free(ids)
        assert {line.arena: line.free_pages for line in server.stat().arenas} == before
        assert server.check() == []


def test_two_devices_hold_the_sum_of_their_memories(tmp_path: Path) -> None:
    """Each worker takes all of its device; nothing of the other one is missing for it."""
    driver = FakeDriver(tmp_path)
    with (
        serve(tmp_path, driver) as server,
        join(server, tmp_path, driver, "gpu-0") as one,
        join(server, tmp_path, driver, "gpu-1") as other,
    ):
        taken = np.concatenate([one.allocate(5 * STEP), other.allocate(5 * STEP)])
        assert np.unique(taken).size == 2 * 5 * STEP
        with pytest.raises(PoolExhausted):
            one.allocate(1)


def killed_worker(server: PoolServer, directory: Path) -> list[int]:
    """The pages of a worker that died with writes to them in the queue of its device."""
    command = [sys.executable, "-m", "tests.unit.kvpool.rpc.device_worker"]
    with subprocess.Popen(
        [*command, server.address, "victim", str(directory), "gpu-0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        left = list(map(int, worker.stdout.readline().split()))
        worker.kill()
    return left


def await_end(server: PoolServer) -> None:
    """Wait until the pool has taken back the pages of the killed worker."""
    until = time.monotonic() + 20
    while any(line.name == "victim" for line in server.stat().workers):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("revokes", [True, False])
def test_what_a_dead_worker_has_queued_reaches_no_page_of_others(
    tmp_path: Path, revokes: bool
) -> None:
    """Without revocation it does: so the test would see it."""
    driver = FakeDriver(tmp_path, revokes=revokes)
    with (
        serve(tmp_path, driver) as server,
        join(server, tmp_path, driver, "gpu-0") as heir,
    ):
        left = killed_worker(server, tmp_path)
        await_end(server)
        mine = heir.allocate(5 * STEP)
        assert set(left) <= set(mine.tolist())
        pages = driver.array(arenas_of(heir))
        pages[mine] = 9
        driver.run_queue(arenas_of(heir))
        assert bool(np.all(pages[mine] == 9)) is revokes
        assert driver.refused == (4 if revokes else 0)


class TroubledDriver(FakeDriver):
    """Fails when it is asked first about a dead process; the second answer takes long."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked, self.go_on = list[ProcessKey](), threading.Event()

    def revoke(self, process: ProcessKey) -> bool:
        self.asked.append(process)
        if len(self.asked) == 1:
            raise OSError("the driver has failed")
        if len(self.asked) == 2:
            return not self.go_on.wait(20)
        return super().revoke(process)


def test_a_driver_that_fails_or_takes_long_delays_the_pages_of_the_dead_alone(
    tmp_path: Path,
) -> None:
    driver = TroubledDriver(tmp_path)
    with serve(tmp_path, driver) as server:
        left = killed_worker(server, tmp_path)
        until = time.monotonic() + 20
        while len(driver.asked) < 2:
            assert time.monotonic() < until, "no sweep came after the one that failed"
            time.sleep(0.01)
        watcher = PoolWatcher(server.address, timeout_s=5)
        ledger = watcher.stat()
        watcher.close()
        assert ledger is not None, "calls wait for the driver"
        assert ledger.extent_pages >= len(left)
        driver.go_on.set()
        await_end(server)
        assert server.stat().extent_pages == 0
        assert len(driver.asked) == 3
        assert server.check() == []


def test_freed_memory_and_revoked_writers_are_refused(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    with serve(tmp_path, driver) as server, join(server, tmp_path, driver, "gpu-0") as one:
        arenas, page = arenas_of(one), int(one.allocate(1)[0])
        driver.check(arenas, [page, 0])
        driver.revoke(ProcessKey(1, 1, "another"))
        driver.queue_write(arenas, page, 1)
        driver.revoke(this_process())
        with pytest.raises(DeviceFault, match="revoked"):
            driver.queue_write(arenas, page, 1)
        driver.free_all()
        with pytest.raises(DeviceFault, match="freed"):
            driver.check(arenas, [page])


def test_pages_of_devices_are_not_for_the_host(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path)
    with serve(tmp_path, driver) as server:
        with pytest.raises(PoolError, match="computes on none"):
            PoolClient(server.address, "on the host", directory=tmp_path)
        with PoolClient(server.address, "beside", directory=tmp_path, device=(driver, "")) as host:
            assert host.home == server.arena
            arenas, ids = arenas_of(host), host.allocate(2)
            arenas.data[ids] = 3
            driver.check(arenas, ids.tolist())
            with pytest.raises(IndexError):
                arenas.data[arenas.shape.pages[0]]
            with pytest.raises(DeviceFault, match="not mapped"):
                driver.check(arenas, [arenas.shape.pages[0]])
        with pytest.raises(PoolError, match="no arena on"):
            PoolClient(server.address, "lost", directory=tmp_path, device=(driver, "gpu-7"))


def join_apart(
    server: PoolServer, directory: Path, driver: FakeDriver, device: str, *, copies: bool = False
) -> PoolClient:
    name = f"{'copies' if copies else 'pages'} on {device}"
    return PoolClient(
        server.address, name, directory=directory, device=(driver, device), keeps_copies=copies
    )


def test_devices_apart_use_their_own_memory_and_that_of_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(tmp_path, [DEVICES])
    with (
        caplog.at_level(logging.WARNING),
        serve(tmp_path, driver) as server,
        join_apart(server, tmp_path, driver, "gpu-0") as one,
        join_apart(server, tmp_path, driver, "gpu-1") as other,
        join_apart(server, tmp_path, driver, "gpu-1", copies=True) as decode,
    ):
        assert {pool_of(each.home) for each in (one, other, decode)} == {server.arena}
        assert decode.home == server.arena
        # The host's has room for all pages beside those of the cache.
        assert arenas_of(one).shape.pages == (6 * STEP, 5 * STEP, 5 * STEP)
        raw = one.allocate(2)
        driver.array(arenas_of(one))[raw] = 7
        (lease_ref,) = one.handoff([("r", raw)])
        for stranger in (other, decode):
            assert not stranger.has(one.home)
            with pytest.raises(DeviceFault, match="not mapped"):
                driver.check(arenas_of(stranger), raw.tolist())
            with pytest.raises(StaleHandle, match="is not accessed from"):
                stranger.attach([(lease_ref, raw)])
            with pytest.raises(PoolError, match="is not accessed from"):
                stranger.allocate(1, one.home)
        (mine,) = one.attach([(lease_ref, raw)])
        encoded = one.allocate(1, server.arena)
        driver.array(arenas_of(one))[encoded] = 9
        (lease_ref,) = one.handoff([("r", encoded)], releases=[mine.lease])
        decode.attach([(lease_ref, encoded)])
        assert arenas_of(decode).data[encoded, 5].tolist() == [9]
        assert server.stat().by_request == {"r": 1}
        assert server.check() == []
    assert [line for line in caplog.messages if "because gpu-0 cannot access gpu-1" in line]


def test_a_device_without_pages_has_no_arena(tmp_path: Path) -> None:
    """Its memory is for the copies of decode; a worker that stores there gets one."""

    class Counting(FakeDriver):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory, [DEVICES])
            self.created = list[str]()

        def create(self, device: str, nbytes: int) -> int:
            self.created.append(device)
            return super().create(device, nbytes)

    driver = Counting(tmp_path)
    with serve(tmp_path, driver) as server:
        with join_apart(server, tmp_path, driver, "gpu-1", copies=True):
            assert driver.created == [""]
        for _ in range(2):
            with join_apart(server, tmp_path, driver, "gpu-0"):
                assert driver.created == ["", "gpu-0"]


def test_memory_of_another_device_is_not_mapped(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path, [DEVICES])
    mine = driver.create("gpu-0", STEP * PAGE_BYTES)
    with pytest.raises(PoolError, match="gpu-1 cannot access memory of gpu-0"):
        driver.map([(None, STEP * PAGE_BYTES), (mine, STEP * PAGE_BYTES)], "gpu-1")
    os.close(mine)


@pytest.mark.parametrize("why", ["nodes", "small"])
def test_the_fallback_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str) -> None:
    driver = FakeDriver(tmp_path)
    pages = 1 if why == "small" else 5 * STEP
    config = PoolConfig(kv_cache_memory_bytes=pages * PAGE_BYTES, prefix_bytes=0)
    outside = ("127.0.0.1", Access("token")) if why == "nodes" else None
    server = PoolServer(
        config, PAGE_BYTES, directory=tmp_path, outside=outside,
        device_memory=DeviceMemory(driver, DEVICES, 0),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING), server:
        with PoolClient(server.address, "w", directory=tmp_path) as worker:
            assert worker.home == server.arena
            assert worker.arena.data.shape == (pages, PAGE_BYTES)
        assert len(server.stat().arenas) == 1
    sentence = {
        "nodes": "pages of several nodes are sent from host memory",
        "small": "raise pool.kv_cache_memory_bytes to at least",
    }[why]
    (line,) = [each for each in caplog.messages if "copies" in each]
    assert sentence in line


def test_arenas_begin_at_whole_pages_of_both_kinds() -> None:
    driver = FakeDriver.__new__(FakeDriver)
    shape = ArenaShape.of(driver, 1, 100 * PAGE_BYTES, PAGE_BYTES, DEVICES)
    assert shape.pages == (STEP, 96, 96)
    assert all(nbytes % driver.granularity == 0 for _, nbytes in shape.parts)
    assert [shape.index_of(device) for device in ("", *DEVICES)] == [0, 1, 2]
