"""Offer a server twice what it can do for ten minutes, most of it by clients that behave badly.

    python -m tests.e2e.mixed_load --json benchmarks/results/mixed_load.json
    python -m tests.e2e.mixed_load --minutes 1 --peak-seconds 20

First a closed loop of polite clients alone shows the capacity: completed requests per second. The
same is measured again at the end, since the speed of a shared machine changes. In between four
polite tenants together send a third of the capacity, and four others the rest of twice the
capacity: bodies of 512 KiB, streams that are cut, whole answers and streams over HTTP and gRPC.
The others begin with as many at once as the queue lets wait, so that memory does not grow with the
queue. Readers of 100 bytes per second are connected all the time.

A polite request is good if its stream ends whole and takes no longer than four times the median of
the closed loop, the slower one of the two. Exit code 1 if less than 0.8 of the polite requests are
good, if a process grows by 1 MB a minute after the first two minutes, if anything is answered with
500, or if bookings or pages are left.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc
import grpc.aio
import psutil
import yaml

from tests.e2e.conftest import MODEL, Server, free_port, serve_run
from triptych.cli.output import console, make_table, write_json
from triptych.cli.serving.serve import RAY_ENVIRONMENT
from triptych.deployments.grpc.triptych_pb2 import CompletionRequest
from triptych.deployments.grpc.triptych_pb2_grpc import TriptychStub
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.stats import percentile

POLITE, OTHERS = [f"polite-{i}" for i in range(4)], [f"other-{i}" for i in range(4)]
"""Tenants, all of the same weight: four are entitled to half of the server."""
TEXT = "The harbour wall was built in 1903 and repaired twice since. "
ANSWER_TOKENS = 24
SLOW_READERS, SLOW_BYTES_S = 8, 100
BODY_BYTES = 512 << 10
SAMPLE_EVERY_S = 5.0
WARM_UP_S = 120.0
"""Caches fill in the first two minutes: growth is counted after them."""
MAX_MB_PER_MINUTE = 1.0
MIN_GOODPUT = 0.8
LIMIT_OF_MEDIAN = 4.0
POLITE_PART = 1 / 3
"""Of the capacity. Their share is one half of what the server does beside the others, which is less
than the capacity; the queue of tenants who send their whole share has no bound."""
AT_ONCE = 300
"""Requests with which the others begin: more than may wait (``router.max_queued_requests``)."""
RETURNED_WITHIN_S = 120

Body = dict[str, Any]
Sample = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request and its outcome."""

    kind: str
    tenant: str
    at_s: float
    took_s: float
    outcome: str
    """``whole``, ``left`` (by the client), ``not answered`` when the run ended, a status, the code
    of an error, or an exception."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory of one process."""

    name: str
    pid: int
    first_mb: float
    """After the warm-up, without shared memory."""
    last_mb: float
    slope_mb_per_minute: float
    """Of the resident memory without shared memory: pages of the arena count once they are used."""
    slope_with_shared: float
    by_minute: list[float]
    """Mean MB in each minute, the warm-up included, without shared memory."""


