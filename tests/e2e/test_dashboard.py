"""What operators look at, over a real server that works: panels and rules in a real Prometheus, and
the dashboard in a real browser. At the end its pool is killed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import chromium
from tests.e2e.conftest import free_port
from tests.e2e.killed import kill_at_work
from tests.prometheus import Prometheus, program, prometheus
from tests.unit.k8s.test_monitoring import COMPONENT, panels

pytestmark = pytest.mark.e2e

SPEC = yaml.safe_load((COMPONENT / "rules.yaml").read_text())["spec"]
GRAFANA = {"$__rate_interval": "5m", "$namespace": "triptych", "$pod": ".+"}

STEPS = "waiting prefilling prefilled compressing planned encoding compressed decoding"


def legend(kind: str) -> str:
    """How many pages the map shows of a kind."""
    mark = f"document.querySelector('#pagelegend [data-kind=\"{kind}\"]')"
    return f"Number({mark}?.textContent.replaceAll(',', '') ?? 0)"


@pytest.fixture(scope="module")
def server(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    disk = str(tmp_path_factory.mktemp("disk"))
    return start(pool={"disk_path": disk, "disk_bytes": 64 << 20})


@pytest.fixture(scope="module")
def watched(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen a server before, while and after it answered."""
    program("prometheus")
    for group in SPEC["groups"]:
        group["interval"] = "1s"
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, server.url, SPEC, free_port()) as found:
        found.wait_for_scrapes(2)
        for question in ("Who?", "When?"):
            prompt = "The harbour wall was built in 1903 and repaired twice. " * 20 + question
            server.crowd([prompt], max_tokens=12).join()
        found.wait_for_scrapes(3)
        yield found


def test_every_panel_of_the_dashboard_shows_a_figure(watched: Prometheus) -> None:
    empty = list[str]()
    for title, query in panels():
        for name, value in GRAFANA.items():
            query = query.replace(name, value)
        if not any(value == value for value in watched.values(query)):  # NaN is no figure
            empty.append(f"{title}: {query}")
    assert not empty


def test_every_rule_is_evaluated_and_no_alert_fires(watched: Prometheus) -> None:
    groups = watched.ask("/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in SPEC["groups"])
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert recorded
    assert [name for name in recorded if not watched.values(name)] == []
    firing = [alert for alert in watched.ask("/alerts")["alerts"] if alert["state"] == "firing"]
    assert firing == []


@pytest.fixture(scope="module")
def page(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if not chromium.is_here():
        pytest.skip("needs a Chromium: Debian's chromium, or pip's PyQt6-WebEngine")
    with chromium.browse(free_port(), tmp_path_factory.mktemp("browser")) as page:
        page.go(f"{server.url}/dashboard")
        page.wait_for("document.body?.dataset.drawn >= 2")
        yield page


def test_the_chat_box_answers_and_says_what_compression_did(
    server: Any, page: chromium.Page
) -> None:
    page.run("""(() => {
      document.getElementById("prompt").value = "What is the capital of <b>Japan</b>?";
      document.getElementById("maxtokens").value = 24;
      document.getElementById("ask").requestSubmit();
    })()""")
    note = page.wait_for("document.querySelector('.message:last-child small').textContent", 150)
    assert "first token" in note
    assert "tokens/s" in note
    assert "compression" in note
    assert "x (diffkv" in note
    assert page.run("document.querySelector('.message:last-child span').textContent.length") > 3
    assert page.run("document.querySelectorAll('#log b').length") == 0
    assert page.complaints == []


def test_under_load_pages_change_colour_and_requests_pass_through(
    server: Any, page: chromium.Page, tmp_path: Path
) -> None:
    assert page.run("document.getElementById('health').textContent") == "serving"
    assert page.run("seen.kinds.length") >= 10_000
    crowd = server.crowd([f"Tale {n}. " + "The ship sailed on. " * 80 for n in range(3)], 160)
    page.wait_for(f"{legend('k8v8')} > 0 && {legend('k8v4')} > 0", timeout_s=150)
    page.wait_for("document.getElementById('gantt').dataset.phases.includes('decoding')")
    page.screenshot(tmp_path / "load.png")
    page.run("document.querySelector('input[value=owner]').click()")
    page.run("document.querySelector('input[value=kind]').click()")
    crowd.join()
    page.wait_for(f"{legend('k8v8')} === 0 && {legend('k8v4')} === 0")
    ways = page.run("state.requests.map(one => [one.end, one.tokens, one.steps.map(s => s[0])])")
    for end, tokens, way in ways[-3:]:
        assert (end, tokens) == ("finished", 160)
        assert way[:8] == STEPS.split(" ")  # behind it, it may have been taken over
    page.wait_for("document.querySelectorAll('#workers .ok').length === 3")
    assert page.complaints == []


def test_a_screen_of_any_scheme_shows_everything(
    server: Any, page: chromium.Page, tmp_path: Path
) -> None:
    """Nothing is wider than the page, whatever its width."""
    for is_dark in (False, True):
        page.dark(is_dark)
        page.run("drawPages()")
        page.screenshot(tmp_path / f"{is_dark}.png")
        assert (tmp_path / f"{is_dark}.png").stat().st_size > 20_000
    page.dark(False)
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for wide in (800, 1024, 1360):
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=wide,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        assert page.run(width) == 0, wide
    assert page.complaints == []


def test_the_pool_is_killed_and_every_stream_goes_on(server: Any) -> None:
    """Here, because another server would take half a minute; ``test_deaths`` kills more."""
    kill_at_work(server, "Pool")
