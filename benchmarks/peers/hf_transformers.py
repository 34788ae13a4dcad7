"""Continuous batching of transformers, with the weights in bfloat16, behind a shim.

It runs in this project's environment, which has transformers already.
"""

import sys
from pathlib import Path

from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.weights import bfloat16_directory

SHIM = Path(__file__).parent / "shims" / "transformers_server.py"


def prepare() -> None:
    bfloat16_directory()


def command(needs: ServerNeeds) -> list[str]:
    model, cache_tokens = str(bfloat16_directory()), needs.clients * needs.context_tokens
    options = [needs.port, int(needs.prefix_cache), cache_tokens]
    return [sys.executable, str(SHIM), model, *map(str, options)]


SERVERS = (
    Peer(
        name="transformers",
        prepare=prepare,
        command=command,
        variables={"HF_HUB_OFFLINE": "1"},
    ),
)
