"""The whole server, started the way a user starts it: ``serve run`` on a config file."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from triptych.cli.serving.serve import RAY_ENVIRONMENT

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 420
TITLE_LOOKS = 3
PORTS = range(20_000, 32_768)
"""Above the ports of Ray's workers, below those that Linux gives to who asks for any."""


@dataclass(frozen=True)
class Server:
    """A running ``serve run``."""

    url: str
    process: psutil.Process
    log: Path = Path(os.devnull)

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def processes(self, title: str) -> list[psutil.Process]:
        """The processes of one actor class, or of one deployment's replicas.

        Ray writes a process's title anew at each task, and who looks meanwhile may see none. So
        this looks several times.
        """
        found = dict[int, psutil.Process]()
        for _ in range(TITLE_LOOKS):
            for process in self.process.children(recursive=True):
                with suppress(psutil.Error):
                    if process.cmdline()[:1] == [f"ray::{title}"]:
                        found[process.pid] = process
            time.sleep(0.01)
        return list(found.values())

    def replicas(self, deployment: str) -> list[psutil.Process]:
        return self.processes(f"ServeReplica:triptych:{deployment}")

    def shared_memory(self) -> list[Path]:
        """The files of the pool's memory, largest first: the arena, then checkpoints."""
        (pool,) = self.replicas("Pool")
        paths = {Path(m.path) for m in pool.memory_maps() if "/dev/shm/triptych-" in m.path}
        return sorted(paths, key=lambda path: -path.stat().st_size)

    def run_dir(self) -> Path:
        """Where the sockets of this application are."""
        (pool,) = self.replicas("Pool")
        sockets = {Path(str(c.laddr)) for c in pool.net_connections("unix")}
        (path,) = {socket.parent for socket in sockets if socket.name == "pool.sock"}
        return path

    def metric(self, name: str) -> float:
        """One value from /metrics, summed over labels."""
        return sum(self.metrics(name).values())

    def metrics(self, name: str) -> dict[str, float]:
        """The values of one metric from /metrics, by their labels.

        Raises: LookupError if there is none
        """
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        rows = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, flags=re.MULTILINE)
        if not rows:
            raise LookupError(f"no metric {name}")
        return {labels: float(value) for labels, value in rows}

    def pages_held(self) -> float:
        """Pages of requests, and pages of workers' own stock that are in use."""
        return self.metric("triptych_pool_pages_in_requests") + self.metric(
            "triptych_workers_pages_taken"
        )

    def crowd(self, prompts: Sequence[str], max_tokens: int) -> "Crowd":
        """Clients that all start to stream now."""
        return Crowd(self.client(timeout=90), prompts, max_tokens)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> float:
        """Seconds until ``holds``; fails after ``timeout_s``."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            try:
                if holds():
                    return time.monotonic() - started
            except (httpx.HTTPError, LookupError):
                pass
            time.sleep(0.1)
        raise AssertionError(f"did not hold within {timeout_s} s")

    def is_healthy(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=5).status_code == 200


class Crowd:
    """Clients that stream at the same time, and what became of each of them."""

    def __init__(self, client: openai.OpenAI, prompts: Sequence[str], max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens
        self.texts = [""] * len(prompts)
        self.chunks = [0] * len(prompts)
        self.endings = [""] * len(prompts)
        """``length``, or the code of an error; empty: not yet."""
        self._threads = [
            threading.Thread(target=self._follow, args=(index, prompt), daemon=True)
            for index, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> Counter[str]:
        """How many came to which end, when all have."""
        for thread in self._threads:
            thread.join(timeout=150)
        self._client.close()
        return Counter(self.endings)

    def wait_for_chunks(self, count: int, clients: int = 0) -> None:
        """Return when so many clients, or else all, have so many; fail if all ended before."""
        deadline = time.monotonic() + 120
        while sorted(self.chunks, reverse=True)[(clients or len(self.chunks)) - 1] < count:
            assert not all(self.endings), f"too early: {Counter(self.endings)}"
            assert time.monotonic() < deadline, f"some wait for tokens: {self.chunks}"
            time.sleep(0.02)

    def _follow(self, index: int, prompt: str) -> None:
        try:
            self.endings[index] = self._stream(index, prompt)
        except openai.APIError as error:
            self.endings[index] = _code_of(error)
        except httpx.HTTPError as error:
            self.endings[index] = f"cut: {error!r}"

    def _stream(self, index: int, prompt: str) -> str:
        ending = "cut: no finish_reason"
        for chunk in self._client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            self.texts[index] += chunk.choices[0].text
            self.chunks[index] += 1
            ending = chunk.choices[0].finish_reason or ending
        return ending


def _code_of(error: openai.APIError) -> str:
    """The code of an error that has OpenAI's shape; what else it is otherwise."""
    body = error.body
    if isinstance(body, dict) and {"message", "type", "param", "code"} <= set(body):
        return str(error.code)
    return f"shapeless: {error!r}"


def free_port() -> int:
    """A port for a server that binds it seconds later, when Ray has taken dozens for itself.

    So it is not one that the system gives to whoever asks for any: what starts in between would
    get it now and then.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"every port of {PORTS} is taken")


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
            # As `triptych serve` sets it: by default Ray's workers yield to everything else.
            env=RAY_ENVIRONMENT | os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            preexec_fn=heed_interrupts,
        )
    server = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), log)
    try:
        wait_for_health(server, process, log)
        yield server
    finally:
        _stop(process)


def heed_interrupts() -> None:
    """Let SIGINT through: what a shell starts in the background ignores it, heirs included."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_command(
    model: str, options: Sequence[str], folder: Path
) -> "tuple[Server, subprocess.Popen[bytes]]":
    """Start ``triptych serve MODEL`` in a folder, which gets its output in ``serve.log``."""
    port, log = free_port(), folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("triptych"),
                "serve",
                model,
                "--port",
                str(port),
                *options,
            ],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"},
        )
    return Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid), log), process


def wait_for_health(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
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
        process.wait()
    _, alive = psutil.wait_procs(tree, timeout=10)
    for left in alive:
        left.kill()


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., AbstractContextManager[Server]]:
    """Start a server that ends with a ``with`` block."""

    def begin(**args: Any) -> AbstractContextManager[Server]:
        return serve_run(tmp_path, {"model": {"name": MODEL}, **args})

    return begin


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start servers that live as long as the test module."""
    with ExitStack() as stack:

        def begin(**args: Any) -> Server:
            directory = tmp_path_factory.mktemp("serve")
            return stack.enter_context(serve_run(directory, {"model": {"name": MODEL}, **args}))

        yield begin
