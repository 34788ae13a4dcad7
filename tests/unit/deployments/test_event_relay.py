"""Streams whose events go past Ray Serve: order, bounds, deaths, and other nodes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from triptych.deployments.http.stream import EventStream
from triptych.deployments.proxy_errors import ProxyErrorMiddleware
from triptych.deployments.proxy_relay import EventRelayMiddleware
from triptych.deployments.transport.event_relay import OFFER, WINDOW_BYTES, EventRelay

DONE = b"data: [DONE]\n\n"
OFFERED = (OFFER.encode(), b"1")


class Serve:
    """Ray Serve between proxy and ingress: it carries messages, and counts those with a body."""

    def __init__(
        self, relay: EventRelay, events: Callable[[], AsyncGenerator[bytes, None]]
    ) -> None:
        self._relay, self._events = relay, events
        self.bodies = 0
        self.offers = list[bool]()
        self.stream: EventStream | None = None
        self.last = asyncio.Event()
        """Unset it to hold the last message back."""
        self.last.set()
        self.delay_s = 0.0
        self.write_timeout_s = 5.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.offers.append(OFFERED in scope["headers"])
        self.stream = EventStream(
            self._events(),
            timeout_s=30,
            write_timeout_s=self.write_timeout_s,
            relay=self._relay if OFFERED in scope["headers"] else None,
        )

        async def send_late(message: Any) -> None:
            self.bodies += bool(message.get("body"))
            await asyncio.sleep(self.delay_s)
            if not message.get("more_body", True):
                await self.last.wait()
            await send(message)

        inner = {**scope, "state": {"request_id": "r"}}
        await self.stream(inner, receive, send_late)


class HttpClient:
    """What a client of the proxy receives."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.body = b""
        self.is_complete = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()

    async def send(self, message: Mapping[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.head = dict(message)
            return
        self.body += message.get("body", b"")
        self.is_complete = not message.get("more_body", False)

    async def receive(self) -> Mapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[EventRelay]:
    relay = EventRelay(path)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[EventRelay]:
    async with listening(tmp_path / "events.sock") as relay:
        yield relay


def letters(count: int, pause_s: float = 0.002, size: int = 10) -> Any:
    async def events() -> AsyncGenerator[bytes, None]:
        for index in range(count):
            yield b"%06d" % index + b"." * (size - 6)
            await asyncio.sleep(pause_s)

    return events


def numbers(body: bytes, size: int = 10) -> list[int]:
    text = body.removesuffix(DONE)
    return [int(text[at : at + 6]) for at in range(0, len(text), size)]


def proxy_of(serve: Serve) -> ProxyErrorMiddleware:
    return ProxyErrorMiddleware(EventRelayMiddleware(serve))


async def get(
    proxy: Any, client: HttpClient, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> HttpClient:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [*headers]}
    async with asyncio.timeout(20):
        await proxy(scope, client.receive, client.send)
    return client


async def test_events_take_the_socket_and_arrive_in_order(relay: EventRelay) -> None:
    serve = Serve(relay, letters(200))
    client = await get(proxy_of(serve), HttpClient())
    assert numbers(client.body) == [*range(200)]
    assert client.body.endswith(DONE)
    assert client.is_complete
    assert serve.bodies < 20, "the first events alone are on Ray Serve's path"
    assert OFFER.encode() not in dict(client.head["headers"])


async def test_a_slow_path_of_ray_serve_is_not_overtaken(relay: EventRelay) -> None:
    serve = Serve(relay, letters(100))
    serve.delay_s = 0.05
    client = await get(proxy_of(serve), HttpClient())
    assert numbers(client.body) == [*range(100)]
    assert client.is_complete


async def test_many_streams_share_one_connection(relay: EventRelay) -> None:
    serve = Serve(relay, letters(50))
    proxy = proxy_of(serve)
    clients = await asyncio.gather(*(get(proxy, HttpClient()) for _ in range(40)))
    assert all(numbers(client.body) == [*range(50)] for client in clients)
    assert len(relay._connections) == 1
    assert not relay._outlets


async def test_a_client_cannot_offer_by_itself(relay: EventRelay) -> None:
    serve = Serve(relay, letters(3))
    forged = (OFFER.encode(), b"/etc/passwd:1")
    await get(proxy_of(serve), HttpClient(), (forged,))
    assert serve.offers == [True]


async def test_without_a_socket_all_events_take_ray_serves_path(tmp_path: Path) -> None:
    relay = EventRelay(tmp_path / "elsewhere.sock")  # on another node: nobody listens here
    serve = Serve(relay, letters(50))
    client = await get(proxy_of(serve), HttpClient())
    assert numbers(client.body) == [*range(50)]
    assert client.is_complete


async def test_without_the_middleware_nothing_is_offered(relay: EventRelay) -> None:
    serve = Serve(relay, letters(20))
    client = await get(ProxyErrorMiddleware(serve), HttpClient())
    assert serve.offers == [False]
    assert numbers(client.body) == [*range(20)]


async def test_a_slow_client_holds_little_and_gets_everything(relay: EventRelay) -> None:
    made, size, count = 0, 10_000, 300

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal made
        for index in range(count):
            made += 1
            yield b"%06d" % index + b"." * (size - 6)
            await asyncio.sleep(0 if index > 5 else 0.05)

    serve, client = Serve(relay, events), HttpClient()
    running = asyncio.create_task(get(proxy_of(serve), client))
    while made < 5:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client.reads.clear()
    await asyncio.sleep(0.5)
    assert made * size < WINDOW_BYTES + (1 << 20) + 12 * size
    client.reads.set()
    await running
    assert numbers(client.body, size) == [*range(count)]
    assert client.is_complete


async def test_a_client_that_reads_nothing_is_given_up(relay: EventRelay) -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(10_000)
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    serve, client = Serve(relay, events), HttpClient()
    serve.write_timeout_s = 0.3
    running = asyncio.create_task(get(proxy_of(serve), client))
    while len(client.body) < 50_000:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client.reads.clear()
    async with asyncio.timeout(5):
        await closed.wait()
    client.reads.set()
    await running
    assert b"worker_lost" in client.body


async def test_when_the_client_leaves_the_work_stops(relay: EventRelay) -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"000000...."
                await asyncio.sleep(0.005)
        finally:
            closed.set()

    serve, client = Serve(relay, events), HttpClient()
    running = asyncio.create_task(get(proxy_of(serve), client))
    while len(client.body) < 100:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client.left.set()
    async with asyncio.timeout(5):
        await closed.wait()
    await running
    assert not relay._outlets


async def test_a_stream_whose_ingress_dies_ends_with_an_error_event(tmp_path: Path) -> None:
    async with listening(tmp_path / "events.sock") as relay:
        serve, client = Serve(relay, letters(10_000, 0.005)), HttpClient()
        running = asyncio.create_task(get(proxy_of(serve), client))
        while len(client.body) < 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await running
    assert b'"code":"worker_lost"' in client.body
    assert client.body.endswith(DONE)
    assert client.is_complete


async def test_the_next_ingress_at_a_path_gets_a_connection_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    serves = list[Serve]()

    async def one(scope: Any, receive: Any, send: Any) -> None:
        await serves[-1](scope, receive, send)

    proxy = EventRelayMiddleware(one)
    for _ in range(2):
        async with listening(path) as relay:
            serves.append(Serve(relay, letters(100)))
            client = await get(proxy, HttpClient())
            assert numbers(client.body) == [*range(100)]
            assert serves[-1].bodies < 20
        await asyncio.sleep(0.05)


async def test_what_was_sent_before_the_socket_closed_arrives(tmp_path: Path) -> None:
    """The last message of Ray Serve's path comes after the ingress has closed its socket."""
    async with listening(tmp_path / "events.sock") as relay:
        serve, client = Serve(relay, letters(50)), HttpClient()
        serve.last.clear()
        running = asyncio.create_task(get(proxy_of(serve), client))
        while b"000048" not in client.body:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        client.reads.clear()
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.05)
    serve.last.set()
    client.reads.set()
    await running
    assert numbers(client.body) == [*range(50)]
    assert client.is_complete


@pytest.mark.parametrize("data", [b"\xc1", b"\x05", bytes([0xC6]) + bytes(4) + b"\xdd\xff"])
async def test_a_proxy_that_sends_what_is_no_message_is_closed(
    relay: EventRelay, tmp_path: Path, data: bytes
) -> None:
    reader, writer = await asyncio.open_unix_connection(tmp_path / "events.sock")
    writer.write(data + bytes(1 << 17))
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    assert numbers((await get(proxy_of(Serve(relay, letters(9))), HttpClient())).body) == [
        *range(9)
    ]


async def test_a_silent_stream_gets_comments_through_the_socket(relay: EventRelay) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for pause_s in (0.1, 0.1, 0.5):
            yield b"data: 1\n\n"
            await asyncio.sleep(pause_s)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream = EventStream(
            events(), timeout_s=30, write_timeout_s=5, keep_alive_s=0.2, relay=relay
        )
        await stream({**scope, "state": {"request_id": "r"}}, receive, send)

    client = await get(EventRelayMiddleware(app), HttpClient())
    told, _, rest = client.body.partition(b": keep-alive\n\n")
    assert told == b"data: 1\n\n" * 3
    assert set(rest.removesuffix(DONE).split(b"\n\n")) <= {b"", b": keep-alive"}
