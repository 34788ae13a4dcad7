"""Serve a random Qwen3 with adaptive methods out of a small pool, under load and rude clients.

    python -m tests.e2e.adaptive_load --json benchmarks/results/adaptive_served.json

The model is made and calibrated (`triptych calibrate --pareto`), then `triptych serve` gets a pool
that holds few of its requests. First one request at a time is sent, then long ones by several
clients at once, and then one at a time again. While the clients send, one other client hangs up in
the middle of streams, one sends halves of requests, and a process computes in a loop. Of three
requests one names no floor, one a limit of KL, and one the floor `high`. At last each prompt is
sent again, alone, with the method that was chosen for it by name.

Exit code 1 if a request is not answered whole, or below its floor; if load lowers no precision, or
it stays low; if an answer differs from that of its method alone; or if requests, bookings or pages
are left.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.conftest import Server, start_command, wait_for_health
from tests.tiny import save_tiny_qwen3
from triptych.cli.output import console, make_table, write_json
from triptych.core.profile import Fidelity, Profile
from triptych.loadgen.report.host import host_info

CONTEXT_TOKENS, HEAD_DIM, LAYERS = 8192, 128, 3
METHODS = "uniform:k8v8,uniform:k8v4,uniform:k4v4,uniform:k4v2"
PROMPT_TOKENS, ANSWER_TOKENS = (1200, 2600), 96
POOL = "32MiB"
QUIET = 4
"""Requests before and after the load, one at a time."""
CLIMB_S = 6.0
"""A ladder is climbed by one request in five seconds at most."""
ANSWERED_S = 300.0
RETURNED_S = 60.0

PHASES = ("before", "load", "after")

Body = dict[str, Any]


@dataclass(frozen=True)
class Floor:
    """What a request asks for."""

    name: str
    limit: float = 0.0
    """The largest KL that it allows; 0: any."""
    compression: Body = field(default_factory=dict[str, Any])
    """The field of its body."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request that was answered, or not."""

    phase: str
    floor: str
    limit: float
    """The largest KL that its floor allows; 0: any."""
    status: int
    tokens: int = 0
    method: str = ""
    reason: str = ""
    kl: float = 0.0
    lowered_tokens: int = 0
    stored_bytes: int = 0
    took_s: float = 0.0
    text: str = ""
    alone: str = ""
    """``same``, ``other``, or ``lowered`` for those whose tokens were lowered meanwhile."""

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.tokens == ANSWER_TOKENS

    @property
    def is_below(self) -> bool:
        return bool(self.limit) and (self.kl > self.limit or self.lowered_tokens > 0)


def calibrated(folder: Path) -> tuple[Path, Path, Profile]:
    """The model, and a profile with a frontier."""
    model, profile = folder / "tiny-qwen3", folder / "profile.json"
    save_tiny_qwen3(model, layers=LAYERS, head_dim=HEAD_DIM, context_tokens=CONTEXT_TOKENS)
    limits = ("--max-kl", "50", "--min-top1", "0", "--max-perplexity-ratio", "1e3")
    sizes = ("--contexts", "1024", "--documents", "2", "--steps", "24")
    choices = ("--alphas", "3", "--low-formats", "k4v2", "--windows", "16", "--methods", METHODS)
    command = ["calibrate", str(model), "--output", str(profile), *limits, *sizes, *choices]
    subprocess.run([_triptych(), *command, "--pareto"], check=True)
    return model, profile, Profile.read(profile)


def _triptych() -> Path:
    return Path(sys.executable).with_name("triptych")


