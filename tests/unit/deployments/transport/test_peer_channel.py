"""Messages over real sockets: order, coalescing, refusal, and the death of a real process."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from triptych.core.messages import Cancel, Message
from triptych.deployments.transport.peer_channel import DELIVER, PeerChannel

PEER = """
import asyncio, sys
from triptych.deployments.transport.peer_channel import PeerChannel

async def main():
    def echo(messages, sender):
        for message in messages:
            box.post(sender, message)

    box = PeerChannel(sys.argv[1], echo, lambda address: None)
    await box.start()
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@dataclass
class Box:
    """A mailbox that remembers what happened to it."""

    address: str
    received: list[tuple[Message, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peer_channel = PeerChannel(
            self.address,
            lambda messages, sender: self.received.extend((m, sender) for m in messages),
            self.lost.append,
        )


def named(*names: str) -> Cancel:
    return Cancel(requests=names)


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  # what is awaited happens in another process
            await asyncio.sleep(0.01)


@pytest.fixture
def address(tmp_path: Path) -> Callable[[str], str]:
    return lambda name: f"unix:{tmp_path / name}.sock"


async def test_messages_arrive_in_order_with_their_sender(address: Callable[[str], str]) -> None:
    one, two = Box(address("one")), Box(address("two"))
    await one.peer_channel.start()
    await two.peer_channel.start()
    for i in range(500):
        one.peer_channel.post(two.address, named(str(i)))
    await until(lambda: len(two.received) == 500)
    assert [m.requests[0] for m, _ in two.received] == [str(i) for i in range(500)]
    assert {sender for _, sender in two.received} == {one.address}
    await one.peer_channel.stop()
    await two.peer_channel.stop()


async def test_a_frame_that_is_no_message_is_refused_and_the_box_goes_on(
    address: Callable[[str], str],
) -> None:
    box = Box(address("box"))
    await box.peer_channel.start()
    async with grpc.aio.insecure_channel(box.address) as channel:
        for frame in (b"", b"\x80\x04\x95.", b"\x92\x02\x92\xa6Cancel\x80"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(DELIVER)(frame)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="run one release of Triptych"):
            await channel.unary_unary(DELIVER)(b"\x92\x01\x92\xa6Cancel\x80")
    box.peer_channel.post(box.address, named("still here"))
    assert len(box.received) == 1
    await box.peer_channel.stop()


async def test_a_killed_peer_is_reported_once_and_at_once(address: Callable[[str], str]) -> None:
    box = Box(address("box"))
    await box.peer_channel.start()
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, address("peer"), stdout=subprocess.PIPE
    )
    assert peer.stdout is not None
    await peer.stdout.readline()
    box.peer_channel.watch(address("peer"))
    box.peer_channel.post(address("peer"), named("echo"))
    await until(lambda: len(box.received) == 1)
    peer.send_signal(signal.SIGKILL)
    await peer.wait()
    await until(lambda: bool(box.lost), timeout_s=1.0)
    box.peer_channel.post(address("peer"), named("nobody home"))
    await until(lambda: len(box.lost) == 2)
    assert box.lost == [address("peer")] * 2
    await box.peer_channel.stop()


async def test_a_new_process_at_an_old_address_is_reached(address: Callable[[str], str]) -> None:
    sender, first = Box(address("sender")), Box(address("receiver"))
    await sender.peer_channel.start()
    await first.peer_channel.start()
    sender.peer_channel.watch(first.address)
    await asyncio.sleep(0.1)
    await first.peer_channel.stop()
    await until(lambda: bool(sender.lost))
    second = Box(address("receiver"))
    await second.peer_channel.start()
    sender.peer_channel.post(second.address, named("hello again"))
    await until(lambda: len(second.received) == 1)
    await sender.peer_channel.stop()
    await second.peer_channel.stop()
