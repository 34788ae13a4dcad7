"""CPU time of the ingress and of Ray Serve's proxy for each streamed token, on a running server.

    python benchmarks/serving/streams.py --json benchmarks/results/streams.json

The workers compute nothing (``stream_worker.py``): they send words to all streams at a fixed rate.
All else is a real server. Each row is one number of concurrent streams: CPU milliseconds per token
by process, between the moment when all streams run and the end of a window, and the time to the
first token and the largest gap as clients see them. The row ``0`` is an idle server. A row with
``clients`` has the CPU milliseconds of a request: each client sends one after the other, of 512
prompt tokens and 64 answer tokens.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import cast
from urllib.parse import urlsplit

from server import Server, serving  # beside this file

from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.processes import Usage, tree_of

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
KINDS = ("Ingress", "ProxyActor", "Router", "Pool", "Worker", "ServeController", "gcs_server")
TOGETHER = ("Ingress", "ProxyActor")
FAKES = ("Worker", "Prefill", "Compressor", "Decode")
"""The workers, which compute nothing here."""
READ_BYTES = 1 << 16
WITHIN_S = 120.0
WARM_TOKENS = 2
"""Tokens that every stream has before the window begins."""

PROMPT_TOKENS, ANSWER_TOKENS = 512, 64
ANSWER_RATE = 10
"""Tokens per second of a client's answer, about those of the default model with 16 clients."""
VOCABULARY = 30_000

Row = dict[str, object]


@dataclass
class Client(asyncio.Protocol):
    """One stream: the times of its tokens. It parses nothing, so that it costs little."""

    body: bytes
    started: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    last: float = 0.0
    largest_gap_s: float = 0.0
    tokens: int = 0
    is_whole: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        text = self._tail + data
        self._tail = text[-16:]
        count = text.count(b'"text":" ') - self._tail.count(b'"text":" ')
        if count and not self.tokens:
            self.first_s = now - self.started
        elif count:
            self.largest_gap_s = max(self.largest_gap_s, now - self.last)
        if count:
            self.tokens += count
            self.last = now
        if b"data: [DONE]" in text:
            self.is_whole = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.ended.set()


@dataclass
class Window:
    """CPU seconds by kind of process, and tokens, over some seconds."""

    seconds: float = 0.0
    tokens: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])


@contextmanager
def window(server: Server, clients: Sequence[Client]) -> Iterator[Window]:
    """Measure while the block runs."""
    found, usage, find = Window(), Usage(), tree_of(server.pid)
    usage.look(find, with_pss=False)
    start, before = time.perf_counter(), sum(client.tokens for client in clients)
    yield found
    usage.look(find, with_pss=False)
    found.seconds = time.perf_counter() - start
    found.tokens = sum(client.tokens for client in clients) - before
    found.cpu_s = usage.cpu_s_by_kind()


def request(host: str, tokens: int, rate: int, prompt: object = "Once upon a time") -> bytes:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "seed": rate,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def run(server: Server, streams: int, rate: int, window_s: float) -> Row:
    """Measure so many streams at once, of so many tokens per second each."""
    address = urlsplit(server.url)
    spread_s = streams / 100  # connections open at 100 a second
    tokens = round((spread_s + window_s + 4) * rate) + WARM_TOKENS
    clients = list[Client]()
    loop = asyncio.get_running_loop()
    for _ in range(streams):
        client = Client(request(address.netloc, tokens, rate))
        await loop.create_connection(lambda one=client: one, address.hostname, address.port)
        clients.append(client)
        await asyncio.sleep(0.01)
    await _until_all_have(clients, WARM_TOKENS)
    with window(server, clients) as found:
        await asyncio.sleep(window_s)
    async with asyncio.timeout(WITHIN_S):
        for client in clients:
            await client.ended.wait()
    whole = sum(client.is_whole and client.tokens == tokens for client in clients)
    return row_of(streams, found, clients) | {"rate": rate, "tokens_each": tokens, "whole": whole}


async def run_requests(server: Server, clients: int, window_s: float) -> Row:
    """Measure clients that send one request after the other."""
    done, tasks = list[Client](), list[asyncio.Task[None]]()
    for _ in range(clients):  # spread over the time of one answer
        tasks.append(asyncio.create_task(_keep_asking(server.url, done)))
        await asyncio.sleep(ANSWER_TOKENS / ANSWER_RATE / clients)
    try:
        begun = len(done)
        with window(server, ()) as found:
            await asyncio.sleep(window_s)
        finished = done[begun:]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    count = max(1, len(finished))
    ms = {kind: round(1e3 * cpu_s / count, 2) for kind, cpu_s in found.cpu_s.items()}
    return {
        "clients": clients,
        "seconds": round(found.seconds, 3),
        "requests": len(finished),
        "whole": sum(one.is_whole and one.tokens == ANSWER_TOKENS for one in finished),
        "cpu_ms_per_request": ms,
        "together_ms_per_request": round(sum(ms.values()) - sum(ms.get(k, 0.0) for k in FAKES), 2),
        "median_ttft_ms": round(1e3 * median(one.first_s for one in finished), 1),
    }


