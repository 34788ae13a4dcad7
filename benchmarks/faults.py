"""Kill processes of a server at work, and see what its clients notice.

    python benchmarks/faults.py --rounds 10

Each round starts 16 streams, kills one process (``kill -9``) at a random moment, and compares
what every client gets with what it gets when nobody dies. ``decode+logprobs`` asks for log
probabilities, so that requests are computed again instead of taken over. ``clients`` kills nobody:
of 200 clients at once half go away at random. Prints a row for each
kind of process and writes ``benchmarks/results/faults.json``.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from server import Server, serving

from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, write_json
from triptych.cli.pool import pool_at

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
STORY = "Once upon a time there was a king who had two sons and a garden full of apple trees. "
TITLES = {
    "decode": "ServeReplica:triptych:Decode",
    "decode+logprobs": "ServeReplica:triptych:Decode",
    "prefill": "ServeReplica:triptych:Prefill",
    "compressor": "ServeReplica:triptych:Compressor",
    "router": "ServeReplica:triptych:Router",
    "pool": "PoolShell",
    "ingress": "ServeReplica:triptych:Ingress",
    "clients": "",
}
CLIENTS = 200
INTERRUPTED_S = 0.5
"""A gap in a stream that is longer counts as an interruption."""


@dataclass
class Stream:
    """What one client got."""

    text: str = ""
    ending: str = "cut"
    times: list[float] = field(default_factory=list)

    def gap_after(self, moment: float) -> float:
        """The longest time without a chunk that ends after a moment."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((late - early for early, late in pairs if late > moment), default=0.0)


@dataclass
class Round:
    """What 16 clients and one newcomer saw."""

    kind: str
    streams: int
    lost: int
    wrong: int
    errors: dict[str, int]
    gaps_s: list[float]
    new_request_s: float
    ledger_s: float
    faults: list[str]


async def follow(client: httpx.AsyncClient, prompt: str, tokens: int, *, logprobs: bool) -> Stream:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        **({"logprobs": 0} if logprobs else {}),
    }
    stream = Stream()
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(stream, json.loads(line[6:]))
            if response.status_code != 200:
                stream.ending = str(response.status_code)
    return stream


def take(stream: Stream, event: dict) -> None:
    stream.times.append(time.monotonic())
    if "error" in event:
        stream.ending = event["error"]["code"]
        return
    (choice,) = event["choices"]
    stream.text += choice["text"]
    stream.ending = choice["finish_reason"] or stream.ending


