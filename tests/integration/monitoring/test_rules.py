"""Prometheus' own tool reads the rules, and plays to them what they are there for."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus import program

RULES = Path(__file__).parents[3] / "k8s" / "components" / "monitoring" / "rules.yaml"
PLAY = Path(__file__).with_name("rules_test.yaml")


@pytest.fixture
def spec() -> dict[str, Any]:
    return yaml.safe_load(RULES.read_text())["spec"]


def promtool(folder: Path, spec: dict[str, Any], *arguments: str) -> None:
    (folder / "rules.yml").write_text(json.dumps(spec))
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_them(spec: dict[str, Any], tmp_path: Path) -> None:
    promtool(tmp_path, spec, "check", "rules", "--lint=all", "--lint-fatal", "rules.yml")


def test_each_alert_fires_for_what_it_is_meant_for(spec: dict[str, Any], tmp_path: Path) -> None:
    play = yaml.safe_load(PLAY.read_text())
    alerts = [rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule]
    checks = [check for test in play["tests"] for check in test["alert_rule_test"]]
    silent = {check["alertname"] for check in checks if "exp_alerts" not in check}
    firing = {check["alertname"] for check in checks if "exp_alerts" in check}
    assert silent == firing == {rule["alert"] for rule in alerts}
    for rule in alerts:
        del rule["annotations"]["description"]
    (tmp_path / PLAY.name).write_text(PLAY.read_text())
    promtool(tmp_path, spec, "test", "rules", PLAY.name)
