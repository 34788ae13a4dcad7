"""Pages of one node's pool in the arena of another: over TCP, with real pool processes."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.unit.kvpool.certificates import make_certificates
from tests.unit.kvpool.transfer.slow_line import Line
from triptych.core.config import NetworkConfig
from triptych.core.errors import (
    AccessRefused,
    Cancelled,
    ConfigError,
    MessageError,
    NotHeld,
    PoolError,
    PoolExhausted,
    PoolUnavailable,
    StaleHandle,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import pack, unpack
from triptych.kvpool import Access, Fetcher, Namespace, PoolClient, PoolServer, Publication
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ELSEWHERE, this_process
from triptych.kvpool.rpc import calls, messages
from triptych.kvpool.rpc.calls import RegisterWorker, StatPool
from triptych.kvpool.rpc.channel import CALL, FrameChannel
from triptych.kvpool.rpc.gateway import Gateway, PoolAddress
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.stub import PoolStub
from triptych.kvpool.transfer.page_stream import PageSender, receive

POOL = Path(__file__).parents[1] / "rpc" / "pool_process.py"

TOKEN = "a token of the tests"
PAGE_BYTES = 4096
PAGES = 2048  # 8 MiB: eight chunks


@dataclass
class Node:
    """A pool process, as its own workers and other nodes see it."""

    process: "subprocess.Popen[str]"
    address: str
    arena: str
    outside: PoolAddress
    directory: Path

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def make_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Starts a pool process that other nodes reach, with shared memory of its own."""
    nodes = list[Node]()

    def make(lease_s: float = 20.0) -> Node:
        directory = tmp_path_factory.mktemp("node")
        command = [sys.executable, str(POOL), str(directory)]
        process = subprocess.Popen(
            [*command, "outside", "127.0.0.1", TOKEN, str(lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        address = process.stdout.readline().strip()
        arena, *ports = process.stdout.readline().split()
        outside = PoolAddress("127.0.0.1", *map(int, ports))
        nodes.append(Node(process, address, arena, outside, directory))
        return nodes[-1]

    yield make
    for node in nodes:
        node.process.kill()
        node.process.communicate()


@pytest.fixture
def closing() -> Iterator[Callable[..., None]]:
    """Closes what it is given, last first."""
    things = list[PoolClient | Fetcher | Line]()
    yield lambda *more: things.extend(more)
    for thing in reversed(things):
        thing.close()


@dataclass
class Pair:
    """A producer on one node, a worker that fetches on another, and the lines between them."""

    far: Node
    near: Node
    producer: PoolClient
    worker: PoolClient
    calls: Line
    pages: Line
    fetcher: Fetcher

    def commit(self, pages: int = PAGES, label: str = "r") -> tuple[LeaseRef, PageIds]:
        """Pages with random bytes, in no order, handed on."""
        rng = np.random.default_rng(pages)
        ids = rng.permutation(self.producer.allocate(pages)).astype(np.int32)
        self.producer.arena.data[ids] = rng.integers(0, 256, (pages, PAGE_BYTES), np.uint8)
        [lease_ref] = self.producer.handoff([(label, ids)])
        return lease_ref, ids

    def is_whole(self, ids: PageIds, mine: PageIds) -> bool:
        return np.array_equal(self.worker.arena.data[mine], self.producer.arena.data[ids])

    def held_there(self) -> dict[str, int]:
        return self.producer.stat().by_request

    def sent(self) -> int:
        return self.producer.stat().network.sent_bytes

    def nothing_is_held(self) -> bool:
        return (
            self.producer.stat().by_request == {}
            and self.worker.stat().by_request == {}
            and self.worker.allocated_pages == 0
        )


@pytest.fixture(scope="module")
def nodes(make_node: Callable[..., Node]) -> tuple[Node, Node]:
    return make_node(), make_node()


@pytest.fixture
def make_pair(closing: Callable[..., None]) -> Callable[[Node, Node], Pair]:
    return lambda far, near: pair_of(far, near, closing)


@pytest.fixture
def pair(nodes: tuple[Node, Node], make_pair: Callable[[Node, Node], Pair]) -> Pair:
    return make_pair(*nodes)


def pair_of(far: Node, near: Node, closing: Callable[..., None]) -> Pair:
    producer = PoolClient(far.address, "compress-1", directory=far.directory)
    worker = PoolClient(near.address, "decode-1", directory=near.directory)
    calls, pages = Line(far.outside.calls), Line(far.outside.pages)
    found = {far.arena: PoolAddress("127.0.0.1", calls.port, pages.port)}
    fetcher = Fetcher(worker, found.get, Access(TOKEN))
    closing(producer, worker, calls, pages, fetcher)
    return Pair(far, near, producer, worker, calls, pages, fetcher)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.02)


def test_pages_come_over_and_are_free_where_they_came_from(pair: Pair) -> None:
    lease_ref, ids = pair.commit()
    before = pair.sent()
    made, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert made.arena == pair.near.arena
    assert pair.is_whole(ids, mine)
    assert pair.held_there() == {}
    assert pair.worker.stat().by_request == {"r": PAGES}
    assert pair.worker.bytes_copied == PAGES * PAGE_BYTES
    assert pair.producer.stat().network.sent_bytes - before == PAGES * PAGE_BYTES
    [attached] = pair.worker.attach([(made, mine)])  # as an engine does with any handle
    pair.worker.release([attached.lease])
    assert pair.nothing_is_held()
    with pytest.raises(StaleHandle):
        pair.fetcher.fetch("r", lease_ref, ids)


def test_the_speed_of_the_line_is_measured(pair: Pair) -> None:
    assert pair.fetcher.link.bytes_s == 0.0
    pair.pages.bytes_s = 20e6
    lease_ref, ids = pair.commit()
    pair.fetcher.fetch("r", lease_ref, ids)
    assert 5e6 < pair.fetcher.link.bytes_s < 25e6


def test_what_a_request_shares_comes_over_as_its_own(
    make_node: Callable[..., Node],
    nodes: tuple[Node, Node],
    make_pair: Callable[[Node, Node], Pair],
) -> None:
    pair = make_pair(make_node(), nodes[1])
    space, tokens = Namespace(salt=b"", model="m", revision="", profile="p"), list(range(8))
    own, shared = pair.producer.allocate(3), pair.producer.allocate(4)
    for number, page in enumerate([*own, *shared]):
        pair.producer.arena.data[page] = number
    new = Publication(
        namespace=space, tokens=tokens, blocks=np.split(shared, 2), seconds=1.0, tenant=""
    )
    assert pair.producer.publish_prefix(new) == 2
    found = pair.producer.pin_prefix(space, tokens)
    assert found is not None
    ids = np.concatenate([own, *found.blocks])
    [lease_ref] = pair.producer.handoff([("r", ids)], pins=[found.pin])
    assert (lease_ref.shared, pair.producer.stat().prefix.readers) == (4, 1)
    with pytest.raises(NotHeld):
        pair.fetcher.fetch("r", lease_ref, ids[::-1].copy())
    made, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert made.shared == 0
    assert pair.is_whole(ids, mine)
    assert pair.worker.stat().by_request == {"r": 7}
    assert pair.held_there() == {"prefix": 4}
    assert pair.producer.stat().prefix.readers == 0
    pair.worker.withdraw(["r"])


def test_a_transfer_that_breaks_goes_on_from_the_last_good_page(pair: Pair) -> None:
    lease_ref, ids = pair.commit()
    pair.calls.cuts_after = [500]
    pair.pages.cuts_after = [1_500_000, 3_000_000, 0]
    _, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert pair.is_whole(ids, mine)
    assert pair.fetcher.traffic.resumed >= 3
    assert pair.worker.bytes_copied == PAGES * PAGE_BYTES  # no good page came twice
    assert pair.held_there() == {}


def test_an_attach_whose_answer_was_lost_is_not_a_stale_handle(pair: Pair) -> None:
    lease_ref, ids = pair.commit(8)
    warm, warm_ids = pair.commit(1, "warm")
    pair.fetcher.fetch("warm", warm, warm_ids)  # registered from here on
    guest = pair.fetcher._guests[pair.far.arena]
    call = guest.pool.call

    def heard_but_not_answered(asked: PoolCall[Any]) -> object:
        if not isinstance(asked, calls.AttachLeases):
            return call(asked)
        guest.pool.call = call
        call(asked)
        raise PoolUnavailable("the line broke")

    guest.pool.call = heard_but_not_answered  # type: ignore[method-assign]
    _, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert pair.is_whole(ids, mine)
    assert pair.held_there() == {}


def test_a_release_that_could_not_be_said_is_said_later(pair: Pair) -> None:
    lease_ref, ids = pair.commit(8)
    handoff = pair.worker.handoff

    def cut_then_commit(*asked: object, **more: object) -> list[LeaseRef]:
        pair.calls.is_down = True
        pair.calls.cut()
        return handoff(*asked, **more)  # type: ignore[arg-type]

    pair.worker.handoff = cut_then_commit  # type: ignore[method-assign]
    _, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert pair.is_whole(ids, mine)
    assert pair.held_there() == {"r": 8}
    pair.calls.is_down = False
    wait_until(lambda: pair.held_there() == {})


def test_a_pool_that_dies_in_mid_transfer_ends_it_and_leaves_nothing(
    nodes: tuple[Node, Node],
    make_node: Callable[..., Node],
    make_pair: Callable[[Node, Node], Pair],
) -> None:
    pair = make_pair(make_node(lease_s=1.0), nodes[1])
    lease_ref, ids = pair.commit(
        8192
    )  # 32 MiB: more than a socket holds of what a dead one had sent
    seen = list[int]()

    def kill_after_some() -> bool:
        seen.append(1)
        if len(seen) == 3:
            pair.far.kill()
        return False

    with pytest.raises(PoolUnavailable):
        pair.fetcher.fetch("r", lease_ref, ids, kill_after_some)
    assert pair.worker.allocated_pages == 0
    assert pair.worker.stat().by_request == {}


def test_a_cancelled_transfer_leaves_nothing(pair: Pair) -> None:
    lease_ref, ids = pair.commit()
    with pytest.raises(Cancelled):
        pair.fetcher.fetch("r", lease_ref, ids, lambda: True)
    wait_until(pair.nothing_is_held)


def test_no_room_here_leaves_the_pages_where_they_are(pair: Pair) -> None:
    lease_ref, ids = pair.commit(8)
    all_of_it = pair.worker.allocate(pair.worker.capacity_pages)
    with pytest.raises(PoolExhausted):
        pair.fetcher.fetch("r", lease_ref, ids)
    assert pair.held_there() == {"r": 8}
    pair.worker.free(all_of_it)
    pair.fetcher.fetch("r", lease_ref, ids)


def test_a_guest_whose_lease_ran_out_registers_anew(pair: Pair) -> None:
    warm, warm_ids = pair.commit(1, "warm")
    pair.fetcher.fetch("warm", warm, warm_ids)
    pair.producer.expel("guest/decode-1")  # as when it was silent for too long
    lease_ref, ids = pair.commit(8)
    _, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert pair.is_whole(ids, mine)
    assert pair.held_there() == {}


def test_a_claim_that_is_not_good_changes_nothing(pair: Pair) -> None:
    lease_ref, ids = pair.commit(8)
    wrong = [
        LeaseRef(lease_ref.arena, lease_ref.lease, lease_ref.generation + 1),
        LeaseRef(lease_ref.arena, LeaseId(10**6), 1),
        LeaseRef("triptych-0-0123456789abcdef", lease_ref.lease, lease_ref.generation),
    ]
    for bad in wrong:
        with pytest.raises(StaleHandle):
            pair.fetcher.fetch("r", bad, ids)
    with pytest.raises(PoolError):
        pair.fetcher.fetch("r", lease_ref, ids[:4])
    assert pair.held_there() == {"r": 8}
    assert pair.worker.allocated_pages == 0
    pair.fetcher.fetch("r", lease_ref, ids)


def test_a_slow_reader_is_not_sent_more_than_it_reads(pair: Pair) -> None:
    lease_ref, ids = pair.commit(8192)
    guest = guest_of(pair.far.outside, Access(TOKEN))
    me = attached(guest, "decode-2", lease_ref, ids)
    asked = calls.ReadPages(worker=me, lease=lease_ref.lease, pages=PageRanges(ids))
    ticket, data = guest.call(asked).ticket, np.zeros((8192, PAGE_BYTES), np.uint8)
    at = ("127.0.0.1", pair.far.outside.pages)
    before, sent = pair.sent(), 0
    chunks = receive(
        at, Access(TOKEN), ticket, lease_ref.lease, data, np.arange(8192, dtype=np.int32)
    )
    assert next(chunks) == 256

    def has_stopped() -> bool:
        nonlocal sent
        earlier, sent = sent, pair.sent() - before
        time.sleep(0.3)
        return sent == earlier

    wait_until(has_stopped)
    assert sent < 24 << 20  # of 32 MiB: what fits into the kernel's buffers
    assert list(chunks)[-1] == 8192
    assert np.array_equal(data, pair.producer.arena.data[ids])
    guest.call(calls.UnregisterWorker(worker=me))
    guest.close()


def test_a_ticket_is_good_once_and_nothing_else_opens_the_port(pair: Pair) -> None:
    lease_ref, ids = pair.commit(4)
    guest = guest_of(pair.far.outside, Access(TOKEN))
    me = attached(guest, "decode-3", lease_ref, ids)
    at, data = ("127.0.0.1", pair.far.outside.pages), np.zeros((4, PAGE_BYTES), np.uint8)
    rows, refused = np.arange(4, dtype=np.int32), pair.producer.stat().network.refused_calls

    def read(ticket: bytes) -> list[int]:
        return list(receive(at, Access(TOKEN), ticket, lease_ref.lease, data, rows))

    asked = calls.ReadPages(worker=me, lease=lease_ref.lease, pages=PageRanges(ids))
    ticket = guest.call(asked).ticket
    for wrong in (b"\0" * 32, ticket[:-1] + bytes([ticket[-1] ^ 1])):
        with pytest.raises(PoolUnavailable):
            read(wrong)
    assert read(ticket) == [4]
    with pytest.raises(PoolUnavailable):
        read(ticket)
    wait_until(lambda: pair.producer.stat().network.refused_calls == refused + 3)
    stale = guest.call(asked).ticket
    guest.call(calls.ReleaseLeases(worker=me, leases=(lease_ref.lease,), keep=False))
    with pytest.raises(StaleHandle):
        read(stale)
    guest.close()


@pytest.mark.parametrize("place", [0, 5, 9, 12, 600_000, 12 + (1 << 20), 17 + (1 << 20)])
def test_damaged_bytes_are_refused_counted_and_asked_for_again(pair: Pair, place: int) -> None:
    """In a header, in pages, in the word that they are good, in the checksum."""
    lease_ref, ids = pair.commit(512)
    pair.pages.flips_at = [place, place]
    _, mine = pair.fetcher.fetch("r", lease_ref, ids)
    assert pair.is_whole(ids, mine)
    assert pair.fetcher.traffic.bad_chunks + pair.fetcher.traffic.resumed == 2
    assert pair.held_there() == {}


def test_a_line_that_damages_everything_ends_the_transfer(pair: Pair) -> None:
    lease_ref, ids = pair.commit(512)
    pair.pages.flips_at = [700_000] * 20
    with pytest.raises(MessageError, match="checksum does not fit"):
        pair.fetcher.fetch("r", lease_ref, ids)
    wait_until(pair.nothing_is_held)


# ------------------------------------------------------------------ who may come in


@pytest.fixture
def make_open(make_server: Callable[..., PoolServer]) -> Callable[[Access], PoolServer]:
    """Pools of this process that other nodes reach."""
    return lambda access: make_server(outside=("127.0.0.1", access))


def guest_of(pool: PoolAddress | None, access: Access) -> PoolStub:
    return PoolStub(FrameChannel(str(pool), access), 5.0, wait=False)


def attached(guest: PoolStub, name: str, lease_ref: LeaseRef, ids: PageIds) -> WorkerId:
    """Register a worker that attaches a lease."""
    worker = guest.call(RegisterWorker(name=name, process=ELSEWHERE)).worker
    wanted = (calls.LeasePages(lease_ref, PageRanges(ids)),)
    guest.call(calls.AttachLeases(worker=worker, wanted=wanted))
    return worker


def test_what_a_dead_fetcher_held_comes_back_after_a_lease(
    make_server: Callable[..., PoolServer], make_client: Callable[[PoolServer, str], PoolClient]
) -> None:
    server = make_server(outside=("127.0.0.1", Access(TOKEN)), lease_ttl_s=1.0)
    producer, guest = make_client(server, "out"), guest_of(server.outside, Access(TOKEN))
    ids = producer.allocate(8)
    [lease_ref] = producer.handoff([("r", ids)])
    attached(guest, "decode-2", lease_ref, ids)
    producer.close()  # its end does not take what the guest holds
    assert server.stat().by_request == {"r": 8}
    wait_until(lambda: server.stat().by_request == {})
    assert server.check() == []
    guest.close()


@pytest.mark.parametrize(
    ("token", "says"), [("another token of tests", "a wrong token"), ("", "a wrong token")]
)
def test_a_wrong_token_is_refused_and_counted(
    make_open: Callable[[Access], PoolServer], token: str, says: str
) -> None:
    server = make_open(Access(TOKEN))
    guest, pages = guest_of(server.outside, Access(token)), PageRanges(np.zeros(1, np.int32))
    with pytest.raises(AccessRefused, match=f"{says}.*network.token_file"):
        guest.call(RegisterWorker(name="w", process=ELSEWHERE))
    with pytest.raises(AccessRefused, match=says):
        guest.call(calls.ReadPages(worker=WorkerId("guest/w"), lease=LeaseId(1), pages=pages))
    assert server.stat().network.refused_calls == 2
    assert server.stat().workers == ()
    guest.close()


def test_without_a_token_there_is_no_answer_but_to_health_probes(
    make_open: Callable[[Access], PoolServer],
) -> None:
    server = make_open(Access(TOKEN))
    with grpc.insecure_channel(str(server.outside)) as channel:
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=5) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(CALL)(pack([StatPool()]), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.details() == "no token was shown"
    assert server.stat().network.refused_calls == 1


def test_certificates_that_fit_let_in_and_others_do_not(
    make_open: Callable[[Access], PoolServer], tmp_path: Path
) -> None:
    ours = Access.of(make_certificates(tmp_path), TOKEN)
    named = replace(ours, tls=replace(ours.tls, server_name="triptych.test"))
    server = make_open(ours)
    for access in (ours, named):
        guest = guest_of(server.outside, access)
        assert guest.call(StatPool()).arena == server.arena
        guest.close()
    theirs = Access.of(make_certificates(tmp_path, "two"), TOKEN)
    misnamed = replace(ours, tls=replace(ours.tls, server_name="somebody.else"))
    for access in (theirs, misnamed):
        guest = guest_of(server.outside, access)
        with pytest.raises(AccessRefused, match="the certificates do not fit"):
            guest.call(StatPool())
        guest.close()


def test_a_client_without_a_certificate_is_not_let_in(
    make_open: Callable[[Access], PoolServer], tmp_path: Path
) -> None:
    ours = Access.of(make_certificates(tmp_path), TOKEN)
    assert ours.tls is not None
    server = make_open(ours)
    plain = guest_of(server.outside, Access(TOKEN))
    with pytest.raises(PoolUnavailable):
        plain.call(StatPool())
    plain.close()
    credentials = grpc.ssl_channel_credentials(ours.tls.authorities)
    with grpc.secure_channel(str(server.outside), credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(CALL)(pack([StatPool()]), timeout=5, metadata=ours.metadata)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_pages_pass_through_tls(
    make_open: Callable[[Access], PoolServer],
    make_server: Callable[..., PoolServer],
    make_client: Callable[[PoolServer, str], PoolClient],
    closing: Callable[..., None],
    tmp_path: Path,
) -> None:
    access = Access.of(make_certificates(tmp_path, tls_server_name="triptych.test"), TOKEN)
    far = make_open(access)
    producer, worker = make_client(far, "out"), make_client(make_server(), "in")
    fetcher = Fetcher(worker, {far.arena: far.outside}.get, access)
    closing(fetcher)
    ids = producer.allocate(3000)
    producer.arena.data[ids] = np.random.default_rng(0).integers(0, 256, (3000, 256), np.uint8)
    [lease_ref] = producer.handoff([("r", ids)])
    _, mine = fetcher.fetch("r", lease_ref, ids)
    assert np.array_equal(worker.arena.data[mine], producer.arena.data[ids])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tls_key_file": "missing.pem"}, "network.tls_key_file.*No such file"),
        ({"tls_key_file": "two-key.pem"}, "network.tls_key_file.*expected the unencrypted key of"),
        ({"tls_ca_file": "garbage.pem"}, "network.tls_ca_file.*expected a file in PEM form"),
        ({"tls_ca_file": "broken.pem"}, "network.tls_ca_file"),
        ({"token_file": "short.token"}, "network.token_file.*openssl rand"),
        ({"token_file": "nothing.token"}, "network.token_file.*a file that this user can read"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path: Path, change: dict[str, str], says: str) -> None:
    good = make_certificates(tmp_path)
    make_certificates(tmp_path, "two")
    (tmp_path / "garbage.pem").write_text("garbage")
    (tmp_path / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nbroken\n")
    (tmp_path / "short.token").write_text("short\n")
    Access.of(good, TOKEN)
    paths = {setting: str(tmp_path / name) for setting, name in change.items()}
    with pytest.raises(ConfigError, match=says):
        Access.of(replace(good, **paths), TOKEN)


def test_the_token_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    access = Access.of(NetworkConfig(token_file=str(tmp_path / "token")), "made for this start")
    assert access.token == TOKEN
    assert TOKEN not in repr(access)


# ------------------------------------------------------------------ bad input


@dataclass
class Answering:
    """What answers other nodes, a worker of its own node with pages, and a guest with four."""

    pool: LockedPool
    answers: Gateway
    local: WorkerId
    guest: WorkerId
    lease: LeaseId

    def ask(self, *questions: object) -> object:
        [said] = unpack(self.answers.answer(pack(questions)))
        return said


@pytest.fixture
def answering() -> Iterator[Answering]:
    arena = Arena.private(64, 256)
    pool = LockedPool(Pool(64, 256, "triptych-0-0123456789abcdef", 10.0), extent_pages=8)

    def ignore(_: object) -> None:
        pass

    sender = PageSender(arena.data, "127.0.0.1", Access(TOKEN), sent=ignore, refused=ignore)
    answers = Gateway(pool, sender)
    local = pool.register("local", this_process(), 0).worker
    pool.call(calls.AllocatePages(worker=local, pages=8, at_least=8))
    ids = pool.call(calls.AllocatePages(worker=local, pages=4, at_least=4)).pages
    commits = (calls.CommitPages("r", ids),)
    made = pool.call(calls.HandOff(worker=local, commits=commits, releases=(), keep=False))
    [lease_ref] = made.lease_refs
    [registered] = unpack(answers.answer(pack([RegisterWorker(name="w", process=this_process())])))
    wanted = (calls.LeasePages(lease_ref, ids),)
    pool.call(calls.AttachLeases(worker=registered.worker, wanted=wanted))
    yield Answering(pool, answers, local, registered.worker, lease_ref.lease)
    sender.close()


def frames_of(guest: WorkerId, lease: LeaseId) -> list[bytes]:
    pages = PageRanges(b"\x08\0\0\0\4\0\0\0")
    wanted = calls.LeasePages(LeaseRef("triptych-0-0123456789abcdef", lease, 2), pages)
    questions = [
        RegisterWorker(name="w", process=this_process()),
        calls.RenewWorker(worker=guest),
        calls.AttachLeases(worker=guest, wanted=(wanted,)),
        calls.ReleaseLeases(worker=guest, leases=(LeaseId(7),), keep=True),
        calls.ReadPages(worker=guest, lease=lease, pages=pages),
        StatPool(),
        calls.CheckPool(),
    ]
    return [pack([question]) for question in questions]


def books_of(pool: LockedPool) -> list[tuple[str, int, int]]:
    return [(w.name, w.extent_pages, w.request_pages) for w in pool.stat().workers]


def mutated(frame: bytes, generator: random.Random) -> bytes:
    """The frame cut short, or with some bytes changed, or both."""
    changed = bytearray(frame)
    if generator.random() < 0.3:
        changed = changed[: generator.randrange(len(changed))]
    for _ in range(generator.randrange(1, 4)):
        if changed:
            changed[generator.randrange(len(changed))] = generator.randrange(256)
    return bytes(changed)


def test_truncated_and_mutated_frames_from_other_nodes_change_nothing(
    answering: Answering,
) -> None:
    generator, pool = random.Random(5), answering.pool
    frames = frames_of(answering.guest, answering.lease)
    books, refused = books_of(pool), 0
    for _ in range(10_000):
        frame = mutated(generator.choice(frames), generator)
        [said] = unpack(answering.answers.answer(frame))
        if isinstance(said, messages.PoolRefused):
            refused += said.error == "MessageError"
            assert books_of(pool) == books
        books = books_of(pool)
    assert pool.check() == []
    assert pool.stat().network.refused_frames == refused > 5_000
    assert ("local", 8, 0) in books


@pytest.mark.parametrize(
    "question",
    [
        lambda w: calls.AllocatePages(worker=w, pages=1, at_least=1),
        lambda w: calls.FreePages(worker=w, pages=PageRanges(b"")),
        lambda w: calls.HandOff(worker=w, commits=(), releases=(), keep=False),
        lambda w: calls.WithdrawAll(worker=w),
        lambda w: calls.InheritFrom(previous_worker="local"),
        lambda w: calls.RegisterWorker(name="w", process=this_process(), checkpoint_bytes=64),
    ],
)
def test_a_guest_can_only_read_and_let_go(
    answering: Answering, question: Callable[[WorkerId], object]
) -> None:
    before = books_of(answering.pool)
    said = answering.ask(question(answering.guest))
    assert isinstance(said, messages.PoolRefused)
    assert said.error == "MessageError"
    assert books_of(answering.pool) == before
    assert answering.pool.stat().network.refused_frames == 1


def test_nobody_of_another_node_speaks_for_a_worker_of_this_one(answering: Answering) -> None:
    local, lease = answering.local, answering.lease
    for question in (
        calls.RenewWorker(worker=local),
        calls.UnregisterWorker(worker=local),
        calls.ReleaseLeases(worker=local, leases=(lease,), keep=False),
        calls.ReadPages(worker=local, lease=lease, pages=PageRanges(b"")),
    ):
        said = answering.ask(question)
        assert isinstance(said, messages.PoolRefused)
        assert "none of another node" in str(said.details)
    assert {line.name for line in answering.pool.stat().workers} == {"local", "guest/w"}
    answering.ask(RegisterWorker(name="local", process=this_process()))
    names = {line.name for line in answering.pool.stat().workers}
    assert names == {"local", "guest/w", "guest/local"}


@pytest.mark.parametrize("pages", [[0], [8, 9, 10, 11, 12], [8, 8], [40]])
def test_pages_that_are_not_of_the_lease_are_not_shown(
    answering: Answering, pages: list[int]
) -> None:
    ranges = PageRanges(np.array(pages, np.int32))
    asked = calls.ReadPages(worker=answering.guest, lease=answering.lease, pages=ranges)
    said = answering.ask(asked)
    assert isinstance(said, messages.PoolRefused)
    assert said.error == "NotHeld"


def test_a_lease_that_ends_while_it_is_sent_shows_nothing() -> None:
    """Its pages may be another request's by then: nobody says that they are good."""
    data = np.zeros((8, 256), np.uint8)
    checks = list[int]()

    def still(_: PageIds) -> None:
        checks.append(1)
        if len(checks) == 2:
            raise StaleHandle(1, "it ended")

    def ignore(_: object) -> None:
        pass

    sender = PageSender(data, "127.0.0.1", Access(TOKEN), sent=ignore, refused=ignore)
    ids = np.arange(8, dtype=np.int32)
    ticket = sender.offer(LeaseId(1), ids, still)
    at = ("127.0.0.1", sender.port)
    with pytest.raises(MessageError, match="nobody says that they are good"):
        list(receive(at, Access(TOKEN), ticket, LeaseId(1), np.ones((8, 256), np.uint8), ids))
    sender.close()
