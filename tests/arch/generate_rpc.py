"""Writes what protoc makes of ``triptych.proto``: ``make proto``. A test compares."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "deployments"
SCHEMA = "triptych/deployments/grpc/triptych.proto"


def generate(into: Path) -> list[Path]:
    """Have protoc write the messages, their types, and the stubs."""
    kinds = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", *kinds, SCHEMA]
    subprocess.run(command, check=True, timeout=60)
    folder = (into / SCHEMA).parent
    return sorted(path for path in folder.iterdir() if "_pb2" in path.name)


if __name__ == "__main__":
    generate(SOURCES)
