"""Kill processes of a running server under load, and compare the answers of its clients.

    python benchmarks/serving/faults.py --rounds 10

Each round starts 16 streams, kills one process (``kill -9``) at a random moment, and compares every
answer with that of a run without a kill. With ``decode+logprobs`` all clients request log
probabilities. ``clients`` kills no process: of 200 concurrent clients half disconnect at random.
Prints a row for each kind of process and writes ``benchmarks/results/faults.json``.

A round also reports how streams continued (taken over with their pages, or computed again), the
wait of a new request sent right after the death, and when the replacement process existed, when its
constructor began, and when it was ready.
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

from triptych.cli.output import console, make_table, progress_bars, write_json
from triptych.cli.pool import pool_at
from triptych.kvpool.rpc.calls import CheckPool
from triptych.loadgen.report.host import host_info

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
STORY = "Once upon a time there was a king who had two sons and a garden full of apple trees. "
TITLES = {
    "decode": "ServeReplica:triptych:Decode",
    "decode+logprobs": "ServeReplica:triptych:Decode",
    "prefill": "ServeReplica:triptych:Prefill",
    "compressor": "ServeReplica:triptych:Compressor",
    "router": "ServeReplica:triptych:Router",
    "pool": "ServeReplica:triptych:Pool",
    "ingress": "ServeReplica:triptych:Ingress",
    "clients": "",
}
CLIENTS = 200
LOOK_EVERY_S = 0.1
SUCCESSOR_WITHIN_S = 60.0
STEPS = ("begun", "named", "ready", "cpu")
INTERRUPTED_S = 0.5
"""A gap in a stream that is longer counts as an interruption."""


@dataclass
class Stream:
    """The stream of one client: text, times and how it ended."""

    text: str = ""
    ending: str = "cut"
    """How the client knows that it ended: ``cut`` if it does not."""
    times: list[float] = field(default_factory=list)

    def gap_after(self, moment: float) -> float:
        """The longest time without a chunk that ends after a moment."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((late - early for early, late in pairs if late > moment), default=0.0)


@dataclass
class Round:
    """Result of one kill: 16 streams, and a request sent right after it."""

    kind: str
    streams: int
    lost: int
    wrong: int
    errors: dict[str, int]
    gaps_s: list[float]
    taken_over: int
    """Streams that another worker went on with, in the same pages."""
    sent_again: int
    """Attempts at a request after its first."""
    new_request_s: float
    successor_s: dict[str, float]
    """Seconds from the death until the next process of the kind was ``begun``, ``named`` (it had
    got its role), and ``ready``; and seconds of a processor that it had taken by then (``cpu``).
    For the rest of the time since it was begun it waited, mostly for a processor."""
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
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(stream, json.loads(line[6:]))
            if response.status_code != 200:
                stream.ending = str(response.status_code)
    except httpx.HTTPError as error:  # the client was told that something lacks
        stream.ending = type(error).__name__
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


def titles(server: Server) -> dict[psutil.Process, str]:
    """The title of each process of the server, which Ray sets as its command line."""
    found = dict[psutil.Process, str]()
    for process in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.Error, IndexError):
            found[process] = process.cmdline()[0]
    return found


def victim(server: Server, kind: str) -> psutil.Process:
    wanted = f"ray::{TITLES[kind]}"
    for _ in range(100):  # a title may be in the middle of a change
        if found := [one for one, title in titles(server).items() if title == wanted]:
            return random.choice(found)
        time.sleep(LOOK_EVERY_S)
    sys.exit(f"no process is called {wanted}")


async def successor(server: Server, kind: str, before: set[psutil.Process]) -> dict[str, float]:
    """When the process was there that took the place of a dead one, in seconds from now."""
    died, steps, role = time.time(), dict[str, float](), TITLES[kind]
    while "ready" not in steps and time.time() - died < SUCCESSOR_WITHIN_S:
        await asyncio.sleep(LOOK_EVERY_S)
        for process, title in (await asyncio.to_thread(titles, server)).items():
            if role not in title or process in before:
                continue
            now = round(time.time() - died, 2)
            steps.setdefault("begun", round(process.create_time() - died, 2))
            steps.setdefault("named", now)
            if title == f"ray::{role}":
                steps["ready"] = now
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    steps["cpu"] = round(times.user + times.system, 2)
    return steps


@dataclass
class Death:
    """Time of a kill, wait of a new request, and times of the replacement process."""

    at: float = 0.0
    new_request_s: float = 0.0
    successor_s: dict[str, float] = field(default_factory=dict)


async def concurrent_requests(
    server: Server, asked: argparse.Namespace, kind: str = ""
) -> tuple[list[Stream], Death]:
    """Run all streams at once, and kill a process if a kind is given."""
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
        death = Death()
        if kind:
            process, before = victim(server, kind), set(titles(server))
            before = {one for one in before if TITLES[kind] in " ".join(one.cmdline())}
            await asyncio.sleep(random.uniform(0.5, asked.kill_within_s))
            death.at = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
            death.new_request_s, death.successor_s = await asyncio.gather(
                newcomer(client), successor(server, kind, before)
            )
        return await asyncio.gather(*tasks), death


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
        return list(pool.call(CheckPool()).faults)


