"""Clients that do not read, probes without end, and too many open requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import httpx
import pytest

from tests.unit.deployments.http.conftest import CONTEXT_TOKENS, MODEL, make_engine
from triptych.core.config import IngressConfig
from triptych.core.errors import Overloaded
from triptych.deployments.http import Health, ModelCard, OpenAIServing, create_app
from triptych.deployments.http.snapshots import Snapshot
from triptych.deployments.http.stream import MAX_UNSENT_BYTES, EventStream

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 500, "stream": True}
SCOPE = {"type": "http", "state": {"request_id": "r"}}


async def never() -> Mapping[str, object]:
    await asyncio.Event().wait()
    return {}


def stream(events: AsyncIterator[bytes], write_timeout_s: float) -> EventStream:
    return EventStream(events, timeout_s=60, write_timeout_s=write_timeout_s)


async def test_a_client_that_reads_nothing_is_closed_and_its_request_cancelled() -> None:
    made, closed = 0, False

    async def events() -> AsyncIterator[bytes]:
        nonlocal made, closed
        try:
            while True:
                made += 1
                yield bytes(10_000)
                await asyncio.sleep(0)
        finally:
            closed = True

    async def send(message: Mapping[str, object]) -> None:
        if message["type"] == "http.response.body":
            await never()

    async with asyncio.timeout(10):
        await stream(events(), 0.2)(SCOPE, never, send)
    assert closed
    # What was on its way when the client stopped, and what may wait.
    assert made * 10_000 < 2 * MAX_UNSENT_BYTES + 20_000


async def test_a_slow_client_gets_every_event_in_order() -> None:
    count, taken = 500, list[bytes]()

    async def events() -> AsyncIterator[bytes]:
        for index in range(count):
            yield b"%08d" % index + bytes(9_992)

    async def send(message: Mapping[str, object]) -> None:
        if body := message.get("body"):
            taken.append(body)
            await asyncio.sleep(0.01)

    await stream(events(), 5)(SCOPE, never, send)
    whole = b"".join(taken)
    assert [int(whole[at : at + 8]) for at in range(0, count * 10_000, 10_000)] == [*range(count)]
    assert whole.endswith(b"data: [DONE]\n\n")
    assert max(map(len, taken)) <= MAX_UNSENT_BYTES + 20_000


async def test_a_snapshot_is_fetched_once_for_all_and_failures_are_not_kept() -> None:
    calls, now = 0, 0.0

    async def source() -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        if calls == 1:
            raise Overloaded("no answer")
        return calls

    snapshot = Snapshot(source, 1.0, lambda: now)
    with pytest.raises(Overloaded):
        await snapshot.get()
    assert set(await asyncio.gather(*(snapshot.get() for _ in range(99)))) == {2}
    now = 0.9
    assert await snapshot.get() == 2
    now = 1.1
    assert await snapshot.get() == 3


class CountedEngine:
    """An engine that counts probes."""

    address = "ingress-0"

    def __init__(self, tokenizer) -> None:
        self.fake = make_engine(tokenizer)
        self.generate = self.fake.generate
        self.probes = 0

    async def health(self) -> Health:
        self.probes += 1
        raise Overloaded("the router does not answer")


async def test_probes_and_metrics_ask_the_router_once_a_second(tokenizer) -> None:
    engine, asked = CountedEngine(tokenizer), 0

    async def gauges() -> Mapping[str, float]:
        nonlocal asked
        asked += 1
        return {}

    async with client(tokenizer, engine, IngressConfig(), gauges=gauges) as http:
        for path in ("/health", "/ready", "/ping") * 20:
            response = await http.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the router does not answer"
            assert response.headers["retry-after"] == "1"
            assert (await http.get("/metrics")).status_code == 200
    assert engine.probes <= 5  # one a second, if the machine is slow
    assert asked <= 5


async def test_requests_beyond_the_open_ones_are_refused_and_probes_are_not(tokenizer) -> None:
    engine = make_engine(tokenizer)
    engine.delay_s = 0.05
    config = IngressConfig(max_open_requests=2)
    async with client(tokenizer, engine, config) as http:
        opened = [asyncio.create_task(http.post(CHAT, json=BODY)) for _ in range(2)]
        while engine.running < 2:  # noqa: ASYNC110  # what is awaited happens in the app
            await asyncio.sleep(0.01)
        refused = await http.post(CHAT, json=BODY)
        assert refused.status_code == 503
        assert "ingress.max_open_requests" in json.loads(refused.text)["error"]["message"]
        assert "retry-after" in refused.headers
        assert (await http.get("/health")).status_code == 200
        for task in opened:
            task.cancel()
        await asyncio.gather(*opened, return_exceptions=True)
        short = {**BODY, "max_tokens": 1, "stream": False}
        assert (await http.post(CHAT, json=short)).status_code == 200


def client(tokenizer, engine, config: IngressConfig, **parts: object) -> httpx.AsyncClient:
    card = ModelCard(name=MODEL, context_tokens=CONTEXT_TOKENS, created=0)
    serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=card, config=config)
    transport = httpx.ASGITransport(app=create_app(serving, **parts))
    return httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30)
