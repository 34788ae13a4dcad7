"""Start a Triptych server for a benchmark, and stop all its processes afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from triptych.cli.serving.serve import RAY_ENVIRONMENT
from triptych.cli.serving.serve_file import DEFAULT, IMPORT_PATH

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Server:
    """A server that answers ``/health``."""

    url: str
    pid: int
    started_in_s: float


@contextmanager
def serving(
    args: dict[str, object], port: int, folder: Path, import_path: str = IMPORT_PATH
) -> Iterator[Server]:
    """``serve run`` on a Ray cluster of its own; nothing is left when the block ends."""
    config, log = folder / "config.yaml", folder / "server.log"
    text = yaml.safe_dump(_serve_file(args, port, import_path))
    config.write_text(text, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", "local"]
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(config)],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=RAY_ENVIRONMENT | os.environ,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, log)
            yield Server(url, process.pid, time.perf_counter() - start)
        finally:
            _stop(process)


def _serve_file(args: dict[str, object], port: int, import_path: str) -> dict[str, object]:
    own = {"args": args, "import_path": import_path}
    apps = [{**app, **own} for app in DEFAULT["applications"]]
    return {**DEFAULT, "http_options": {"host": "127.0.0.1", "port": port}, "applications": apps}


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    sys.exit(f"the server did not become healthy:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask Serve to shut down; what is still there after a minute is killed."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=10)
    for child in left:
        child.kill()
