"""Frames over a socket of one node: splitting, refusals, broken connections and credentials."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from struct import Struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.messages import MAX_FRAME_BYTES
from triptych.deployments.transport.addressing import LOCAL
from triptych.deployments.transport.frame_socket import (
    FrameListener,
    FrameSender,
    OutOfOrder,
    _Connection,
    frame_socket,
)
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.kvpool import Access

HEADER = Struct("!QI")
Taken = list[tuple[bytes, str, str, int]]


@asynccontextmanager
async def listening(
    path: Path, taken: Taken, refusal: str = "", access: Access | None = None
) -> AsyncGenerator[FrameListener]:
    def take(frame: bytes, sender: str, session: str, number: int) -> str:
        taken.append((frame, sender, session, number))
        if frame == b"early":
            raise OutOfOrder("a frame is missing")
        return refusal if frame == b"bad" else ""

    listener = FrameListener(take, lambda shown: access.refusal(shown) if access else "")
    await listener.start(path)
    try:
        yield listener
    finally:
        listener.stop()


@given(
    parts=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=50)), max_size=8),
    cuts=st.lists(st.integers(1, 40), max_size=40),
)
def test_parts_are_the_same_however_the_bytes_are_cut(
    parts: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(HEADER.pack(number, len(content)) + content for number, content in parts)
    connection, found = _Connection(), list[tuple[int, bytes]]()
    for cut in cuts:
        found += connection.parts(data[:cut])
        data = data[cut:]
    found += connection.parts(data)
    assert found == parts


async def test_frames_arrive_with_their_sender_and_refusals_come_back(tmp_path: Path) -> None:
    taken, path = Taken(), tmp_path / "x.frames"
    async with listening(path, taken, "no message"):
        with closing(FrameSender(path, "unix:/me", "s", ())) as sender:
            assert await sender.deliver(b"x" * 3_000_000, 1) == ""
            assert await sender.deliver(b"bad", 2) == "no message"
            assert await sender.deliver(b"", 2) == ""
            with pytest.raises(OutOfOrder, match="a frame is missing"):
                await sender.deliver(b"early", 9)
    assert [(len(frame), *rest) for frame, *rest in taken] == [
        (3_000_000, "unix:/me", "s", 1),
        (3, "unix:/me", "s", 2),
        (0, "unix:/me", "s", 2),
        (5, "unix:/me", "s", 9),
    ]


async def test_a_frame_without_an_answer_is_sent_again_over_a_new_connection(
    tmp_path: Path,
) -> None:
    taken, path = Taken(), tmp_path / "x.frames"
    with closing(FrameSender(path, "me", "s", ())) as sender:
        async with listening(path, taken) as listener:
            assert await sender.deliver(b"one", 1) == ""
            pending = asyncio.create_task(sender.deliver(b"two", 2))
            listener.stop()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(pending, 5)
        async with listening(path, taken):
            assert await sender.deliver(b"two", 2) == ""
        with pytest.raises(ConnectionResetError):
            await sender.deliver(b"three", 3)
        with pytest.raises(ConnectionRefusedError):
            await sender.deliver(b"three", 3)
    assert [frame for frame, *_ in taken] == [b"one", b"two"]


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(0, MAX_FRAME_BYTES + 1),
        HEADER.pack(1, 3) + b"abc",
        HEADER.pack(0, 3) + b"abc",
        HEADER.pack(0, 4) + b"\x93\x01\x02\x03",  # [1, 2, 3]
    ],
)
async def test_what_is_no_greeting_closes_the_connection(tmp_path: Path, data: bytes) -> None:
    taken, path = Taken(), tmp_path / "x.frames"
    async with listening(path, taken):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(data)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert taken == []


async def test_credentials_are_asked_for(tmp_path: Path) -> None:
    taken, path = Taken(), tmp_path / "x.frames"
    ours, theirs = Access("a token of the tests"), Access("another token of tests")
    async with listening(path, taken, access=ours):
        for shown in ((), theirs.metadata):
            sender = FrameSender(path, "me", "s", shown)
            with closing(sender), pytest.raises(OutOfOrder, match="token"):
                await sender.deliver(b"x", 1)
        with closing(FrameSender(path, "me", "s", ours.metadata)) as sender:
            assert await sender.deliver(b"x", 1) == ""
    assert [frame for frame, *_ in taken] == [b"x"]


async def test_a_channel_listens_beside_its_grpc_socket(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/one.sock"
    assert (await LOCAL.find(address)).frames is None
    channel = PeerChannel(address, lambda _messages, _sender: None, lambda _: None)
    await channel.start()
    assert (await LOCAL.find(address)).frames == frame_socket(address)
    await channel.stop()
