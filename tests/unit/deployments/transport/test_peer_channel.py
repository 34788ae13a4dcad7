"""Messages over real sockets: order, coalescing, refusal, and the death of a real process."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from triptych.core.messages import Cancel, Message, pack
from triptych.deployments.transport import peer_channel
from triptych.deployments.transport.peer_channel import (
    DELIVER,
    NUMBER,
    SESSION,
    PeerChannel,
)

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
    undeliverable: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peer_channel = PeerChannel(
            self.address,
            lambda messages, sender: self.received.extend((m, sender) for m in messages),
            self.lost.append,
            undeliverable=lambda message, _: self.undeliverable.append(message),
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


@asynccontextmanager
async def echoing(
    address: Callable[[str], str],
) -> AsyncIterator[tuple[Box, asyncio.subprocess.Process]]:
    """A box, and a process at ``peer`` that has sent its first message back."""
    box = Box(address("box"))
    await box.peer_channel.start()
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, address("peer"), stdout=subprocess.PIPE
    )
    assert peer.stdout is not None
    await peer.stdout.readline()
    box.peer_channel.post(address("peer"), named("first"))
    await until(lambda: len(box.received) == 1)
    try:
        yield box, peer
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()
        await box.peer_channel.stop()


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
    async with echoing(address) as (box, peer):
        box.peer_channel.watch(address("peer"))
        await asyncio.sleep(0.1)
        peer.send_signal(signal.SIGKILL)
        await peer.wait()
        await until(lambda: bool(box.lost), timeout_s=1.0)
        box.peer_channel.post(address("peer"), named("nobody home"))
        await until(lambda: len(box.lost) == 2)
        assert box.lost == [address("peer")] * 2


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
    assert second.received == [(named("hello again"), sender.address)]
    await sender.peer_channel.stop()
    await second.peer_channel.stop()


# ------------------------------------------------------------------ each message once, in order


@pytest.mark.parametrize("stopped_s", [1.0, 3.0])
async def test_a_peer_that_stands_still_gets_each_message_once_and_in_order(
    address: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, stopped_s: float
) -> None:
    """Attempts to deliver a frame time out; some of them may have arrived all the same."""
    monkeypatch.setattr(peer_channel, "DELIVER_TIMEOUT_S", 0.3)
    async with echoing(address) as (box, peer):
        peer.send_signal(signal.SIGSTOP)
        expected = ["first"]
        for number in range(50):
            box.peer_channel.post(address("peer"), named(str(number)))
            expected.append(str(number))
            await asyncio.sleep(stopped_s / 50)
        peer.send_signal(signal.SIGCONT)
        await until(lambda: len(box.received) >= len(expected), timeout_s=30)
        await asyncio.sleep(0.5)
        assert [message.requests[0] for message, _ in box.received] == expected
        assert box.lost == []


async def test_a_frame_that_comes_again_is_not_taken_again_and_a_missing_one_is_noticed(
    address: Callable[[str], str],
) -> None:
    box = Box(address("box"))
    await box.peer_channel.start()
    async with grpc.aio.insecure_channel(box.address) as channel:

        async def deliver(number: int, session: str = "s") -> None:
            metadata = ((SESSION, session), (NUMBER, str(number)))
            await channel.unary_unary(DELIVER)(pack([named(f"{number}")]), metadata=metadata)

        for number in (1, 1, 2, 1, 2):
            await deliver(number)
        await deliver(1, "another")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await deliver(4)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert [message.requests[0] for message, _ in box.received] == ["1", "2", "1"]
    await box.peer_channel.stop()


async def test_a_new_process_at_the_address_does_not_get_the_rest_of_a_conversation(
    address: Callable[[str], str],
) -> None:
    sender, first = Box(address("sender")), Box(address("receiver"))
    await sender.peer_channel.start()
    await first.peer_channel.start()
    sender.peer_channel.post(first.address, named("to the first"))
    await until(lambda: len(first.received) == 1)
    await first.peer_channel.stop()
    second = Box(address("receiver"))
    await second.peer_channel.start()
    sender.peer_channel.post(second.address, named("for the first"))
    await until(lambda: bool(sender.lost))
    assert second.received == []
    await sender.peer_channel.stop()
    await second.peer_channel.stop()


async def test_large_frames_are_split_and_only_a_message_that_is_too_large_fails(
    address: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_channel, "MAX_FRAME_BYTES", 4000)
    monkeypatch.setattr(peer_channel, "SPLIT_BYTES", 1000)
    one, two = Box(address("one")), Box(address("two"))
    await two.peer_channel.start()
    names = [str(number) * 300 for number in range(30)]
    for number, name in enumerate(names):
        one.peer_channel.post(two.address, named(name))
        if number % 10 == 5:
            one.peer_channel.post(two.address, named("x" * 5000))
    await one.peer_channel.start()
    await until(lambda: len(two.received) == 30)
    assert [message.requests[0] for message, _ in two.received] == names
    assert one.undeliverable == [named("x" * 5000)] * 3
    assert one.lost == []
    await one.peer_channel.stop()
    await two.peer_channel.stop()


async def test_one_message_that_is_refused_does_not_take_others_with_it(
    address: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Box(address("one")), Box(address("two"))
    await two.peer_channel.start()
    real = peer_channel.pack

    def spoilt(messages: list[Message]) -> bytes:
        """A fault of the encoder for one message."""
        frame = real(messages)
        return frame[:-1] if named("bad") in messages else frame

    monkeypatch.setattr(peer_channel, "pack", spoilt)
    for name in ("a", "b", "bad", "c"):
        one.peer_channel.post(two.address, named(name))
    await one.peer_channel.start()
    await until(lambda: len(two.received) == 3)
    assert [message.requests[0] for message, _ in two.received] == ["a", "b", "c"]
    assert one.undeliverable == [named("bad")]
    await one.peer_channel.stop()
    await two.peer_channel.stop()


async def test_an_error_in_a_receiver_does_not_repeat_or_stop_anything(
    address: Callable[[str], str],
) -> None:
    one, two = Box(address("one")), Box(address("two"))
    received = list[str]()

    def receive(messages: Sequence[Message], _: str) -> None:
        received.extend(message.requests[0] for message in messages)
        if "bad" in received[-len(messages) :]:
            raise ValueError("a fault")

    two.peer_channel = PeerChannel(two.address, receive, two.lost.append)
    await one.peer_channel.start()
    await two.peer_channel.start()
    for name in ("a", "bad", "c"):
        one.peer_channel.post(two.address, named(name))
        await until(lambda name=name: name in received)
    await asyncio.sleep(0.3)
    assert received == ["a", "bad", "c"]
    assert one.lost == []
    await one.peer_channel.stop()
    await two.peer_channel.stop()


async def test_what_waits_for_a_peer_that_stands_still_has_a_bound(
    address: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_channel, "MAX_WAITING", 100)
    async with echoing(address) as (box, peer):
        peer.send_signal(signal.SIGSTOP)
        for number in range(150):
            box.peer_channel.post(address("peer"), named(str(number)))
            await asyncio.sleep(0)
        assert box.lost == [address("peer")]
