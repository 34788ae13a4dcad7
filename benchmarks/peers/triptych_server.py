"""Triptych itself, in both topologies, with its default settings, and with FP16 pages as a peer."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.weights import MODEL, bfloat16_directory

TOPOLOGIES = ("colocated", "disaggregated")
PREFIX = "triptych-"


def prepare() -> None:
    bfloat16_directory()


def command(topology: str, *settings: str) -> Callable[[ServerNeeds], list[str]]:
    """``settings``: more of them, ``NAME=VALUE`` each."""
    program = str(Path(sys.executable).with_name("triptych"))

    def start(needs: ServerNeeds) -> list[str]:
        caching = "--enable-prefix-caching" if needs.prefix_cache else "--no-enable-prefix-caching"
        given = [part for one in (f"topology={topology}", *settings) for part in ("--set", one)]
        return [program, "serve", MODEL, caching, "--port", str(needs.port), *given]

    return start


def server(name: str, topology: str, *settings: str) -> Peer:
    return Peer(
        name=name,
        prepare=prepare,
        command=command(topology, *settings),
        variables={"RAY_USAGE_STATS_ENABLED": "0"},
    )


SERVERS = tuple(server(f"{PREFIX}{topology}", topology) for topology in TOPOLOGIES)
FP16_PAGES = server("fp16-pages", "disaggregated", "compressor.policy=uniform:fp16")
"""What compression is compared with: the same server, disaggregated, whose pages stay in FP16."""
