"""``triptych drain`` against a server that says how many answers are in progress."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import typer

from triptych.cli import drain as command
from triptych.cli.scrape import parse_metrics

METRICS = """\
# TYPE triptych_num_requests_running gauge
triptych_num_requests_running {running}
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
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(command, "LOOK_EVERY_S", 0.01)
    servers = list[FakeServer]()

    def start(running: list[int]) -> FakeServer:
        servers.append(FakeServer(running))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_it_waits_until_nobody_is_answered_for_a_while(serve: Serve) -> None:
    server = serve([3, 1, 0, 0, 2, 0, 0, 0, 7])
    command.drain(server.url, timeout=60)
    assert server.running == [7]


def test_it_gives_up_with_exit_code_1(serve: Serve) -> None:
    with pytest.raises(typer.Exit) as stop:
        command.drain(serve([2]).url, timeout=0)
    assert stop.value.exit_code == 1


def test_where_no_server_is_nobody_waits(serve: Serve) -> None:
    command.drain("http://127.0.0.1:9", timeout=60)


def test_metrics_are_summed_by_labels() -> None:
    metrics = parse_metrics(METRICS.format(running=4))
    assert metrics.total("triptych_workers") == 3
    assert metrics.total("triptych_workers", stage="decode") == 2
    assert metrics.by_label("triptych_workers", "stage") == {"prefill": 1, "decode": 2}
    assert "triptych_num_requests_running" in metrics
    assert metrics.total("nothing") == 0