async def _keep_asking(url: str, done: list[Client]) -> None:
    address, loop = urlsplit(url), asyncio.get_running_loop()
    while True:
        prompt = random.choices(range(VOCABULARY), k=PROMPT_TOKENS)
        client = Client(request(address.netloc, ANSWER_TOKENS, ANSWER_RATE, prompt))
        transport, _ = await loop.create_connection(
            lambda one=client: one, address.hostname, address.port
        )
        try:
            await client.ended.wait()
        finally:
            transport.close()
        done.append(client)


async def _until_all_have(clients: Sequence[Client], tokens: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while any(client.tokens < tokens for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def row_of(streams: int, found: Window, clients: Sequence[Client]) -> Row:
    """The figures of one run; of an idle server CPU seconds per second."""
    cpu_s = {kind: found.cpu_s.get(kind, 0.0) for kind in KINDS}
    row: Row = {
        "streams": streams,
        "seconds": round(found.seconds, 3),
        "tokens": found.tokens,
        "cores": {kind: round(cpu / found.seconds, 4) for kind, cpu in found.cpu_s.items()},
    }
    if not found.tokens:
        return row
    ms = {kind: 1e3 * value / found.tokens for kind, value in cpu_s.items()}
    row["cpu_ms_per_token"] = {kind: round(value, 4) for kind, value in ms.items()}
    row["together_ms_per_token"] = round(sum(ms[kind] for kind in TOGETHER), 4)
    row["median_ttft_ms"] = round(1e3 * median(client.first_s for client in clients), 1)
    row["largest_gap_ms"] = round(1e3 * max(client.largest_gap_s for client in clients), 1)
    return row


async def idle(server: Server, window_s: float) -> Row:
    with window(server, ()) as found:
        await asyncio.sleep(window_s)
    return row_of(0, found, ())


async def measure(server: Server, asked: argparse.Namespace) -> list[Row]:
    await run(server, 8, 8, 1.0)  # imports, caches
    await asyncio.sleep(asked.settle_s)
    rows = [await idle(server, asked.window_s)]
    for streams in asked.streams:
        rows.append(
            await run(server, streams, max(1, round(asked.tokens_per_s / streams)), asked.window_s)
        )
        await asyncio.sleep(1.0)
    return rows + [await run_requests(server, one, asked.window_s) for one in asked.clients]


def serve_and_measure(asked: argparse.Namespace) -> list[Row]:
    args: dict[str, object] = {
        "model": {"name": MODEL},
        "topology": asked.topology,
        "decode": {"max_num_seqs": 1024},
        "pool": {"kv_cache_memory_bytes": 2 << 30},
        "ingress": {"num_replicas": asked.ingresses},
    }
    # Ray's workers import stream_worker.py.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args, asked.port, Path(folder), "stream_worker:build_app") as server,
    ):
        return asyncio.run(measure(server, asked))


def shown(row: Row) -> list[object]:
    costs = row.get("cpu_ms_per_token") or row.get("cpu_ms_per_request") or row["cores"]
    assert isinstance(costs, dict)
    cpu = cast("dict[str, float]", costs)
    together = row.get("together_ms_per_token") or row.get("together_ms_per_request")
    name = row.get("streams", f"{row.get('clients')} clients")
    by_kind = (cpu.get(kind, 0.0) for kind in KINDS)
    return [name, *by_kind, together, row.get("median_ttft_ms"), row.get("largest_gap_ms")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--tokens-per-s", type=float, default=1024, help="of all streams together")
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--clients", type=int, nargs="*", default=[16])
    parser.add_argument(
        "--topology", choices=("colocated", "disaggregated"), default="disaggregated"
    )
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--port", type=int, default=8142)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    host, rows = host_info(), serve_and_measure(asked)
    if asked.json:
        write_json({"host": host, "rows": rows}, asked.json)
    console.print("CPU ms per token, of clients per request; streams 0: cores of an idle server")
    columns = ("streams", *KINDS, "together", "TTFT ms", "largest gap ms")
    console.print(make_table(columns, [shown(row) for row in rows]))


if __name__ == "__main__":
    main()
