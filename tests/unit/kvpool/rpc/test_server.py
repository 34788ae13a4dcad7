"""The pool process with workers that are real processes, and with peers that talk nonsense."""

import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import grpc
import msgpack
import numpy as np
import pytest

from triptych.core.config import PoolConfig
from triptych.core.errors import (
    ConfigError,
    MessageError,
    NotRegistered,
    PoolError,
    PoolUnavailable,
    StaleHandle,
    TriptychError,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import WIRE_VERSION, pack, unpack
from triptych.kvpool.pool import reservation
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import this_process
from triptych.kvpool.rpc import calls, messages
from triptych.kvpool.rpc.channel import MAX_FRAME_BYTES, FrameChannel
from triptych.kvpool.rpc.client.pool_client import PoolClient
from triptych.kvpool.rpc.client.watcher import PoolWatcher
from triptych.kvpool.rpc.local_pool import LockedPool
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.server import SWEEP_PERIOD_S, PoolServer, answer

HERE = Path(__file__).parent
Spawn = Callable[..., "subprocess.Popen[str]"]
MakeServer = Callable[..., PoolServer]
MakeClient = Callable[[PoolServer | str, str], PoolClient]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a script of this folder and waits until it says something."""
    children = list["subprocess.Popen[str]"]()

    def start(script: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def said(child: "subprocess.Popen[str]") -> str:
    assert child.stdout
    return child.stdout.readline().strip()


def tell(child: "subprocess.Popen[str]") -> list[str]:
    assert child.stdin
    child.stdin.write("go on\n")
    child.stdin.flush()
    return [said(child), said(child)]


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until the condition held; infinity if it did not in time."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        if condition():
            return time.monotonic() - start
        time.sleep(0.01)
    return float("inf")


def test_pages_of_a_killed_worker_are_free_long_before_its_lease_ends(
    make_server: MakeServer, spawn: Spawn, tmp_path: Path
) -> None:
    """Half a second on a machine with nothing else to do; a lease here takes ten minutes."""
    server = make_server(lease_ttl_s=600.0)
    child = spawn("worker_process.py", server.address, "victim", tmp_path)
    assert said(child) == "holding"
    assert server.stat().by_request == {"r": 50}
    child.send_signal(signal.SIGKILL)  # and nobody waits for it: it stays a zombie
    assert wait_until(lambda: server.stat().held_pages == 0, 20.0) < 20.0
    ledger = server.stat()
    assert (ledger.free_pages, ledger.reclaimed_workers_total) == (ledger.pages, 1)
    assert ledger.reclaimed_pages_total >= 150
    assert server.check() == []


@pytest.mark.parametrize("room", [64, 40])
def test_the_last_pages_are_reserved_while_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Nobody gets a page that is not; if the device has no room for all, the others serve."""
    page = 4096
    monkeypatch.setattr(reservation, "AT_ONCE_BYTES", 16 * page)
    monkeypatch.setattr(reservation, "PIECE_BYTES", 8 * page)
    reserve = Arena.reserve

    def reserve_some(arena: Arena, first: int, end: int) -> None:
        if end > room:
            raise PoolError("no room")
        reserve(arena, first, end)

    monkeypatch.setattr(Arena, "reserve", reserve_some)
    server = PoolServer(PoolConfig(kv_cache_memory_bytes=64 * page), page, directory=tmp_path)
    file = tmp_path / server.stat().arena
    assert (server.stat().free_pages, file.stat().st_blocks * 512 // page) == (16, 17)
    server.start()
    assert wait_until(lambda: server.stat().free_pages == room, 20.0) < 20.0
    assert file.stat().st_blocks * 512 // page > room
    assert server.check() == []
    names = ["arena"] if room < 64 else []
    assert wait_until(lambda: [w.name for w in server.stat().workers] == names, 20.0) < 20.0
    server.stop()


def test_a_frozen_worker_is_ended_before_its_pages_move_on(
    make_server: MakeServer, spawn: Spawn, tmp_path: Path
) -> None:
    server = make_server(lease_ttl_s=1.0)
    child = spawn("worker_process.py", server.address, "sleeper", tmp_path)
    assert said(child) == "holding"
    assert tell(child) == ["went on", "went on"]
    child.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: server.stat().held_pages == 0, 5.0) < 5.0
    assert child.wait(timeout=1) == -signal.SIGKILL


@pytest.mark.parametrize("way", ["killed", "frozen", "buried by the sweeper"])
def test_what_a_dead_worker_held_goes_to_another_one(
    make_server: MakeServer, make_client: MakeClient, spawn: Spawn, tmp_path: Path, way: str
) -> None:
    server = make_server()
    heir = make_client(server, "heir")
    child = spawn("worker_process.py", server.address, "former", tmp_path, 4096)
    assert said(child) == "holding"
    child.send_signal(signal.SIGSTOP if way == "frozen" else signal.SIGKILL)
    if way == "buried by the sweeper":
        time.sleep(2.5 * SWEEP_PERIOD_S)
    held = server.stat().held_pages
    lease, *ids = heir.inherit("former")[: 4 * 61].view("<i4").tolist()
    assert child.wait(timeout=1) == -signal.SIGKILL
    assert server.stat().held_pages == held
    wanted = np.array(ids[:30], np.int32)  # some it had taken, some it had committed
    lease_ref = heir.adopt("former", "r", LeaseId(lease), wanted)
    assert set(heir.arena.data[wanted[:10]].flat) == {7}
    assert set(heir.arena.data[wanted[10:]].flat) == {8}
    assert server.stat().by_request == {"r": 30}
    assert heir.expel("former")
    assert server.check() == []
    heir.release([lease_ref.lease])
    assert server.stat().by_request == {}
    assert server.stat().held_pages == heir.idle_pages
    with pytest.raises(StaleHandle, match="left nothing"):
        heir.inherit("former")


def test_nothing_is_left_of_a_worker_without_a_checkpoint_or_one_that_went_by_itself(
    make_server: MakeServer, make_client: MakeClient, tmp_path: Path
) -> None:
    server = make_server()
    heir = make_client(server, "heir")
    plain = make_client(server, "plain")
    polite = PoolClient(server.address, "polite", directory=tmp_path, checkpoint_bytes=4096)
    assert polite.checkpoint is not None
    assert len(list(tmp_path.glob("triptych-*"))) == 2
    (lease_ref,) = polite.handoff([("r", polite.allocate(3))])
    polite.close()
    assert len(list(tmp_path.glob("triptych-*"))) == 1
    for previous_worker in ("plain", "polite", "nobody"):
        with pytest.raises(StaleHandle, match="left nothing"):
            heir.inherit(previous_worker)
        with pytest.raises(StaleHandle, match="left nothing"):
            heir.adopt(previous_worker, "r", lease_ref.lease, plain.allocate(0))


def test_a_worker_that_computes_for_long_keeps_its_lease(
    make_server: MakeServer, make_client: MakeClient
) -> None:
    server = make_server(lease_ttl_s=0.8)
    pool = make_client(server, "busy")
    ids = pool.allocate(10)
    time.sleep(1.8)
    pool.free(ids)
    assert server.stat().reclaimed_workers_total == 0


def test_a_killed_pool_is_noticed_and_its_memory_cleaned_up_by_the_next(
    make_server: MakeServer, make_client: MakeClient, spawn: Spawn, tmp_path: Path
) -> None:
    child = spawn("pool_process.py", tmp_path)
    pool = make_client(said(child), "orphan")
    ids = pool.allocate(10)
    [lease_ref] = pool.handoff([("r", ids)])
    old_files = {path.name for path in tmp_path.iterdir()}
    child.kill()
    child.wait()
    with pytest.raises(PoolUnavailable, match="does not answer"):
        pool.release([lease_ref.lease])
    for call in (lambda: pool.allocate(1), lambda: pool.free(ids), lambda: pool.attach([])):
        with pytest.raises(PoolUnavailable):
            call()
    pool.arena.data[ids] = 1  # still mapped: no crash

    later = make_client(make_server(), "later")
    assert not old_files & {path.name for path in tmp_path.iterdir()}
    with pytest.raises(StaleHandle):
        later.attach([(lease_ref, ids)])


def test_a_pool_that_was_replaced_at_the_same_address_refuses_former_workers(
    tmp_path: Path, make_server: MakeServer, make_client: MakeClient
) -> None:
    address = f"unix:{tmp_path}/private/pool.sock"
    first = make_server(address=address)
    pool = make_client(first, "worker")
    pool.allocate(3)
    first.stop()
    make_server(address=address)

    def lost() -> bool:
        try:
            pool.handoff([])
        except (NotRegistered, PoolUnavailable):
            return True
        return False

    assert wait_until(lost, 5.0) < 5.0
    with pytest.raises((NotRegistered, PoolUnavailable)):
        pool.allocate(1)


def test_stop_leaves_no_files(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    socket = Path(server.address.removeprefix("unix:"))
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    server.stop()
    assert not socket.parent.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_directory_that_others_can_enter_is_refused(
    make_server: MakeServer, tmp_path: Path
) -> None:
    open_directory = tmp_path / "open"
    open_directory.mkdir(mode=0o755)
    with pytest.raises(PoolError, match="0700"):
        make_server(address=f"unix:{open_directory}/pool.sock")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "dns:example:1", "unix-abstract:x", "::1:1"])