def decisions(server: Server) -> dict[str, float]:
    return metric(server, "triptych_router_decisions")


def decided(server: Server, reason: str, before: dict[str, float]) -> int:
    """How often since then; a router that has taken the place of another began at 0."""
    label = f'reason="{reason}"'
    now = decisions(server).get(label, 0.0)
    return int(now - (before.get(label, 0.0) if now >= before.get(label, 0.0) else 0.0))


def sent_again(server: Server, kind: str, streams: int, before: dict[str, float]) -> int:
    """Attempts after the first. A new router knows none of the streams' first attempts."""
    firsts = 1 if kind == "router" else streams + 1
    return max(0, decided(server, "submitted", {} if kind == "router" else before) - firsts)


def kill_one(server: Server, kind: str, asked: argparse.Namespace, whole: list[Stream]) -> Round:
    until(lambda: is_whole(server, asked.decode_replicas), "every worker is back")
    before = decisions(server)
    streams, death = asyncio.run(concurrent_requests(server, asked, kind))
    until(lambda: is_whole(server, asked.decode_replicas), "every worker is back")
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
        gaps_s=[round(one.gap_after(death.at), 3) for one in streams],
        taken_over=decided(server, "resumed", before),
        sent_again=sent_again(server, kind, len(streams), before),
        new_request_s=round(death.new_request_s, 3),
        successor_s=death.successor_s,
        ledger_s=round(ledger_s, 3),
        faults=faults,
    )


def leave(server: Server, asked: argparse.Namespace) -> Round:
    until(lambda: is_whole(server, asked.decode_replicas), "every worker is back")
    cut = asyncio.run(half_leave(server))
    ledger_s = until(lambda: pages_held(server) == 0, "all pages are free")
    faults = check_pool(server)
    errors = {"cut": cut} if cut else {}
    return Round(
        kind="clients",
        streams=CLIENTS,
        lost=cut,
        wrong=0,
        errors=errors,
        gaps_s=[],
        taken_over=0,
        sent_again=0,
        new_request_s=0.0,
        successor_s={},
        ledger_s=round(ledger_s, 3),
        faults=faults,
    )


def median(rounds: list[Round], step: str) -> float | None:
    known = [one.successor_s[step] for one in rounds if step in one.successor_s]
    return statistics.median(known) if known else None


def summary(kind: str, rounds: list[Round]) -> dict[str, object]:
    gaps = sorted(gap for one in rounds for gap in one.gaps_s if gap > INTERRUPTED_S)
    return {
        "kind": kind,
        "rounds": len(rounds),
        "streams": sum(one.streams for one in rounds),
        "lost": sum(one.lost for one in rounds),
        "wrong": sum(one.wrong for one in rounds),
        "taken_over": sum(one.taken_over for one in rounds),
        "sent_again": sum(one.sent_again for one in rounds),
        "interrupted": len(gaps),
        "gap_p50_s": statistics.median(gaps) if gaps else None,
        "gap_p99_s": gaps[int(0.99 * (len(gaps) - 1))] if gaps else None,
        "new_request_p50_s": statistics.median(one.new_request_s for one in rounds),
        "new_request_max_s": max(one.new_request_s for one in rounds),
        "new_request_within_5s": sum(one.new_request_s <= 5.0 for one in rounds),
        **{f"successor_{step}_p50_s": median(rounds, step) for step in STEPS},
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
    parser.add_argument("--ingress-replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8127)
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "faults.json")
    asked = parser.parse_args()
    random.seed(asked.seed)
    args: dict[str, object] = {
        "model": {"name": MODEL, "dtype": "float32"},
        "ingress": {"num_replicas": asked.ingress_replicas},
        "decode": {"actor": {"num_replicas": asked.decode_replicas}},
        "pool": {"kv_cache_memory_bytes": 512 << 20, "prefix_bytes": 0},
    }
    rounds, kinds = list[Round](), asked.kinds.split(",")
    plain = {name: value for name, value in vars(asked).items() if name != "json"}
    bars = progress_bars(6)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args, asked.port, Path(folder)) as server,
        bars,
    ):
        task = bars.add_task("rounds", total=asked.rounds * len(kinds))
        whole, _ = asyncio.run(concurrent_requests(server, asked))
        for number in range(asked.rounds):
            for kind in kinds:
                one = kill_one(server, kind, asked, whole) if TITLES[kind] else leave(server, asked)
                rounds.append(one)
                bars.advance(task)
                console.print(f"round {number + 1}: {one}", soft_wrap=True)
                rows = [
                    summary(k, mine) for k in kinds if (mine := [r for r in rounds if r.kind == k])
                ]
                write_json(
                    {
                        "host": host_info(),
                        "asked": plain,
                        "started_in_s": round(server.started_in_s, 2),
                        "rows": rows,
                        "rounds": [vars(one) for one in rounds],
                    },
                    asked.json,
                )
    console.print(make_table(tuple(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
