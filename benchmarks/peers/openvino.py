"""OpenVINO GenAI: continuous batching with the 4-bit weights of the GGUF file, behind a shim."""

import subprocess
from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.weights import four_bit_gguf

SHIM = Path(__file__).parent / "shims" / "openvino_server.py"
ENVIRONMENT = Environment(
    name="openvino", packages=("openvino-genai==2026.4.1.0", "fastapi", "uvicorn")
)
CONVERT = """
import sys
from openvino_genai import LLMPipeline
LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""
"""Writes the model in OpenVINO's form beside the GGUF file; the weights stay in 4 bits."""


def prepare() -> None:
    ENVIRONMENT.make()
    gguf = four_bit_gguf()
    if not (gguf.parent / "openvino_model.xml").is_file():
        subprocess.run([ENVIRONMENT.program("python"), "-c", CONVERT, str(gguf)], check=True)


def command(needs: ServerNeeds) -> list[str]:
    model, cache = str(four_bit_gguf().parent), str(int(needs.prefix_cache))
    return [ENVIRONMENT.program("python"), str(SHIM), model, str(needs.port), cache]


SERVERS = (Peer(name="openvino", prepare=prepare, command=command),)
