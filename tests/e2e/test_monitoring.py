"""Prometheus reads a server that works, and every panel and rule has something to show."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import free_port
from tests.prometheus import Prometheus, program, prometheus
from tests.unit.k8s.test_monitoring import COMPONENT, panels

pytestmark = pytest.mark.e2e

SPEC = yaml.safe_load((COMPONENT / "rules.yaml").read_text())["spec"]
GRAFANA = {"$__rate_interval": "5m", "$namespace": "triptych", "$pod": ".+"}


@pytest.fixture(scope="module")
def watched(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has seen a server before, while and after it answered."""
    program("prometheus")
    disk = {"disk_path": str(tmp_path_factory.mktemp("disk")), "disk_bytes": 64 << 20}
    server = start(topology="colocated", pool={"capacity_bytes": 256 << 20, **disk})
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
