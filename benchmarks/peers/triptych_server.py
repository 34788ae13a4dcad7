"""Triptych itself, in both topologies, with its default settings."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.weights import MODEL, bfloat16_directory

TOPOLOGIES = ("colocated", "disaggregated")
PREFIX = "triptych-"


def prepare() -> None:
    bfloat16_directory()


def command(topology: str) -> Callable[[ServerNeeds], list[str]]:
    program = str(Path(sys.executable).with_name("triptych"))

    def start(needs: ServerNeeds) -> list[str]:
        caching = "--enable-prefix-caching" if needs.prefix_cache else "--no-enable-prefix-caching"
        place = ["--port", str(needs.port), "--set", f"topology={topology}"]
        return [program, "serve", MODEL, caching, *place]

    return start


SERVERS = tuple(
    Peer(
        name=f"{PREFIX}{topology}",
        prepare=prepare,
        command=command(topology),
        variables={"RAY_USAGE_STATS_ENABLED": "0"},
    )
    for topology in TOPOLOGIES
)
