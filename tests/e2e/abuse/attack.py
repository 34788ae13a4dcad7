"""Send every hostile request and connection to a server, beside a bystander, and judge.

    python -m tests.e2e.abuse.attack --seeds 3 --json benchmarks/results/abuse.json

A server of the default configuration is started. Exit code 1 if a request is answered with a 5xx or
not at all, cuts a stream of the bystander, or leaves anything behind. Times are reported.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from rich.progress import track

from tests.e2e.abuse.bystander import Bystander
from tests.e2e.abuse.connections import ANSWER_S, GRPC, HTTP
from tests.e2e.abuse.hostile import Hostile, hostile_requests
from tests.e2e.conftest import MODEL, Server, free_port, serve_run
from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info

DEPLOYMENTS = ("Ingress", "Router", "Pool", "Prefill", "Compressor", "Decode")
RETURNED_WITHIN_S = 30
SPARE_FILES = 8
"""File descriptors that a process may have more: connections that are kept open for a while."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one attack did."""

    kind: str
    number: int
    outcome: str
    """A status, or what the client met."""
    took_s: float
    gap_s: float
    """The bystander's largest gap between two tokens meanwhile."""

    @property
    def fault(self) -> str:
        if self.outcome.startswith("5"):
            return f"answered {self.outcome}"
        return self.outcome if self.outcome.startswith(("none", "AssertionError")) else ""


def send(server: Server, one: Hostile) -> str:
    """The status of the answer, or why there is none."""
    try:
        with httpx.Client(base_url=server.url, timeout=ANSWER_S) as client:
            answer = client.request(
                one.method, one.path, content=one.body or None, headers=dict(one.headers)
            )
            return str(answer.status_code)
    except httpx.TimeoutException:
        return f"none within {ANSWER_S:g} s"
    except httpx.HTTPError as error:  # a server may close the connection of who speaks no HTTP
        return type(error).__name__


def connect(server: Server, grpc_port: int, attack: Callable[..., None], seed: int) -> str:
    address = f"127.0.0.1:{grpc_port}" if attack in GRPC else server.url
    try:
        attack(address, random.Random(seed))
    except (OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "left"


def attacks(server: Server, grpc_port: int, seed: int) -> Iterator[tuple[str, Callable[[], str]]]:
    for one in hostile_requests(seed):
        yield one.kind, lambda one=one: send(server, one)
    for attack in (*HTTP, *GRPC):
        yield attack.__name__, lambda attack=attack: connect(server, grpc_port, attack, seed)


Processes = dict[str, psutil.Process]
"""The processes of a server, by deployment."""


def processes_of(server: Server) -> Processes:
    """One process of each deployment. A title can be missed, so this looks until all are there."""
    found = Processes()

    def all_are_found() -> bool:
        found.update({d: p for d in DEPLOYMENTS for p in server.replicas(d)})
        return len(found) == len(DEPLOYMENTS)

    server.wait_until(all_are_found, 30)
    return found


@dataclass(frozen=True)
class Held:
    """What the processes of a server hold."""

    files: dict[str, int]
    threads: dict[str, int]
    resident_mib: dict[str, int]

    @classmethod
    def by(cls, processes: Processes) -> "Held":
        """Raises: psutil.NoSuchProcess if one has ended"""
        return cls(
            {name: p.num_fds() for name, p in processes.items()},
            {name: p.num_threads() for name, p in processes.items()},
            {name: p.memory_info().rss >> 20 for name, p in processes.items()},
        )

    def more_than(self, before: "Held") -> list[str]:
        """Processes that have more files than before."""
        return [
            f"{name} has {self.files[name]} files, had {before.files[name]}"
            for name in self.files
            if self.files[name] > before.files[name] + SPARE_FILES
        ]


@dataclass
class Report:
    outcomes: list[Outcome]
    faults: list[str]
    before: Held
    after: Held
    streams: int


def attack(server: Server, grpc_port: int, seeds: Sequence[int]) -> Report:
    """Run everything, one after the other."""
    processes = processes_of(server)
    bystander = Bystander(server.url)
    server.wait_until(lambda: bystander.streams > 0, 120)
    before, outcomes = Held.by(processes), list[Outcome]()
    for seed in seeds:
        listed = list(attacks(server, grpc_port, seed))
        for number, (kind, run) in enumerate(track(listed, f"seed {seed}", console=console)):
            bystander.take_gap()
            began = time.monotonic()
            outcome = run()
            took_s = round(time.monotonic() - began, 2)
            gap_s = round(bystander.take_gap(), 3)
            outcomes.append(
                Outcome(kind=kind, number=number, outcome=outcome, took_s=took_s, gap_s=gap_s)
            )
    bystander.stop()
    faults = [f"{one.kind} {one.number}: {one.fault}" for one in outcomes if one.fault]
    faults += [f"a stream of the bystander ended with {fault}" for fault in bystander.faults]
    if ended := [name for name, process in processes.items() if not process.is_running()]:
        return Report(outcomes, [*faults, f"{ended} ended"], before, before, bystander.streams)
    faults += _leftovers(server, processes, before)
    return Report(outcomes, faults, before, Held.by(processes), bystander.streams)


def _leftovers(server: Server, processes: Processes, before: Held) -> list[str]:
    """What is left when nobody asks for anything any more."""

    def is_clean() -> bool:
        booked = server.metric("triptych_router_booked_bytes")
        return booked == 0 and server.pages_held() == 0 and not Held.by(processes).more_than(before)

    try:
        server.wait_until(is_clean, RETURNED_WITHIN_S)
    except AssertionError:
        booked = server.metric("triptych_router_booked_bytes")
        pages = server.pages_held()
        left = [f"{booked:g} bytes booked, {pages:g} pages held"] if booked or pages else []
        return left + Held.by(processes).more_than(before)
    return []


def settings(grpc_port: int) -> dict[str, Any]:
    return {"model": {"name": MODEL}, "ingress": {"grpc_port": grpc_port, "open_admin": True}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    host, port = host_info(), free_port()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        server = stack.enter_context(serve_run(Path(folder), settings(port)))
        report = attack(server, port, range(options.seeds))
    kinds = dict.fromkeys(one.kind for one in report.outcomes)
    lines = list[list[Any]]()
    for kind in kinds:
        mine = [one for one in report.outcomes if one.kind == kind]
        endings = dict(Counter(one.outcome for one in mine))
        longest, gap = max(one.took_s for one in mine), max(one.gap_s for one in mine)
        lines.append([kind, len(mine), str(endings), longest, gap])
    heads = ("kind", "attacks", "outcomes", "longest, s", "bystander's largest gap, s")
    console.print(make_table(heads, lines))
    for fault in report.faults:
        console.print(fault, soft_wrap=True)
    if options.json:
        write_json({"host": host, "seeds": options.seeds, **asdict(report)}, options.json)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
