"""The result file: what was asked, every turn, and the summary."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import Conditions
from benchmarks.peers.rounds import Measured, Plan
from benchmarks.peers.summary import ratios, summarize
from triptych.cli.output import write_json
from triptych.core.errors import ConfigError
from triptych.loadgen.report.host import HostInfo


def read(path: Path, conditions: Conditions) -> list[Measured]:
    """Turns that are in the file; none if there is no file.

    Raises: ConfigError if they were measured under other conditions
    """
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["conditions"] != asdict(conditions):
        raise ConfigError(
            f"{path} holds rounds with {found['conditions']}, not {asdict(conditions)}: "
            "give the same options, or another --out"
        )
    return [_measured(row) for row in found["rows"]]


def write(
    path: Path, host: HostInfo, conditions: Conditions, plan: Plan, rows: Sequence[Measured]
) -> dict[str, object]:
    """Write the file; returns what is in it."""
    data: dict[str, object] = {
        "host": host,
        "conditions": asdict(conditions),
        "plan": asdict(plan),
        "summary": [asdict(one) for one in summarize(plan, rows)],
        "ratios": [asdict(one) for one in ratios(plan, rows)],
        "rows": [asdict(row) | {"disturbed": plan.is_disturbed(row)} for row in rows],
    }
    write_json(data, path)
    return data


def _measured(row: dict[str, Any]) -> Measured:
    """A turn from its row. Whether it was disturbed is judged anew, by the limit of this run."""
    return Measured(**{name: value for name, value in row.items() if name != "disturbed"})
