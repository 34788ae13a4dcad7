"""No body holds the event loop for long, whatever is in it."""

import asyncio
import gc
import json
import random
import time
from collections.abc import AsyncIterator, Container, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.unit.deployments.http.conftest import MODEL, make_engine
from triptych.core.config import IngressConfig
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.workers.models.tokenizer import from_json, to_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20
CPU_S = 0.3
"""Most CPU time of the loop's thread between two turns; 50 ms on a quiet machine."""
WALL_S = 1.5
"""Most time between two turns, without the time that the thread waited for a core."""


@dataclass
class Gaps:
    """The longest times between two turns of the event loop."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


def unhindered_s() -> float:
    """A clock of this thread that stands still while it waits for a core."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


@asynccontextmanager
async def measured() -> AsyncIterator[Gaps]:
    gaps = Gaps()

    async def tick() -> None:
        cpu, wall = time.thread_time(), unhindered_s()
        while True:
            await asyncio.sleep(0)
            now_cpu, now_wall = time.thread_time(), unhindered_s()
            gaps.cpu_s = max(gaps.cpu_s, now_cpu - cpu)
            gaps.wall_s = max(gaps.wall_s, now_wall - wall)
            cpu, wall = now_cpu, now_wall
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.005)
    yield gaps
    await asyncio.sleep(0.005)
    ticking.cancel()


def chat(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def completion(prompt: object = "a", **fields: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 1, **fields}


def called(arguments: str) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    return {"messages": [message, {"role": "user", "content": "a"}], "max_tokens": 1}


def random_value(rng: random.Random, depth: int = 0) -> object:
    match rng.randrange(7 if depth < 6 else 5):
        case 0:
            return rng.randrange(-(10**9), 10**9)
        case 1:
            return rng.choice(["", ",", "[" * 9, '"', "\\" * 7, "<|im_end|>", "text"])
        case 2:
            return rng.random()
        case 3:
            return rng.choice([None, True, False])
        case 4:
            return [rng.randrange(9)] * rng.randrange(99)
        case 5:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(9))]
        case _:
            keys = [str(rng.random()) for _ in range(rng.randrange(9))]
            return {key: random_value(rng, depth + 1) for key in keys}


def random_body(seed: int) -> dict[str, object]:
    """Two MiB of a field's items, of random types."""
    rng = random.Random(seed)
    items, size = list[object](), 0
    while size < 2 * MIB:
        items.append(random_value(rng))
        size += len(json.dumps(items[-1]))
    field = rng.choice(["messages", "content", "tools", "stop", "prompt", "tool_calls", "choices"])
    if field in {"content", "tool_calls"}:
        return {"messages": [{"role": "assistant", "content": "a", field: items}]}
    return {**chat("a"), "prompt": "a", field: items}


