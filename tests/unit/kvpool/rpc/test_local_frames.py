"""Calls over a Unix socket: threads, failures, restarts and answers that do not come."""

import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.core.errors import MessageError, PoolError, PoolUnavailable
from triptych.kvpool.rpc.channel import FrameChannel, FrameServer
from triptych.kvpool.rpc.local_frames import CallChannel, CallServer, call_socket

LIMIT = 1000


def answer(frame: bytes) -> bytes:
    if frame == b"fail":
        raise RuntimeError("a fault")
    return b"\0" * (LIMIT + 1) if frame == b"long" else frame[::-1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.calls"


@pytest.fixture
def server(path: Path) -> Iterator[CallServer]:
    server = CallServer(answer, path, LIMIT)
    yield server
    server.stop()


@pytest.fixture
def channel(path: Path) -> Iterator[CallChannel]:
    channel = CallChannel(path, "the pool", LIMIT)
    yield channel
    channel.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(frames=st.lists(st.binary(max_size=LIMIT), min_size=1, max_size=20))
def test_each_thread_gets_the_answers_to_its_own_frames(
    server: CallServer, channel: CallChannel, frames: list[bytes]
) -> None:
    del server
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda frame: channel.ask(frame, 5.0), frames))
    assert answers == [frame[::-1] for frame in frames]


def test_a_failure_is_told_and_the_server_goes_on(server: CallServer, channel: CallChannel) -> None:
    del server
    with pytest.raises(PoolError, match="RuntimeError: a fault"):
        channel.ask(b"fail", 5.0)
    with pytest.raises(MessageError, match="limit"):
        channel.ask(b"long", 5.0)
    with pytest.raises(PoolUnavailable):
        channel.ask(b"x" * (LIMIT + 1), 5.0)
    assert channel.ask(b"abc", 5.0) == b"cba"


def test_the_next_server_at_the_path_is_found(path: Path, channel: CallChannel) -> None:
    assert channel.ask(b"abc", 5.0) is None
    for _ in range(2):
        server = CallServer(answer, path, LIMIT)
        assert channel.ask(b"abc", 5.0) == b"cba"
        server.stop()
        assert channel.ask(b"abc", 5.0) is None


def test_stop_waits_for_the_answer_under_way(path: Path, channel: CallChannel) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(frame: bytes) -> bytes:
        begun.set()
        assert go_on.wait(5.0)
        return frame

    server = CallServer(slow, path, LIMIT)
    with ThreadPoolExecutor(2) as threads:
        pending = threads.submit(channel.ask, b"abc", 5.0)
        assert begun.wait(5.0)
        stopped = threads.submit(server.stop)
        go_on.set()
        assert pending.result() == b"abc"
        stopped.result()


def test_a_server_that_does_not_answer_in_time_is_unavailable(
    path: Path, channel: CallChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(PoolUnavailable, match="does not answer"):
            channel.ask(b"abc", 0.1)


def test_a_server_that_had_too_many_open_files_answers_later(
    server: CallServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    del server
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no new ones
        try:
            client.connect(str(path))
            until = time.monotonic() + 5.0
            while not any("not accepted" in line for line in caplog.messages):
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(b"\0\0\0\3abc")
        assert client.recv(100) == b"\0\0\0\3\0cba"


def test_a_closed_channel_is_unavailable(server: CallServer, channel: CallChannel) -> None:
    del server
    channel.ask(b"abc", 5.0)
    channel.close()
    with pytest.raises(PoolUnavailable, match="closed"):
        channel.ask(b"abc", 5.0)


def test_a_server_without_the_socket_is_called_over_grpc(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/pool.sock"
    server = FrameServer(lambda frame: frame[::-1], address)
    found = call_socket(address)
    assert found is not None
    channel = FrameChannel(address)
    assert channel.ask(b"abc", 5.0) == b"cba"
    found.unlink()
    other = FrameChannel(address)
    assert other.ask(b"abc", 5.0) == b"cba"
    for one in (channel, other):
        one.close()
    server.stop()
    assert call_socket("127.0.0.1:80") is None


def test_connections_beyond_the_limit_wait_until_one_closes(path: Path) -> None:
    server = CallServer(answer, path, LIMIT, most=2)
    channels = [CallChannel(path, "the pool", LIMIT) for _ in range(3)]
    try:
        for channel in channels[:2]:
            assert channel.ask(b"ab", 5.0) == b"ba"
        with pytest.raises(PoolUnavailable, match="timed out"):
            channels[2].ask(b"ab", 0.1)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(channels[2].ask, b"cd", 5.0)
            channels[0].close()
            assert waiting.result() == b"dc"
    finally:
        for channel in channels:
            channel.close()
        server.stop()
