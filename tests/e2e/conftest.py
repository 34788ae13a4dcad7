"""The whole server, started the way a user starts it: ``serve run`` on a config file."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 180


@dataclass(frozen=True)
class Server:
    """A running ``serve run``."""

    url: str
    process: psutil.Process

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def replica(self, deployment: str) -> psutil.Process:
        """The process of one deployment's replica."""
        wanted = f"ServeReplica:triptych:{deployment}"
        for process in self.process.children(recursive=True):
            try:
                if wanted in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        raise LookupError(f"no process {wanted}")

    def metric(self, name: str) -> float:
        """One value from /metrics, summed over labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> float:
        """Seconds until ``holds``; fails after ``timeout_s``."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            try:
                if holds():
                    return time.monotonic() - started
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"did not hold within {timeout_s} s")

    def is_healthy(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=5).status_code == 200


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(path: Path, port: int, args: dict[str, Any]) -> Path:
    """The repository's own config.yaml with another port and other arguments."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] = args
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def serve_run(directory: Path, args: dict[str, Any]) -> Iterator[Server]:
    port = free_port()
    config = write_config(directory / "config.yaml", port, args)
    log = directory / "serve.log"
    serve = Path(sys.executable).with_name("serve")
    with log.open("w") as output:
        process = subprocess.Popen(
            [serve, "run", "--address", "local", str(config)],
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
    server = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    try:
        _wait_for_health(server, process, log)
        yield server
    finally:
        _stop(process)


def _wait_for_health(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if server.is_healthy():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt as a user would, then see that nothing of the process tree is left."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(tree, timeout=10)
    for left in alive:
        left.kill()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start servers that live as long as the test module."""
    with ExitStack() as stack:

        def begin(**args: Any) -> Server:
            directory = tmp_path_factory.mktemp("serve")
            return stack.enter_context(serve_run(directory, {"model": {"name": MODEL}, **args}))

        yield begin