async def half_leave(server: Server) -> int:
    """Of 200 clients half leave within ten seconds: how many others had no whole answer."""
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=300, limits=limits, trust_env=False
    ) as client:
        tasks = [
            asyncio.create_task(follow(client, f"{STORY} Part {i}:", 24, logprobs=False))
            for i in range(CLIENTS)
        ]
        events = asyncio.get_running_loop()
        for task in random.sample(tasks, CLIENTS // 2):
            events.call_later(random.uniform(0, 10), task.cancel)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    return sum(isinstance(one, Stream) and one.ending != "length" for one in ended)


async def newcomer(client: httpx.AsyncClient) -> float:
    """Seconds until a request that comes right after the death is answered."""
    started = time.monotonic()
    while True:
        with suppress(httpx.HTTPError):
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code == 200:
                return time.monotonic() - started
        await asyncio.sleep(0.1)


def victim(server: Server, kind: str) -> psutil.Process:
    found = list[psutil.Process]()
    for process in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[:1] == [f"ray::{TITLES[kind]}"]:
                found.append(process)
    return random.choice(found)


async def crowd(
    server: Server, asked: argparse.Namespace, kind: str = ""
) -> tuple[list[Stream], float, float]:
    """All streams, and if somebody is to die: when, and how long a newcomer waited."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=120, limits=limits, trust_env=False
    ) as client:
        logprobs = kind.endswith("logprobs")
        tasks = [
            asyncio.create_task(
                follow(client, f"{STORY} Part {i}:", asked.output_tokens, logprobs=logprobs)
            )
            for i in range(asked.streams)
        ]
        died, waited = 0.0, 0.0
        if kind:
            process = victim(server, kind)
            await asyncio.sleep(random.uniform(0.5, asked.kill_within_s))
            died = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
            waited = await newcomer(client)
        return await asyncio.gather(*tasks), died, waited


def until(holds: Callable[[], bool], what: str, timeout_s: float = 120) -> float:
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        with suppress(httpx.HTTPError):
            if holds():
                return time.monotonic() - started
        time.sleep(0.1)
    sys.exit(f"not within {timeout_s} s: {what}")


def metric(server: Server, name: str) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    rows = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, flags=re.MULTILINE)
    return {labels: float(value) for labels, value in rows}


def is_whole(server: Server, replicas: int) -> bool:
    counts = metric(server, "triptych_workers")
    wanted = {"prefill": 1, "compress": 1, "decode": replicas}
    return all(counts.get(f'stage="{stage}"') == count for stage, count in wanted.items())


def pages_held(server: Server) -> float:
    names = ("triptych_pool_pages_in_requests", "triptych_workers_pages_taken")
    return sum(sum(metric(server, name).values()) for name in names)


def check_pool(server: Server) -> list[str]:
    """Contradictions in the books of this server's pool."""
    process = victim(server, "pool")
    paths = {Path(str(one.laddr)) for one in process.net_connections("unix")}
    (socket,) = {path for path in paths if path.name == "pool.sock"}
    with pool_at(f"unix:{socket}") as pool:
        return pool.check()


def kill_one(server: Server, kind: str, asked: argparse.Namespace, whole: list[Stream]) -> Round:
    until(lambda: is_whole(server, asked.decode_replicas), "every worker is back")
    streams, died, waited = asyncio.run(crowd(server, asked, kind))
    ledger_s = until(lambda: pages_held(server) == 0, "all pages are free")
    faults = check_pool(server)
    errors = [one.ending for one in streams if one.ending != "length"]
    return Round(
        kind=kind,
        streams=len(streams),
        lost=len(errors),
        wrong=sum(
            one.text != other.text
            for one, other in zip(streams, whole, strict=True)
            if one.ending == "length"
        ),
        errors={code: errors.count(code) for code in sorted(set(errors))},
        gaps_s=[round(one.gap_after(died), 3) for one in streams],
        new_request_s=round(waited, 3),
        ledger_s=round(ledger_s, 3),
        faults=faults,
    )


def leave(server: Server, asked: argparse.Namespace) -> Round:
    until(lambda: is_whole(server, asked.decode_replicas), "every worker is back")
    cut = asyncio.run(half_leave(server))
    ledger_s = until(lambda: pages_held(server) == 0, "all pages are free")
    faults = check_pool(server)
    errors = {"cut": cut} if cut else {}
    return Round("clients", CLIENTS, cut, 0, errors, [], 0.0, round(ledger_s, 3), faults)


def summary(kind: str, rounds: list[Round]) -> dict[str, object]:
    gaps = sorted(gap for one in rounds for gap in one.gaps_s if gap > INTERRUPTED_S)
    return {
        "kind": kind,
        "rounds": len(rounds),
        "streams": sum(one.streams for one in rounds),
        "lost": sum(one.lost for one in rounds),
        "wrong": sum(one.wrong for one in rounds),
        "interrupted": len(gaps),
        "gap_p50_s": statistics.median(gaps) if gaps else None,
        "gap_p99_s": gaps[int(0.99 * (len(gaps) - 1))] if gaps else None,
        "new_request_p50_s": statistics.median(one.new_request_s for one in rounds),
        "new_request_max_s": max(one.new_request_s for one in rounds),
        "ledger_max_s": max(one.ledger_s for one in rounds),
        "faults": sum(len(one.faults) for one in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(TITLES))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--kill-within-s", type=float, default=6.0)
    parser.add_argument("--decode-replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8127)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "faults.json")
    asked = parser.parse_args()
    random.seed(asked.seed)
    args: dict[str, object] = {
        "model": {"name": MODEL, "dtype": "float32"},
        "decode": {"actor": {"num_replicas": asked.decode_replicas}},
        "pool": {"capacity_bytes": 512 << 20, "prefix_bytes": 0},
    }
    rounds, kinds = list[Round](), asked.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder, serving(args, asked.port, Path(folder)) as server:
        whole, _, _ = asyncio.run(crowd(server, asked))
        for number in range(asked.rounds):
            for kind in kinds:
                one = kill_one(server, kind, asked, whole) if TITLES[kind] else leave(server, asked)
                rounds.append(one)
                console.print(f"round {number + 1}: {rounds[-1]}", soft_wrap=True)
                rows = [
                    summary(k, mine) for k in kinds if (mine := [r for r in rounds if r.kind == k])
                ]
                plain = {name: value for name, value in vars(asked).items() if name != "json"}
                write_json(
                    {
                        "host": host_info(),
                        "asked": plain,
                        "rows": rows,
                        "rounds": [vars(one) for one in rounds],
                    },
                    asked.json,
                )
    console.print(make_table(tuple(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
