"""Messages between mailboxes of different nodes: over TCP, with token and certificates."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.unit.kvpool.certificates import make_certificates
from triptych.core.messages import Cancel, Message, pack, unpack
from triptych.deployments.transport.addressing import Endpoint, Network
from triptych.deployments.transport.peer_channel import DELIVER, OPTIONS, PeerChannel
from triptych.kvpool import Access, PoolAddress

ACCESS = Access("a token of the tests")


class FakeDirectory:
    """One that all nodes of a test see."""

    def __init__(self) -> None:
        self.values = dict[str, bytes]()
        self.dead = set[str]()
        """Nodes that are no more, though what they have put is there."""

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def remove(self, key: str) -> None:
        self.values.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def nodes(self) -> set[str]:
        endpoints = [unpack(value)[0] for value in self.values.values()]
        return {
            endpoint.node for endpoint in endpoints if isinstance(endpoint, Endpoint)
        } - self.dead


@dataclass
class Box:
    """A mailbox that remembers what happened to it."""

    name: str
    network: Network
    received: list[tuple[Message, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peer_channel = PeerChannel(self.name, self._receive, self.lost.append, self.network)

    def _receive(self, messages: list[Message], sender: str) -> None:
        self.received += [(message, sender) for message in messages]

    @property
    def endpoint(self) -> Endpoint:
        endpoint = self.network._endpoint(f"mailbox/{self.name}")
        assert endpoint is not None
        return endpoint


Make = Callable[..., Box]


@pytest.fixture
def directory() -> FakeDirectory:
    return FakeDirectory()


@pytest.fixture
def box(directory: FakeDirectory, tmp_path: Path) -> Make:
    """Makes mailboxes on nodes of one directory."""

    def make(name: str, node: str, access: Access = ACCESS) -> Box:
        return Box(name, Network(node, "127.0.0.1", tmp_path / node, directory, access))

    return make


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def named(name: str) -> Cancel:
    return Cancel(requests=(name,))


async def test_messages_pass_between_nodes_and_on_a_node(box: Make) -> None:
    one, near, far = box("one", "a"), box("near", "a"), box("far", "b")
    for some in (one, near, far):
        await some.peer_channel.start()
    for i in range(100):
        one.peer_channel.post("far", named(str(i)))
        one.peer_channel.post("near", named(str(i)))
    await until(lambda: len(far.received) == len(near.received) == 100)
    assert [m.requests[0] for m, _ in far.received] == [str(i) for i in range(100)]
    assert {sender for _, sender in far.received} == {"one"}
    assert (await one.network.find("near")).target.startswith("unix:")
    assert (await one.network.find("far")).target == f"127.0.0.1:{far.endpoint.port}"
    for some in (one, near, far):
        await some.peer_channel.stop()
    assert one.network.directory.keys("") == []


async def test_a_peer_that_ends_is_lost_and_a_new_one_of_its_name_is_found(box: Make) -> None:
    one, far = box("one", "a"), box("router", "b")
    await one.peer_channel.start()
    await far.peer_channel.start()
    found = list[int]()
    one.peer_channel.watch("router", found=lambda: found.append(1))
    await until(lambda: bool(found))
    await far.peer_channel.stop()
    await until(lambda: one.lost == ["router"])
    again = box("router", "c")
    await again.peer_channel.start()
    one.peer_channel.post("router", named("hello"))
    await until(lambda: len(again.received) == 1)
    await one.peer_channel.stop()
    await again.peer_channel.stop()


@pytest.mark.parametrize(
    "name",
    ["nobody", "", "../one", "127.0.0.1:9", "unix:/tmp/x", "dns:///example.org:80", "a" * 65],
)
async def test_what_a_message_says_is_never_connected_to(box: Make, name: str) -> None:
    one = box("one", "a")
    await one.peer_channel.start()
    one.peer_channel.post(name, named("x"))
    await until(lambda: one.lost == [name])
    one.peer_channel.watch(name)
    await until(lambda: one.lost == [name] * 2)
    await one.peer_channel.stop()


async def test_a_wrong_or_no_token_is_refused_and_counted(box: Make) -> None:
    one = box("one", "a")
    stranger = box("stranger", "b", Access("another token of tests"))
    await one.peer_channel.start()
    await stranger.peer_channel.start()
    stranger.peer_channel.post("one", named("x"))
    await until(lambda: stranger.lost == ["one"])
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{one.endpoint.port}", options=OPTIONS
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(DELIVER)(pack([named("x")]))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert one.received == []
    assert one.peer_channel.refused == 2
    await one.peer_channel.stop()
    await stranger.peer_channel.stop()


async def test_truncated_and_mutated_frames_over_tcp_are_refused_and_counted(box: Make) -> None:
    one, frame = box("one", "a"), pack([named("x")])
    await one.peer_channel.start()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{one.endpoint.port}", options=OPTIONS
    ) as channel:
        deliver = channel.unary_unary(DELIVER)
        for bad in (b"", frame[:-1], b"\x80\x04\x95.", frame.replace(b"Cancel", b"Cancem")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await deliver(bad, metadata=ACCESS.metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await deliver(frame, metadata=ACCESS.metadata)
    assert len(one.received) == 1
    assert one.peer_channel.refused == 4
    await one.peer_channel.stop()


async def test_certificates_are_asked_for_on_both_sides(box: Make, tmp_path: Path) -> None:
    ours = Access.of(make_certificates(tmp_path), ACCESS.token)
    theirs = Access.of(make_certificates(tmp_path, "two"), ACCESS.token)
    one, friend = box("one", "a", ours), box("friend", "b", ours)
    stranger, plain = box("stranger", "c", theirs), box("plain", "d")
    for some in (one, friend, stranger, plain):
        await some.peer_channel.start()
    for some in (friend, stranger, plain):
        some.peer_channel.post("one", named(some.name))
    await until(lambda: bool(one.received and stranger.lost and plain.lost))
    assert [sender for _, sender in one.received] == ["friend"]
    for some in (one, friend, stranger, plain):
        await some.peer_channel.stop()


def test_pools_are_found_by_arena_and_a_new_one_replaces_that_of_its_node(
    directory: FakeDirectory, tmp_path: Path
) -> None:
    one = Network("a", "10.0.0.1", tmp_path, directory, ACCESS)
    two = replace(one, node="b", host="fd00::2")
    one.announce_pool("arena-1", PoolAddress("10.0.0.1", 1, 2))
    two.announce_pool("arena-2", PoolAddress("fd00::2", 3, 4))
    assert one.find_pool("arena-2") == PoolAddress("fd00::2", 3, 4)
    assert str(one.find_pool("arena-2")) == "[fd00::2]:3"
    one.announce_pool("arena-3", PoolAddress("10.0.0.1", 5, 6))
    assert set(two.pools()) == {"arena-2", "arena-3"}
    one.forget_pool()
    assert two.find_pool("arena-3") is None
    directory.dead.add("b")
    assert one.pools() == {}
