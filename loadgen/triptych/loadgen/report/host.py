"""Conditions of a measurement: command, commit, date and machine."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import psutil

PACKAGES = ("triptych", "torch", "triton", "transformers", "ray", "numba", "numpy")
SECRET_OPTION = "--api-key"

HostInfo = dict[str, object]


def host_info() -> HostInfo:
    """The command line, the date, the machine, the versions, the commit and the load, as of now."""
    return {
        "command": command_line(sys.orig_argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_1min": psutil.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def command_line(words: Sequence[str]) -> str:
    """The command of a process as a reader can type it.

    The interpreter of an installed program is left out, absolute paths lose their directories,
    which differ between machines, and API keys their value.

    >>> command_line(["/usr/bin/python3", "/usr/bin/triptych", "bench", "serve", "--api-key", "k"])
    'triptych bench serve --api-key ...'
    """
    program, *arguments = words
    is_installed = bool(arguments) and Path(arguments[0]).is_absolute()
    shown = [] if is_installed else [Path(program).name]
    for before, word in pairwise((program, *arguments)):
        is_key = before == SECRET_OPTION
        name = Path(word).name if Path(word).is_absolute() else word
        shown.append("..." if is_key else re.sub(f"^({SECRET_OPTION})=.*", r"\1=...", name))
    return shlex.join(shown).replace("'...'", "...")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """Commit of this checkout; ``-dirty`` with local changes."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