def test_addresses_that_other_machines_could_reach_are_refused(
    make_server: MakeServer, address: str
) -> None:
    with pytest.raises(PoolError, match="expected unix:/path"):
        make_server(address=address)


def test_an_address_in_use_is_an_error(make_server: MakeServer) -> None:
    taken = make_server(address="127.0.0.1:0").address
    with pytest.raises(PoolError, match="cannot listen"):
        make_server(address=taken)


def test_a_pool_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool\.kv_cache_memory_bytes=255"):
        PoolServer(PoolConfig(kv_cache_memory_bytes=255), 256, directory=tmp_path)


def test_nobody_there_is_pool_unavailable(tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailable, match="does not answer"):
        PoolClient(f"unix:{tmp_path}/none.sock", "w", connect_timeout_s=0.2)


def test_a_watcher_reads_the_books_and_notices_that_the_pool_is_gone(
    make_server: MakeServer, make_client: MakeClient
) -> None:
    server = make_server()
    watcher = PoolWatcher(server.address)
    make_client(server, "w").allocate(5)
    ledger = watcher.stat()
    assert ledger is not None
    assert ledger.held_pages == 64
    server.stop()
    assert watcher.stat() is None
    watcher.close()


def test_standard_health_probes_are_answered_until_the_pool_stops(
    make_server: MakeServer,
) -> None:
    server = make_server()
    with grpc.insecure_channel(server.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=5, wait_for_ready=True) == b"\x08\x01"
        server.stop()
        with pytest.raises(grpc.RpcError):
            check(b"", timeout=1)


