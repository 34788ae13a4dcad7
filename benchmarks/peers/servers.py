"""Start servers and stop them; a server stays up between its turns if it is idle there."""

import os
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.peers.environment import inherited
from benchmarks.peers.peer import Peer, ServerNeeds
from triptych.core.errors import BenchmarkError
from triptych.loadgen.report.processes import FindProcesses, tree_of

STOP_TIMEOUT_S = 60.0
IDLE_S = 2.0
"""How long an idle server is watched."""
MOST_IDLE_CORES = 0.02
LEAST_AVAILABLE_BYTES = 8 << 30


@dataclass
class Running:
    """A server that answers."""

    peer: Peer
    command: list[str]
    process: subprocess.Popen[bytes]
    url: str
    started_in_s: float
    warm: set[str] = field(default_factory=set[str])
    """Workloads for which it has been warmed up."""

    @property
    def processes(self) -> FindProcesses:
        return tree_of(self.process.pid)


@dataclass
class Fleet:
    """The servers that are up, at most one of each peer."""

    logs: Path
    restart: bool = False
    """Stop every server after its turn."""
    running: dict[str, Running] = field(default_factory=dict[str, Running])

    @contextmanager
    def turn(self, peer: Peer, needs: ServerNeeds) -> Generator[Running]:
        """A server for one turn; after it the server is stopped, unless it may stay.

        Raises: BenchmarkError if it does not start
        """
        server = self._find(peer, needs)
        try:
            yield server
        except BaseException:
            self._stop(server)
            raise
        if self.restart or has_ended(server) or not is_quiet(idle_cores(server), available_bytes()):
            self._stop(server)

    def close(self) -> None:
        for server in list(self.running.values()):
            self._stop(server)

    def _find(self, peer: Peer, needs: ServerNeeds) -> Running:
        command, found = peer.command(needs), self.running.get(peer.name)
        if found is not None and found.command == command and not has_ended(found):
            return found
        if found is not None:
            self._stop(found)
        server = start(peer, command, needs.port, self.logs)
        self.running[peer.name] = server
        return server

    def _stop(self, server: Running) -> None:
        del self.running[server.peer.name]
        stop(server.process)


def has_ended(server: Running) -> bool:
    return server.process.poll() is not None


def is_quiet(cores: float, available: int) -> bool:
    """Whether a server may stay up while others are measured."""
    return cores <= MOST_IDLE_CORES and available >= LEAST_AVAILABLE_BYTES


def start(peer: Peer, command: list[str], port: int, logs: Path) -> Running:
    """Start a server and wait until it answers.

    Raises: BenchmarkError with the end of its log
    """
    log = logs / f"{peer.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=inherited(peer.variables),
            start_new_session=True,  # an interrupt of the terminal is for the benchmark
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url + peer.ready_path, process, peer.start_timeout_s)
    except BaseException as error:
        stop(process)
        if isinstance(error, TimeoutError):
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise BenchmarkError(f"{peer.name} does not answer {url}:\n{tail}") from error
        raise
    return Running(peer, command, process, url, time.perf_counter() - begun)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Raises: TimeoutError if the server ends, or does not answer in time"""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise TimeoutError


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a server; of its processes nothing is left."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=10)
    for child in left:
        child.kill()


def idle_cores(server: Running) -> float:
    """Cores that a server uses without requests."""
    before = _cpu_s(server)
    time.sleep(IDLE_S)
    return (_cpu_s(server) - before) / IDLE_S


def _cpu_s(server: Running) -> float:
    total = 0.0
    for process in server.processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def available_bytes() -> int:
    return psutil.virtual_memory().available
