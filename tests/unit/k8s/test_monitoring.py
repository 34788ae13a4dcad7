"""Alerts and the dashboard ask only for what the code exports."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.k8s.kustomize import Body, render
from tests.unit.k8s.test_manifests import K8S, pod_templates, rendered, validate
from triptych.core.messages import Report
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.monitoring.status import Status
from triptych.kvpool import LocalPool
from triptych.kvpool.pool.stats import DiskStats
from triptych.router import RouterSnapshot

COMPONENT = K8S / "components" / "monitoring"
DASHBOARD = json.loads((COMPONENT / "dashboard.json").read_text(encoding="utf-8"))
VARIABLES = {"$__rate_interval": "5m", "$namespace": ".*", "$pod": ".*"}
"""What Grafana puts in before it asks Prometheus."""
ADDED_LABELS = {"namespace", "pod", "ray_io_cluster", "le"}
"""By Prometheus and the PodMonitors, and by histograms."""


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Body]]:
    """The base with the component, as the documentation says to put them together."""
    folder = tmp_path_factory.mktemp("overlay")
    near = {name: os.path.relpath(K8S / name, folder) for name in ("base", "components/monitoring")}
    spec = {"resources": [near["base"]], "components": [near["components/monitoring"]]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(spec))
    return folder, render(folder)


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every metric of a server that has seen some of everything, with the names of its labels."""
    with LocalPool(16, 256, "w") as pool:
        ledger = replace(pool.stat(), disk=DiskStats(capacity_bytes=1, skipped={"full": 1}))
    router = RouterSnapshot(
        requests={"waiting": 1},
        booked_bytes={"a": 1},
        capacity_bytes=1,
        blocked_reason="",
        oldest_waiting_s=1.0,
        counters={"fits": 1},
        workers=(),
    )
    report = Report(
        name="w", running=0, waiting=0, pages_held=0, busy_s=1.0, prefixes_skipped={"busy": 1}
    )
    status = Status(router, (ledger,), (report,))
    ingress = IngressMetrics()
    ingress.success.labels("stop").inc()
    ingress.rejections.labels("overloaded").inc()
    text = ingress.exposition(status.gauges()).decode()
    found = dict[str, set[str]]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def rules(bodies: list[Body]) -> Iterator[Body]:
    (body,) = [body for body in bodies if body["kind"] == "PrometheusRule"]
    for group in body["spec"]["groups"]:
        yield from group["rules"]


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a parsed query."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        below = getattr(node, name, None)
        if below is not None and not isinstance(below, str):
            yield from selectors(below)
    for below in getattr(node, "args", None) or []:
        yield from selectors(below)


def labels_used(node: Any) -> Iterator[str]:
    """Labels that a query groups by."""
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql.AggregateExpr) and modifier is not None:
        yield from modifier.labels
    for name in ("expr", "lhs", "rhs"):
        below = getattr(node, name, None)
        if below is not None:
            yield from labels_used(below)
    for below in getattr(node, "args", None) or []:
        yield from labels_used(below)


def check_query(text: str, known: dict[str, set[str]]) -> None:
    """Fail for a query that cannot be read, or asks for a metric or label that nobody exports."""
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    query = promql.parse(text)
    found = list(selectors(query))
    assert found, f"{text}: asks for nothing"
    labels = set[str](ADDED_LABELS)
    for selector in found:
        assert selector.name in known, f"{text}: no metric {selector.name}"
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= known[selector.name] | ADDED_LABELS, f"{text}: labels {matched}"
        labels |= known[selector.name]
    assert set(labels_used(query)) <= labels, f"{text}: groups by a label that is not there"


def test_every_panel_asks_for_what_is_exported(exported: dict[str, set[str]]) -> None:
    found = list(panels())
    assert len(found) > 30
    for _, query in found:
        check_query(query, exported)


def test_every_rule_asks_for_what_is_exported_or_recorded(
    monitored: tuple[Path, list[Body]], exported: dict[str, set[str]]
) -> None:
    found = list(rules(monitored[1]))
    recorded = {rule["record"]: set[str]() for rule in found if "record" in rule}
    assert len(found) > 10
    for rule in found:
        check_query(rule["expr"], {**exported, **recorded})


@pytest.mark.parametrize(
    "query",
    ["triptych_pool_upp", "rate(triptych_pool_up[5m)", "sum by (stag) (triptych_workers)",
     'triptych_workers{stages="decode"}', "vector(1)"],
)  # fmt: skip
def test_a_wrong_query_is_found(query: str, exported: dict[str, set[str]]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_query(query, exported)


def test_most_of_what_is_exported_is_shown(exported: dict[str, set[str]]) -> None:
    """A metric that is added is to be looked at, unless it says little by itself."""
    shown = " ".join(query for _, query in panels())
    families = {name.removesuffix("_bucket") for name in exported} - {
        name for name in exported if name.endswith(("_sum", "_count", "_created"))
    }
    missing = {name for name in families if name not in shown}
    assert len(missing) < len(families) / 3, f"not shown: {sorted(missing)}"


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_component_is_valid_and_selects_ports_that_pods_have(
    monitored: tuple[Path, list[Body]],
) -> None:
    folder, bodies = monitored
    for body in bodies:
        validate(body)
    pods = [template for _, template in pod_templates([*bodies, *rendered("overlays/autoscaled")])]
    for monitor in [body for body in bodies if body["kind"] == "PodMonitor"]:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        hit = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        ports = {port["name"] for pod in hit for port in pod["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    (dashboard,) = [b for b in bodies if b["metadata"]["name"] == "triptych-dashboard"]
    assert json.loads(dashboard["data"]["dashboard.json"]) == DASHBOARD
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize", str(folder)]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        theirs = {(b["kind"], b["metadata"]["name"]): b for b in yaml.safe_load_all(done.stdout)}
        assert theirs == {(b["kind"], b["metadata"]["name"]): b for b in bodies}


def test_every_alert_says_what_to_do(monitored: tuple[Path, list[Body]]) -> None:
    for rule in rules(monitored[1]):
        if "alert" in rule:
            assert {"summary", "description"} <= rule["annotations"].keys()
            assert rule["labels"]["severity"] in {"warning", "critical"}