class TestNonsense:
    """Whatever comes in, the answer is a refusal, the books stay, and the pool goes on."""

    def good_frames(self, worker: WorkerId) -> list[bytes]:
        lease_ref = LeaseRef("triptych-0-0123456789abcdef", LeaseId(1), 1)
        pages = PageRanges(b"\0\0\0\0\1\0\0\0")
        commit = calls.CommitPages("r", pages)
        wanted = calls.LeasePages(lease_ref, pages)
        questions = [
            calls.RegisterWorker(name="w", process=this_process()),
            calls.RenewWorker(worker=worker),
            calls.AllocatePages(worker=worker, pages=9, at_least=9),
            calls.FreePages(worker=worker, pages=pages),
            calls.HandOff(worker=worker, commits=(commit,), releases=(), keep=False),
            calls.AttachLeases(worker=worker, wanted=(wanted,)),
            calls.ReleaseLeases(worker=worker, leases=(LeaseId(1),), keep=True),
            calls.WithdrawRequests(worker=worker, labels=("r",)),
            calls.WithdrawAll(worker=worker),
            calls.InheritFrom(previous_worker="former"),
            calls.AdoptRequest(
                worker=worker, previous_worker="former", label="r", lease=LeaseId(1), pages=pages
            ),
            calls.UnregisterWorker(worker=worker),
            calls.StatPool(),
            calls.CheckPool(),
        ]
        return [pack([question]) for question in questions]

    def mutated(self, frame: bytes, generator: random.Random) -> bytes:
        """The frame cut short, or with some bytes changed, or both."""
        changed = bytearray(frame)
        if generator.random() < 0.3:
            changed = changed[: generator.randrange(len(changed))]
        for _ in range(generator.randrange(1, 4)):
            if changed:
                changed[generator.randrange(len(changed))] = generator.randrange(256)
        return bytes(changed)

    def test_truncated_and_mutated_frames(self, make_server: MakeServer) -> None:
        server = make_server()
        channel = FrameChannel(server.address)
        generator = random.Random(0)
        frames = self.good_frames(WorkerId("nobody"))
        for _ in range(1500):
            frame = self.mutated(generator.choice(frames), generator)
            assert len(unpack(channel.ask(frame, 5.0))) == 1
        channel.close()
        assert server.stat().held_pages == 0
        assert server.check() == []

    def test_a_hundred_thousand_frames_of_a_worker_gone_mad(self) -> None:
        """It is registered and holds pages; straight into what answers, without a socket."""
        generator, refused = random.Random(11), 0
        for _ in range(100):
            pool = LockedPool(Pool(64, 256, "triptych-0-0123456789abcdef", 10.0), extent_pages=8)
            me = pool.register("mad", this_process(), 0).worker
            other = pool.register("other", this_process(), 0).worker
            ids = pool.call(calls.AllocatePages(worker=me, pages=8, at_least=8)).pages.ids(64)
            commit = calls.CommitPages("r", PageRanges(ids[:4]))
            pool.call(calls.HandOff(worker=me, commits=(commit,), releases=(), keep=False))
            asked = calls.AllocatePages(worker=other, pages=8, at_least=8)
            held = set(pool.call(asked).pages.ids(64).tolist())
            frames = self.good_frames(me)
            for _ in range(1000):
                [said] = unpack(answer(pool, self.mutated(generator.choice(frames), generator)))
                refused += isinstance(said, messages.PoolRefused)
            assert pool.check() == []
            pages = PageRanges(np.array(sorted(held), np.int32))
            pool.call(calls.FreePages(worker=other, pages=pages))
        assert refused > 50_000

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"\x90",
            pack([]),
            pack([calls.StatPool(), calls.StatPool()]),
            pack([messages.PoolDone()]),
            b"\x92\x02\x92\xa9GrantPage\x80",
            b"\xc1" * 1000,
            b"\x91" * 100_000,
        ],
    )
    def test_what_is_not_one_question_is_refused(
        self, make_server: MakeServer, frame: bytes
    ) -> None:
        channel = FrameChannel(make_server().address)
        [said] = unpack(channel.ask(frame, 5.0))
        assert isinstance(said, messages.PoolRefused)
        assert said.error == "MessageError"
        channel.close()

    def test_a_worker_of_the_release_before_is_told_so(self, make_server: MakeServer) -> None:
        channel = FrameChannel(make_server().address)
        old = cast("bytes", msgpack.packb([WIRE_VERSION - 1, ["RegisterWorker", {"name": "w"}]]))
        [said] = unpack(channel.ask(old, 5.0))
        assert isinstance(said, messages.PoolRefused)
        assert "run one release of Triptych in all processes" in str(said.details)
        channel.close()

    @pytest.mark.parametrize(("pages", "at_least"), [(-1, -1), (1, 2), (2**63, 2**63), (5, -5)])
    def test_impossible_numbers_of_pages_are_refused(
        self, make_server: MakeServer, pages: int, at_least: int
    ) -> None:
        server = make_server()
        channel = FrameChannel(server.address)
        me = pack([calls.RegisterWorker(name="w", process=this_process())])
        [registered] = unpack(channel.ask(me, 5.0))
        fields = {"worker": registered.worker, "pages": pages, "at_least": at_least}
        frame = cast("bytes", msgpack.packb([WIRE_VERSION, ["AllocatePages", fields]]))
        [said] = unpack(channel.ask(frame, 5.0))
        assert isinstance(said, messages.PoolRefused)
        assert server.stat().held_pages == 0
        channel.close()

    def test_a_frame_that_is_too_large_is_refused_on_either_side(
        self, make_server: MakeServer
    ) -> None:
        server = make_server()
        channel = FrameChannel(server.address)
        with pytest.raises(MessageError, match="limit"):
            channel.ask(b"\0" * (MAX_FRAME_BYTES + 1), 5.0)
        channel.close()

    def test_endless_names_are_refused(
        self, make_server: MakeServer, make_client: MakeClient
    ) -> None:
        pool = make_client(make_server(), "w")
        with pytest.raises((MessageError, ValueError), match="limit"):
            pool.handoff([("r" * 10_000, pool.allocate(1))])


