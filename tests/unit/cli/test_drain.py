"""``triptych drain`` against a server that says how many answers are in progress."""

import pytest
import typer

from tests.unit.cli.conftest import METRICS, Serve
from triptych.cli.serving import drain as command
from triptych.cli.serving.scrape import Metrics, parse_metrics, read_metrics


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LOOK_EVERY_S", 0.01)


def test_it_waits_until_nobody_is_answered_for_a_while(serve: Serve) -> None:
    server = serve([3, 1, 0, 0, 2, 0, 0, 0, 7])
    command.drain(server.url, timeout=60)
    assert server.running == [7]


def test_it_gives_up_with_exit_code_1(serve: Serve) -> None:
    with pytest.raises(typer.Exit) as stop:
        command.drain(serve([2]).url, timeout=0)
    assert stop.value.exit_code == 1


def test_where_no_server_is_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[str]()

    def refuse(url: str) -> Metrics:
        looks.append(url)
        return read_metrics(url)

    monkeypatch.setattr(command, "read_metrics", refuse)
    command.drain("http://127.0.0.1:9", timeout=60)
    assert looks == ["http://127.0.0.1:9"] * command.QUIET_LOOKS


def test_metrics_are_summed_by_labels() -> None:
    metrics = parse_metrics(METRICS.format(running=4))
    assert metrics.total("triptych_workers") == 3
    assert metrics.total("triptych_workers", stage="decode") == 2
    assert metrics.by_label("triptych_workers", "stage") == {"prefill": 1, "decode": 2}
    assert "triptych_num_requests_open" in metrics
    assert metrics.total("nothing") == 0