@contextmanager
def served(folder: Path, model: Path, profile: Path) -> Iterator[Server]:
    options = ["--kv-cache-memory-bytes", POOL]
    for setting in (
        "compressor.adaptive=true",
        f"compressor.profile={profile}",
        "pool.extent_pages=16",
    ):
        options += ["--set", setting]
    server, process = start_command(str(model), options, folder)
    try:
        wait_for_health(server, process, server.log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ------------------------------------------------------------------ clients


@dataclass
class Clients:
    """Sends prompts of random words, the same ones for the same number."""

    server: Server

    def prompt(self, number: int) -> str:
        luck = random.Random(number)
        size = luck.randint(*PROMPT_TOKENS)
        text = ""
        while len(text) < size:
            text += "".join(luck.choices("abcdefghijklmnopqrstuvwxyz", k=luck.randint(2, 9))) + " "
        return text[:size]

    def body(self, number: int, compression: Body, *, stream: bool = False) -> Body:
        return {
            "prompt": self.prompt(number),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "compression": compression,
        }

    def ask(self, phase: str, number: int, floor: Floor) -> Answer:
        began_s = time.monotonic()
        url = f"{self.server.url}/v1/completions"
        answer = httpx.post(url, json=self.body(number, floor.compression), timeout=ANSWERED_S)
        sent = Answer(phase=phase, floor=floor.name, limit=floor.limit, status=answer.status_code)
        if answer.status_code != 200:
            return replace(sent, text=answer.text)
        found = answer.json()
        told = found["usage"]["compression"]
        return replace(
            sent,
            tokens=found["usage"]["completion_tokens"],
            method=told["method"],
            reason=told["choice"]["reason"],
            kl=told["choice"]["kl"],
            lowered_tokens=told["lowered_tokens"],
            stored_bytes=told["stored_bytes"],
            took_s=round(time.monotonic() - began_s, 2),
            text=found["choices"][0]["text"],
        )

    def ask_by_name(self, number: int, method: str) -> str:
        body = self.body(number, {"method": method})
        url = f"{self.server.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=ANSWERED_S).raise_for_status()
        return str(answer.json()["choices"][0]["text"])


class Rude(threading.Thread):
    """A client that goes on being rude until ``stop`` is set."""

    def __init__(self, clients: Clients, *, hangs_up: bool) -> None:
        super().__init__(daemon=True)
        self._clients, self._hangs_up = clients, hangs_up
        self.stop, self.count = threading.Event(), 0
        self.start()

    def run(self) -> None:
        luck = random.Random(self._hangs_up)
        parts = urlsplit(self._clients.server.url)
        while not self.stop.wait(luck.uniform(0.1, 0.6)):
            whole = self._request(luck)
            end = len(whole) if self._hangs_up else luck.randrange(1, len(whole))
            try:
                with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
                    client.sendall(whole[:end])
                    client.settimeout(luck.uniform(0.2, 3.0))
                    if self._hangs_up:
                        client.recv(luck.randint(1, 2000))
            except OSError:
                pass
            self.count += 1

    def _request(self, luck: random.Random) -> bytes:
        body = self._clients.body(luck.randrange(10_000, 20_000), {}, stream=luck.random() < 0.7)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def disturbed(clients: Clients) -> Iterator[list[Rude]]:
    """Two rude clients, and a process that computes in a loop."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    rude = [Rude(clients, hangs_up=True), Rude(clients, hangs_up=False)]
    try:
        yield rude
    finally:
        for one in rude:
            one.stop.set()
        for one in rude:
            one.join(30)
        busy.kill()
        busy.wait()


# ------------------------------------------------------------------ phases


def measured_of(profile: Profile) -> dict[str, Fidelity]:
    """The fidelity of each method of the frontier."""
    found = {profile.settings.policy: profile.measured, **profile.measured_methods}
    return {name: found[name][0] for name in profile.pareto}


def floors_of(profile: Profile) -> list[Floor]:
    """No floor, a limit of KL between the methods, and ``high``."""
    measured = measured_of(profile)
    kls = sorted(one.kl for one in measured.values())
    high = measured[f"uniform:{profile.settings.high_format}"].kl
    middle = kls[len(kls) // 2]
    return [
        Floor("none"),
        Floor("max_kl", middle, {"max_kl": middle}),
        Floor("high", high, {"floor": "high"}),
    ]


def quiet(clients: Clients, phase: str, first: int) -> list[Answer]:
    found = list[Answer]()
    for number in range(first, first + QUIET):
        found.append(clients.ask(phase, number, Floor("none")))
        time.sleep(CLIMB_S if phase == "after" else 0)
    return found


def crowd(clients: Clients, floors: Sequence[Floor], count: int, at_once: int) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        wanted = [
            pool.submit(clients.ask, "load", number, floors[number % len(floors)])
            for number in range(count)
        ]
        return [one.result() for one in wanted]


def compared(clients: Clients, found: Sequence[Answer]) -> list[Answer]:
    """Answers of the load beside those of their methods alone."""
    checked = list[Answer]()
    for number, one in enumerate(found):
        if not one.is_whole:
            outcome = ""
        elif one.lowered_tokens:
            outcome = "lowered"
        else:
            is_same = clients.ask_by_name(number, one.method) == one.text
            outcome = "same" if is_same else "other"
        checked.append(replace(one, alone=outcome))
    return checked


def is_empty(server: Server) -> bool:
    def holds() -> bool:
        load = httpx.get(f"{server.url}/load", timeout=10).json()["server_load"]
        booked = server.metric("triptych_router_booked_bytes")
        return load == 0 and booked == 0 and server.pages_held() == 0

    try:
        server.wait_until(holds, RETURNED_S)
    except AssertionError:
        return False
    return True


def faults_of(found: Sequence[Answer], empty: bool) -> list[str]:
    bad = [f"{one.phase}: {one.status}, {one.tokens} tokens" for one in found if not one.is_whole]
    bad += [f"{one.method} ({one.kl}) is below {one.limit}" for one in found if one.is_below]
    bad += [f"{one.method}: another answer alone" for one in found if one.alone == "other"]
    free = {p: [one for one in found if (one.phase, one.floor) == (p, "none")] for p in PHASES}
    best = min(one.kl for one in free["before"] if one.is_whole)
    coarse = [one.kl for one in free["load"] if one.reason == "memory" and one.kl > best]
    if not coarse:
        bad.append("no request had a coarser method while memory was short")
    elif free["after"][-1].kl >= max(coarse):
        bad.append(f"{free['after'][-1].method} is still chosen when memory is free again")
    return bad if empty else [*bad, "requests, bookings or pages are left"]


def choices_of(found: Sequence[Answer]) -> list[dict[str, object]]:
    """How many requests of each phase and floor got which method, and why."""
    groups = dict[tuple[str, ...], list[Answer]]()
    for one in found:
        groups.setdefault((one.phase, one.floor, one.method, one.reason), []).append(one)
    return [
        {
            **dict(zip(("phase", "floor", "method", "reason"), group, strict=True)),
            "requests": len(own),
            "same_alone": sum(one.alone == "same" for one in own),
            "longest_s": max(one.took_s for one in own),
        }
        for group, own in sorted(groups.items(), key=lambda item: PHASES.index(item[0][0]))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=48, help="of the load")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    host = host_info()
    with TemporaryDirectory() as name:
        folder = Path(name)
        model, path, profile = calibrated(folder)
        floors = floors_of(profile)
        with served(folder, model, path) as server:
            clients = Clients(server)
            found = quiet(clients, "before", 20_000)
            with disturbed(clients) as rude:
                loaded = crowd(clients, floors, options.requests, options.clients)
            empty = is_empty(server)
            found += compared(clients, loaded) + quiet(clients, "after", 30_000)
            empty = is_empty(server) and empty
    report: dict[str, Any] = {
        "host": host,
        "pool": POOL,
        "clients": options.clients,
        "floors": [asdict(one) for one in floors],
        "ladder": {name: asdict(one) for name, one in measured_of(profile).items()},
        "rude": {"hung up": rude[0].count, "half requests": rude[1].count},
        "is_empty": empty,
        "faults": faults_of(found, empty),
        "choices": choices_of(found),
        "answers": [asdict(replace(one, text="")) for one in found],
    }
    columns = ("phase", "floor", "method", "reason", "requests", "same alone", "longest s")
    console.print(make_table(columns, [list(row.values()) for row in report["choices"]]))
    for fault in report["faults"]:
        console.print(fault, soft_wrap=True)
    if options.json:
        write_json(report, options.json)
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