def test_a_watcher_sees_whose_each_page_is(
    make_server: MakeServer, make_client: MakeClient
) -> None:
    server = make_server()
    client, watcher = make_client(server, "w"), PoolWatcher(server.address)
    ids = client.allocate(3)
    client.handoff([("r", ids[:2])])
    seen = watcher.map(65_535)
    assert seen is not None
    owners = [seen.owners[entry - 1] for entry in seen.entries[ids]]
    assert [(one.kind, one.worker, one.label) for one in owners] == [
        ("request", "w", "r"),
        ("request", "w", "r"),
        ("extent", "w", ""),
    ]
    watcher.close()
    server.stop()
    late = PoolWatcher(server.address, timeout_s=0.2)
    assert late.map(65_535) is None
    late.close()


@pytest.mark.parametrize("max_entries", [0, -1, 65_536])
def test_a_map_of_any_size_cannot_be_asked_for(make_server: MakeServer, max_entries: int) -> None:
    channel = FrameChannel(make_server().address)
    fields = {"max_entries": max_entries}
    frame = cast("bytes", msgpack.packb([WIRE_VERSION, ["MapPages", fields]]))
    [said] = unpack(channel.ask(frame, 5.0))
    assert isinstance(said, messages.PoolRefused)
    channel.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"stride": 0},
        {"packed": b""},
        {"packed": b"\x02\x00" + bytes(6)},
        {"owners": [["extent", "w", ""]]},
    ],
)
def test_a_map_that_contradicts_itself_is_refused(fields: dict[str, object]) -> None:
    owner = {"kind": "extent", "worker": "w", "label": ""}
    good = {"arena": "a", "pages": 4, "stride": 1, "owners": [owner], "packed": bytes(8)}
    assert unpack(cast("bytes", msgpack.packb([WIRE_VERSION, ["PageMap", good]])))
    frame = cast("bytes", msgpack.packb([WIRE_VERSION, ["PageMap", good | fields]]))
    with pytest.raises(MessageError):
        unpack(frame)


