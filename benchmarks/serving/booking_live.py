"""Bookings by forecast against bookings by bounds on a running server with default settings.

    python benchmarks/serving/booking_live.py --json benchmarks/results/booking_live.json

For each ``router.booking``: ``serve run`` on a Ray cluster of its own, and 40 chats at once without
``max_tokens``, each with a question of its own. ``/metrics`` is read while they run: how long after
the last arrival all decode slots are in use, and how many bytes are booked and held meanwhile. A
small model writes some stories until its context ends, so chats that are left after ``--seconds``
are disconnected.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from server import serving

from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info

MIB = 1 << 20
EVERY_S = 0.1
SLOTS = 32
"""``decode.max_num_seqs`` of the default server."""
TOPICS = ("rivers", "bread", "bridges", "glass", "owls", "tides", "maps", "salt")


@dataclass(frozen=True)
class Sample:
    """Requests, bytes and output tokens at one moment, from ``/metrics``."""

    at_s: float
    """Since the last chat was sent."""
    decoding: int
    waiting: int
    booked: float
    held: float
    output_tokens: int
    """Of all chats so far."""


@dataclass
class Live:
    """Samples, and what became of the chats."""

    samples: list[Sample] = field(default_factory=list[Sample])
    finished: int = 0
    failed: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Row:
    """One way of booking."""

    booking: str
    chats: int
    most_decoding: int
    all_slots_after_s: float | None
    """Seconds from the last arrival until ``SLOTS`` requests decode; None: they never did."""
    booked_by_held: float
    """Median while at least half of the slots decode."""
    booked_mib: float
    held_mib: float
    output_tokens_per_s: float
    finished: int
    failed: int
    decoding_by_second: list[int]
    """Requests that decode after 1, 2, ... 10 s."""


def question(number: int) -> str:
    topic = TOPICS[number % len(TOPICS)]
    return f"Question {number}: tell me a long story about {topic} and the number {number * 37}."


async def chat(client: httpx.AsyncClient, number: int, live: Live) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": question(number)}]}
    answer = await client.post("/v1/chat/completions", json=body | {"seed": number})
    if answer.status_code == 200:
        live.finished += 1
    else:
        live.failed.append(answer.text[:200])


def read(text: str, at_s: float) -> Sample:
    values = dict[str, float]()
    for line in text.splitlines():
        if line.startswith("triptych_"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)

    def state(name: str) -> int:
        return int(values.get(f'triptych_router_requests{{state="{name}"}}', 0))

    return Sample(
        at_s,
        state("decoding"),
        state("waiting"),
        values["triptych_router_booked_bytes"],
        values["triptych_router_held_bytes"],
        int(values["triptych_generation_tokens_total"]),
    )


async def watch(client: httpx.AsyncClient, live: Live, began: float) -> None:
    while True:
        try:
            answer = await client.get("/metrics")
            live.samples.append(read(answer.text, time.monotonic() - began))
        except httpx.HTTPError:
            pass  # a sample is missing
        await asyncio.sleep(EVERY_S)


async def press(url: str, model: str, chats: int, seconds: float) -> Live:
    live = Live()
    limits = httpx.Limits(max_connections=chats + 4)
    async with httpx.AsyncClient(
        base_url=url, timeout=600.0, limits=limits, trust_env=False
    ) as client:
        warm = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        (await client.post("/v1/chat/completions", json=warm)).raise_for_status()
        began = time.monotonic()
        tasks = [asyncio.create_task(chat(client, number, live)) for number in range(chats)]
        watching = asyncio.create_task(watch(client, live, began))
        _, left = await asyncio.wait(tasks, timeout=seconds)
        watching.cancel()
        for task in left:
            task.cancel()
        await asyncio.gather(*tasks, watching, return_exceptions=True)
    return live


def measure(booking: str, asked: argparse.Namespace) -> Row:
    args: dict[str, object] = {
        "model": {"name": asked.model, "served_model_name": "default"},
        "router": {"booking": booking},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args, asked.port, Path(folder)) as server,
    ):
        live = asyncio.run(press(server.url, "default", asked.chats, asked.seconds))
    full = next((one.at_s for one in live.samples if one.decoding >= SLOTS), None)
    busy = [one for one in live.samples if one.decoding >= SLOTS // 2 and one.held]
    busy = busy or [one for one in live.samples if one.decoding and one.held]

    def mid(values: Sequence[float], digits: int = 2) -> float:
        return round(statistics.median(values), digits) if values else 0.0

    return Row(
        booking=booking,
        chats=asked.chats,
        most_decoding=max((one.decoding for one in live.samples), default=0),
        all_slots_after_s=None if full is None else round(full, 2),
        booked_by_held=mid([one.booked / one.held for one in busy]),
        booked_mib=mid([one.booked / MIB for one in busy], 1),
        held_mib=mid([one.held / MIB for one in busy], 1),
        output_tokens_per_s=round(
            (live.samples[-1].output_tokens - live.samples[0].output_tokens)
            / (live.samples[-1].at_s - live.samples[0].at_s),
            1,
        ),
        finished=live.finished,
        failed=len(live.failed),
        decoding_by_second=[
            max((one.decoding for one in live.samples if one.at_s <= second), default=0)
            for second in range(1, 11)
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--bookings", default="forecast,bounds")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    host = host_info()
    rows = [measure(booking, asked) for booking in asked.bookings.split(",")]
    lines = [list(asdict(row).values()) for row in rows]
    console.print(make_table(list(asdict(rows[0])), lines, f"{asked.chats} chats, live"))
    if asked.json:
        write_json({"host": host, "rows": [asdict(row) for row in rows]}, asked.json)


if __name__ == "__main__":
    main()
