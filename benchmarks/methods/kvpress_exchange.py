"""Cases and records as JSON files: kvpress runs in an environment of its own."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Footprint
from triptych.evals.metrics.fidelity import Steps
from triptych.evals.studies.runner import Group, Record, Records

CASES = "cases.json"
"""The cases to run; every other JSON file of the folder holds one method's records."""


def write_cases(folder: Path, model: Path, revision: str, groups: Sequence[Group]) -> None:
    """Write all groups, with a hash that results must name."""
    body = [asdict(group) for group in groups]
    content = {"model": str(model), "job": job_hash(revision, groups), "groups": body}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CASES).write_text(json.dumps(content), encoding="utf-8")


def job_hash(revision: str, groups: Sequence[Group]) -> str:
    """Changes with the model and with any token of any case."""
    text = json.dumps([revision, [asdict(group) for group in groups]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_records(folder: Path, revision: str, groups: Sequence[Group]) -> dict[str, Records]:
    """Records of every method whose file lies in the folder, by method name.

    Raises: ConfigError for a file that cannot be read, or that belongs to other cases
    """
    found = dict[str, Records]()
    for path in sorted(folder.glob("*.json")):
        if path.name != CASES:
            name, records = _read(path, job_hash(revision, groups), groups)
            found[name] = records
    return found


def _read(path: Path, job: str, groups: Sequence[Group]) -> tuple[str, Records]:
    try:
        content = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        if content["job"] != job:
            raise ConfigError(
                f"{path}: was made for other cases ({content['job']}, expected {job}); remove it"
            )
        body = cast("dict[str, list[dict[str, Any]]]", content["groups"])
        records = {group.name: [_record(one) for one in body[group.name]] for group in groups}
        return str(content["method"]), records
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: no records of a method: {error!r}") from error


def _record(data: Mapping[str, Any]) -> Record:
    steps = data["steps"]
    return Record(
        case=str(data["case"]),
        steps=None if steps is None else Steps.from_json(steps),
        tokens=tuple(int(token) for token in data["tokens"]),
        footprint=Footprint(**data["footprint"]),
    )