LISTS = b"[" + b"[]," * (MIB + MIB // 4) + b"[]]"
KEYS = b"{" + b",".join(b'"%d":1' % i for i in range(380_000)) + b"}"
NUMBERS = b"[" + b",".join([b"9" * 4299] * 900) + b"]"
ESCAPES = b'"' + b'\\\\,\\",' * (MIB // 2) + b'"'
BIAS = {str(i): 1.0 for i in range(300)}
RAW = {
    "lists": LISTS,
    "lists as text": json.dumps(LISTS.decode()[: 3 * MIB]).encode(),
    "keys": KEYS,
    "numbers": NUMBERS,
    "escapes": ESCAPES,
}
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "wrongly typed parts": (CHAT, chat([1] * 700_000)),
    "empty parts": (CHAT, chat([{}] * 190_000)),
    "wrongly typed messages": (CHAT, {"messages": [1] * 199_000}),
    "many messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 2048}),
    "many parts": (CHAT, chat([{"type": "text", "text": "a"}] * 2048)),
    "many roles": (CHAT, {"messages": [{"role": "x"}] * 2048}),
    "tools": (CHAT, chat("a", tools=[1] * 190_000)),
    "functions": (CHAT, chat("a", functions=[1] * 190_000)),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1] * 190_000}]}),
    "arguments": (CHAT, called(LISTS.decode()[: 3 * MIB])),
    "arguments within the limit": (CHAT, called(json.dumps({"a": [[]] * 90_000}))),
    "a schema as text": (CHAT, chat("a", guided_json=LISTS.decode()[: 3 * MIB])),
    "choices": (CHAT, chat("a", guided_choice=["a"] * 190_000)),
    "stops": (COMPLETIONS, completion(stop=["a"] * 100_000)),
    "stop ids": (COMPLETIONS, completion(stop_token_ids=[1] * 190_000)),
    "prompts": (COMPLETIONS, completion(["a b c " * 300] * 1024)),
    "64 prompts": (COMPLETIONS, completion(["a b c " * 2000] * 64)),
    "choices of prompts": (COMPLETIONS, completion(["a"] * 1024, n=8)),
    "token ids": (COMPLETIONS, completion([5] * 1_500_000)),
    "wrong token ids": (COMPLETIONS, completion([-1] * 190_000)),
    "lists of token ids": (COMPLETIONS, completion([[5]] * 190_000)),
    "bias": (COMPLETIONS, completion(["a"] * 8, n=8, logit_bias=BIAS)),
    "wrong bias": (COMPLETIONS, completion(logit_bias={str(i): "x" for i in range(32_000)})),
    "a long prompt": (COMPLETIONS, completion("the user " * (MIB // 9))),
    "a long message": (CHAT, chat("the user " * (MIB // 9))),
    "a long word": (COMPLETIONS, completion("a" * MIB)),
    "names of special tokens": (CHAT, chat("<|im_end|>" * 80_000)),
    "a long text to count": ("/tokenize", {"prompt": "the user " * (MIB // 9)}),
    "ids to decode": ("/detokenize", {"tokens": [5] * 190_000}),
}


SHORT, LONG = 20_000, 120_000
"""Tokens of context: of a long prompt, more is read."""
OF_PROMPTS = {
    *("prompts", "64 prompts", "token ids", "a long prompt", "a long message", "a long word"),
    *("names of special tokens", "a long text to count", "ids to decode"),
}
"""Bodies that both contexts are tried with."""


def each(name: str, values: Iterable[object], both: Container[object] = ()) -> pytest.MarkDecorator:
    """Parametrize by a context and a value; ``make conformance`` runs the pairs left out here."""
    pairs = [
        pytest.param(
            context,
            value,
            marks=[] if value in both or context == (SHORT, LONG)[at % 2] else CONFORMANCE,
        )
        for at, value in enumerate(values)
        for context in (SHORT, LONG)
    ]
    return pytest.mark.parametrize(("client", name), pairs, indirect=["client"])


CONFORMANCE = [pytest.mark.conformance]


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """As in a replica: what the tests imported is not part of each full collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def client(request, tokenizer) -> httpx.AsyncClient:
    """The app of a model with a short or a long context."""
    fast = from_json(to_json(tokenizer))
    serving = OpenAIServing(
        engine=make_engine(tokenizer),
        tokenizer=fast,
        model=ModelCard(name=MODEL, context_tokens=request.param, created=0),
        config=IngressConfig(max_choices=8),
    )
    transport = httpx.ASGITransport(app=create_app(serving))
    return httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60)


async def send(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[Gaps, httpx.Response]:
    async with client:
        await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        async with measured() as gaps:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=body, headers=headers)
    return gaps, response


def check(gaps: Gaps, response: httpx.Response) -> None:
    assert response.status_code in {200, 400, 413}, response.text
    assert len(response.content) < 1 << 20 or response.status_code == 200
    assert gaps.cpu_s < CPU_S
    assert gaps.wall_s < WALL_S


@each("name", BODIES, OF_PROMPTS)
async def test_no_body_holds_the_loop(client, name):
    path, body = BODIES[name]
    check(*await send(client, path, json.dumps({"model": MODEL, **body}).encode()))


@each("seed", range(8))
async def test_no_random_body_holds_the_loop(client, seed):
    body = json.dumps(random_body(seed)).encode()
    check(*await send(client, CHAT if seed % 2 else COMPLETIONS, body))


@each("name", RAW)
async def test_no_json_holds_the_loop(client, name):
    check(*await send(client, CHAT, b'{"messages":[{"role":"user","content":%b}]}' % RAW[name]))