@dataclass
class Clients:
    """Everything that sends requests to one server."""

    session: aiohttp.ClientSession
    stub: Any
    url: str
    luck: random.Random
    began_s: float = field(default_factory=time.monotonic)
    sent: list[Sent] = field(default_factory=list[Sent])
    _numbers: int = 0

    def body(self, *, stream: bool, tokens: int = ANSWER_TOKENS) -> Body:
        self._numbers += 1
        return {
            "model": MODEL,
            "prompt": f"{self._numbers}: " + TEXT * self.luck.randint(2, 12),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": stream,
            "ignore_eos": True,
        }

    async def run(self, kind: str, tenant: str) -> None:
        """Send one request of a kind and note its outcome."""
        began_s = time.monotonic()
        try:
            outcome = await KINDS[kind](self, tenant)
        except (aiohttp.ClientError, OSError) as error:
            outcome = type(error).__name__
        except grpc.RpcError as error:
            outcome = str(error.code().name)  # type: ignore[attr-defined]
        except asyncio.CancelledError:
            self._note(kind, tenant, began_s, "not answered")
            raise
        self._note(kind, tenant, began_s, outcome)

    def _note(self, kind: str, tenant: str, began_s: float, outcome: str) -> None:
        now_s = time.monotonic()
        self.sent.append(
            Sent(
                kind=kind,
                tenant=tenant,
                at_s=round(began_s - self.began_s, 2),
                took_s=round(now_s - began_s, 3),
                outcome=outcome,
            )
        )

    def _post(self, body: Body, tenant: str) -> Any:
        headers = {"Authorization": f"Bearer {tenant}"}
        return self.session.post(f"{self.url}/v1/completions", json=body, headers=headers)

    async def stream(self, tenant: str) -> str:
        """A stream that is read to its end."""
        async with self._post(self.body(stream=True), tenant) as answer:
            if answer.status != 200:
                return str(answer.status)
            ending = "cut"
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return str(event["error"]["code"])
                    ending = "whole" if event["choices"][0]["finish_reason"] else ending
            return ending

    async def whole(self, tenant: str, more: Body | None = None) -> str:
        async with self._post(self.body(stream=False) | (more or {}), tenant) as answer:
            done = await answer.json()
            return "whole" if answer.status == 200 and done["choices"] else str(answer.status)

    async def large_field(self, tenant: str) -> str:
        """A body of 512 KiB whose prompt is short."""
        return await self.whole(tenant, {"comment": "x" * BODY_BYTES})

    async def large_prompt(self, tenant: str) -> str:
        """A prompt of 512 KiB, which is longer than the context."""
        return await self.whole(tenant, {"prompt": TEXT * (BODY_BYTES // len(TEXT))})

    async def disconnect(self, tenant: str) -> str:
        """A request that is left within two seconds, streamed or not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.luck.uniform(0, 2)):
                is_stream = self.luck.random() < 0.5
                await (self.stream(tenant) if is_stream else self.whole(tenant))
        return "left"

    async def grpc_whole(self, tenant: str) -> str:
        done = await self.stub.Completion(self._message(), metadata=_metadata(tenant))
        return "whole" if done.choices else "cut"

    async def grpc_stream(self, tenant: str) -> str:
        ending = "cut"
        async for part in self.stub.StreamCompletion(self._message(), metadata=_metadata(tenant)):
            if part.choices and part.choices[0].finish_reason:
                ending = "whole"
        return ending

    def _message(self) -> CompletionRequest:
        body = self.body(stream=False)
        return CompletionRequest(
            model=MODEL,
            prompt=[body["prompt"]],
            max_tokens=ANSWER_TOKENS,
            temperature=0.0,
            ignore_eos=True,
        )

    async def read_slowly(self, tenant: str) -> str:
        """A stream of which 100 bytes are read each second."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 12)
        try:
            body = json.dumps(self.body(stream=True, tokens=200)).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tenant}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            while piece := await reader.read(SLOW_BYTES_S):
                if piece.endswith(b"0\r\n\r\n"):
                    return "whole"
                await asyncio.sleep(1)
            return "closed"
        finally:
            writer.close()


def _metadata(tenant: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {tenant}")]


KINDS: dict[str, Callable[[Clients, str], Awaitable[str]]] = {
    "polite": Clients.stream,
    "stream": Clients.stream,
    "whole": Clients.whole,
    "512 KiB, short prompt": Clients.large_field,
    "512 KiB prompt": Clients.large_prompt,
    "disconnect": Clients.disconnect,
    "grpc": Clients.grpc_whole,
    "grpc stream": Clients.grpc_stream,
    "slow reader": Clients.read_slowly,
}
BAD_KINDS = [kind for kind in KINDS if kind not in ("polite", "slow reader")]


# ------------------------------------------------------------------ load


async def closed_loop(clients: Clients, seconds: float, count: int) -> list[Sent]:
    """So many polite clients, each of which sends its next request when the last one ended."""
    until_s, first = time.monotonic() + seconds, len(clients.sent)

    async def client(number: int) -> None:
        while time.monotonic() < until_s:
            await clients.run("polite", POLITE[number % len(POLITE)])

    await asyncio.gather(*(client(number) for number in range(count)))
    return clients.sent[first:]


def capacity_of(sent: Sequence[Sent]) -> float:
    """Requests per second of a closed loop, all of which must be whole."""
    assert all(one.outcome == "whole" for one in sent), Counter(one.outcome for one in sent)
    ended_s = max(one.at_s + one.took_s for one in sent)
    return len(sent) / (ended_s - min(one.at_s for one in sent))


async def open_loop(
    clients: Clients,
    rate: float,
    until_s: float,
    choose: Callable[[], tuple[str, str]],
    *,
    at_once: int = 0,
    wait_s: float,
) -> None:
    """Send at random times, ``rate`` a second on average, whatever became of earlier requests.

    ``at_once``: requests that are sent at the beginning. Requests that have no answer ``wait_s``
    after the end are left.
    """
    running = set[asyncio.Task[None]]()

    def send() -> None:
        task = asyncio.create_task(clients.run(*choose()))
        running.add(task)
        task.add_done_callback(running.discard)

    for _ in range(at_once):
        send()
    while True:
        await asyncio.sleep(clients.luck.expovariate(rate))
        if time.monotonic() >= until_s:
            break
        send()
    if running:
        _, late = await asyncio.wait(running, timeout=wait_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def slow_readers(clients: Clients, until_s: float) -> None:
    async def reader(tenant: str) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await clients.run("slow reader", tenant)

    await asyncio.gather(*(reader(OTHERS[i % len(OTHERS)]) for i in range(SLOW_READERS)))


@dataclass
class Memory:
    """Samples of the memory of a server's processes."""

    server: Server
    samples: dict[int, list[Sample]] = field(default_factory=dict[int, list[Sample]])
    """By process: seconds, MB without shared memory, MB."""
    names: dict[int, str] = field(default_factory=dict[int, str])

    async def follow(self, until_s: float) -> None:
        began_s = time.monotonic()
        while (now_s := time.monotonic()) < until_s:
            await asyncio.to_thread(self._sample, now_s - began_s)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _sample(self, at_s: float) -> None:
        root = self.server.process
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                used = process.memory_info()
                row = at_s, (used.rss - used.shared) / 1e6, used.rss / 1e6
                self.samples.setdefault(process.pid, []).append(row)
                self.names[process.pid] = _name(process)

    def growth(self, warm_up_s: float) -> list[Growth]:
        """Of the processes that lived from the end of the warm-up to the end."""
        last_s = max(rows[-1][0] for rows in self.samples.values())
        found = list[Growth]()
        for pid, rows in self.samples.items():
            late = [row for row in rows if row[0] >= warm_up_s]
            if len(late) < 3 or late[0][0] > warm_up_s + 30 or late[-1][0] < last_s - 30:
                continue
            minutes = [at_s / 60 for at_s, _, _ in late]
            found.append(
                Growth(
                    name=self.names[pid],
                    pid=pid,
                    first_mb=round(late[0][1], 1),
                    last_mb=round(late[-1][1], 1),
                    slope_mb_per_minute=_slope(minutes, [own for _, own, _ in late]),
                    slope_with_shared=_slope(minutes, [rss for _, _, rss in late]),
                    by_minute=_by_minute(rows),
                )
            )
        return sorted(found, key=lambda one: -one.slope_mb_per_minute)


def _by_minute(rows: Sequence[Sample]) -> list[float]:
    grouped = dict[int, list[float]]()
    for at_s, own, _ in rows:
        grouped.setdefault(int(at_s // 60), []).append(own)
    return [round(sum(own) / len(own), 1) for own in grouped.values()]


def _slope(minutes: Sequence[float], megabytes: Sequence[float]) -> float:
    return round(linear_regression(minutes, megabytes).slope, 3)


def _name(process: psutil.Process) -> str:
    """The deployment of a replica, the class of an actor, or the program."""
    first = (process.cmdline() or [process.name()])[0]
    return first.removeprefix("ray::").removeprefix("ServeReplica:triptych:").rsplit("/", 1)[-1]


# ------------------------------------------------------------------ result


@dataclass
class Report:
    capacity_per_s: float
    """Requests per second of the closed loop."""
    capacity_afterwards_per_s: float
    median_s: float
    """Of the slower closed loop."""
    polite_s: dict[str, float]
    """Percentiles of what polite requests took."""
    offered_per_s: dict[str, float]
    polite_sent: int
    polite_good: int
    endings: dict[str, dict[str, int]]
    growth: list[Growth]
    is_empty: bool

    @property
    def goodput(self) -> float:
        """Share of the polite requests that are good."""
        return self.polite_good / max(1, self.polite_sent)

    @property
    def faults(self) -> list[str]:
        bad = [
            f"{one.name} ({one.pid}) grows by {one.slope_mb_per_minute} MB a minute"
            for one in self.growth
            if one.slope_mb_per_minute >= MAX_MB_PER_MINUTE
        ]
        if self.goodput < MIN_GOODPUT:
            bad.append(f"goodput is {self.goodput:.2f} of what polite tenants sent")
        bad += [
            f"{count} requests ({kind}) ended with {ending}"
            for kind, endings in self.endings.items()
            for ending, count in endings.items()
            if ending in ("500", "cut", "INTERNAL", "UNKNOWN")
        ]
        return bad if self.is_empty else [*bad, "bookings or pages are left"]


async def mixed(server: Server, grpc_port: int, options: argparse.Namespace) -> Report:
    luck = random.Random(0)
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=900)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        await stack.enter_async_context(session)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        await stack.enter_async_context(channel)
        clients = Clients(session, TriptychStub(channel), server.url, luck)
        await closed_loop(clients, 5, options.clients)
        alone = await closed_loop(clients, options.peak_seconds, options.clients)
        capacity, median_s = capacity_of(alone), median(one.took_s for one in alone)
        console.print(f"capacity {capacity:.2f} requests/s, median {median_s:.1f} s")
        sys.stdout.flush()
        rates = {"polite": capacity * POLITE_PART, "others": capacity * (2 - POLITE_PART)}
        first, until_s = len(clients.sent), time.monotonic() + 60 * options.minutes
        memory = Memory(server)
        await asyncio.gather(
            memory.follow(until_s),
            slow_readers(clients, until_s),
            open_loop(
                clients,
                rates["polite"],
                until_s,
                lambda: ("polite", luck.choice(POLITE)),
                wait_s=LIMIT_OF_MEDIAN * median_s,
            ),
            open_loop(
                clients,
                rates["others"],
                until_s,
                lambda: (luck.choice(BAD_KINDS), luck.choice(OTHERS)),
                at_once=AT_ONCE,
                wait_s=1.0,
            ),
            _tell(clients, first, until_s),
        )
        sent = clients.sent[first:]
        is_empty = await _is_empty(server)
        afterwards = await closed_loop(clients, options.peak_seconds / 2, options.clients)
        median_s = max(median_s, median(one.took_s for one in afterwards))
    asked = [one for one in sent if one.kind == "polite"]
    endings = {
        kind: dict(Counter(one.outcome for one in sent if one.kind == kind)) for kind in KINDS
    }
    return Report(
        capacity_per_s=round(capacity, 3),
        capacity_afterwards_per_s=round(capacity_of(afterwards), 3),
        median_s=round(median_s, 3),
        polite_s={
            f"p{share}": round(percentile([one.took_s for one in asked], share), 2)
            for share in (50, 90, 99)
        },
        offered_per_s={
            name: round(len(part) / (60 * options.minutes), 3)
            for name, part in (
                ("polite", asked),
                ("others", [one for one in sent if one.kind in BAD_KINDS]),
            )
        },
        polite_sent=len(asked),
        polite_good=sum(
            one.outcome == "whole" and one.took_s <= LIMIT_OF_MEDIAN * median_s for one in asked
        ),
        endings=endings,
        growth=memory.growth(min(WARM_UP_S, 30 * options.minutes)),
        is_empty=is_empty,
    )


async def _tell(clients: Clients, first: int, until_s: float) -> None:
    """Progress, once a minute."""
    while time.monotonic() < until_s:
        await asyncio.sleep(min(60.0, max(0.1, until_s - time.monotonic())))
        ended = Counter((one.kind, one.outcome) for one in clients.sent[first:])
        console.print(f"{max(0, until_s - time.monotonic()):.0f} s left", dict(ended))
        sys.stdout.flush()


async def _is_empty(server: Server) -> bool:
    def holds() -> bool:
        return server.metric("triptych_router_booked_bytes") == 0 and server.pages_held() == 0

    try:
        await asyncio.to_thread(server.wait_until, holds, RETURNED_WITHIN_S)
    except AssertionError:
        return False
    return True


def settings(folder: Path, grpc_port: int) -> dict[str, Any]:
    keys = folder / "keys.yaml"
    rows = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name in (*POLITE, *OTHERS)
    ]
    keys.write_text(yaml.safe_dump(rows))
    return {
        "model": {"name": MODEL},
        "ingress": {"grpc_port": grpc_port, "api_keys": str(keys)},
    }


def _print(report: Report) -> None:
    console.print(
        make_table(
            ("requests", "sent", "outcomes"),
            [[kind, sum(e.values()), str(e)] for kind, e in report.endings.items()],
        )
    )
    console.print(
        make_table(
            ("process", "MB at first", "at last", "MB/min", "with shared memory"),
            [
                [
                    one.name,
                    one.first_mb,
                    one.last_mb,
                    one.slope_mb_per_minute,
                    one.slope_with_shared,
                ]
                for one in report.growth
            ],
        )
    )
    console.print(
        f"capacity {report.capacity_per_s} requests/s ({report.capacity_afterwards_per_s} "
        f"afterwards), offered {report.offered_per_s}; "
        f"{report.polite_good} of {report.polite_sent} polite requests good ({report.goodput:.2f})"
    )
    for fault in report.faults:
        console.print(fault, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peak-seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=16, help="of the closed loop")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    host, port = host_info(), free_port()
    for name, value in RAY_ENVIRONMENT.items():  # as `triptych serve` and the image set it
        os.environ.setdefault(name, value)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        server = stack.enter_context(serve_run(folder, settings(folder, port)))
        report = asyncio.run(mixed(server, port, options))
    _print(report)
    if options.json:
        found = asdict(report) | {"goodput": report.goodput, "faults": report.faults}
        write_json({"host": host, "minutes": options.minutes, **found}, options.json)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