def test_many_workers_at_once_keep_the_books_right(
    make_server: MakeServer, make_client: MakeClient
) -> None:
    server = make_server()
    failures = list[Exception]()

    def work(name: str) -> None:
        try:
            sender, receiver = make_client(server, f"{name}-out"), make_client(server, f"{name}-in")
            for number in range(25):
                ids = sender.allocate(20)
                sender.arena.data[ids] = number
                [lease_ref] = sender.handoff([(name, ids)])
                [lease_ref] = receiver.attach([(lease_ref, ids)])
                assert (receiver.arena.data[ids] == number).all()
                receiver.release([lease_ref.lease])
        except (TriptychError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"pair-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert server.check() == []
    assert server.stat().by_request == {}


def test_an_arena_of_another_shape_is_not_mapped(make_server: MakeServer, tmp_path: Path) -> None:
    arena = make_server().stat().arena
    with pytest.raises(PoolError, match="expected 1 of 256"):
        Arena.open(arena, (1, 256), tmp_path)


def test_pages_may_lie_elsewhere_than_what_else_is_shared(spawn: Spawn, tmp_path: Path) -> None:
    """The next pool removes what a dead one left in both places."""
    folder = tmp_path / "arena"
    child = spawn("pool_process.py", tmp_path, "arena")
    with PoolClient(
        said(child), "w", directory=tmp_path, arena_directory=folder, checkpoint_bytes=4096
    ) as client:
        ids = client.allocate(3)
        client.arena.data[ids] = 7
        assert [path.name for path in folder.iterdir()] == [client.arena.id]
        assert len(list(tmp_path.glob("triptych-*"))) == 1  # the checkpoint
        assert client.arena.is_on_disk
        client.free(ids)
    child.kill()
    child.wait()
    assert len(list(folder.iterdir())) == 1
    config = PoolConfig(kv_cache_memory_bytes=1 << 20, arena_path=str(folder))
    with PoolServer(config, 256, directory=tmp_path) as server:
        assert [path.name for path in folder.iterdir()] == [server.arena]
        assert not list(tmp_path.glob("triptych-*"))
    assert not list(folder.iterdir())
