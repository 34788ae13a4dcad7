"""The command, called as a user calls it."""

import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from triptych.cli import main as command

Run = Callable[..., tuple[int, str, str]]

METRICS = """\
# TYPE triptych_num_requests_open gauge
triptych_num_requests_open {running}
# TYPE triptych_workers gauge
triptych_workers{{stage="prefill"}} 1.0
triptych_workers{{stage="decode"}} 2.0
"""


class FakeServer(HTTPServer):
    """Answers /metrics with one number after the other, and stays with the last."""

    def __init__(self, running: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.running = running
        self.url = f"http://127.0.0.1:{self.server_port}"


Serve = Callable[[list[int]], FakeServer]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, FakeServer)
        running = self.server.running
        text = METRICS.format(running=running.pop(0) if len(running) > 1 else running[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, output and notes of one call."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["triptych", *arguments])
        with pytest.raises(SystemExit) as stop:
            command.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that say how many answers are in progress."""
    servers = list[FakeServer]()

    def start(running: list[int]) -> FakeServer:
        servers.append(FakeServer(running))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
