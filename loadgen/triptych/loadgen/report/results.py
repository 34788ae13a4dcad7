"""Read result files: ours with a row per level, and vLLM's with one level."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from triptych.core.errors import ConfigError

Plain = Mapping[str, object]

LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times")


@dataclass(frozen=True, slots=True)
class Requests:
    """All requests of a run, in order of their due times; times in seconds."""

    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    started_s: Sequence[float]
    ttft_s: Sequence[float]
    gaps_s: Sequence[Sequence[float]]
    """Time between the tokens of each answer."""


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one level of one file."""

    path: Path
    label: str
    """Label in the file, else the file name."""
    level: str
    """Level of load: ``c=4``, ``0.5/s`` or ``trace``."""
    rate_per_s: float | None
    figures: Mapping[str, float]
    """All numeric fields."""
    requests: Requests | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    series: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    simulated: bool = False
    cores: int = 1
    """Cores of the machine of the measurement."""

    @property
    def name(self) -> str:
        return f"{self.label} {self.level}"


def read_results(path: Path) -> list[Result]:
    """All levels of a result file.

    Raises: ConfigError naming the file if it is none
    """
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a result file: {error}") from error
    data = _mapping(found, path)
    rows = data.get("rows", [data])
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: expected a list of rows")
    return [_result(path, data, _mapping(row, path)) for row in cast("list[object]", rows)]


def _result(path: Path, data: Plain, row: Plain) -> Result:
    if "request_throughput" not in row:
        raise ConfigError(f"{path}: no request_throughput in it: not a result of bench serve")
    figures = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    rate = figures.get("request_rate")
    concurrency = figures.get("max_concurrency")
    pace = "trace" if rate is None else f"{rate:g}/s"
    label = row.get("label") or data.get("label") or path.stem
    return Result(
        path=path,
        label=str(label),
        level=f"c={concurrency:g}" if concurrency else pace,
        rate_per_s=rate,
        figures=figures,
        requests=_requests(path, row),
        stage_seconds=_numbers(row.get("stage_seconds")),
        series=_series(row.get("server_series")),
        simulated=bool(row.get("simulated") or data.get("simulated")),
        cores=_cores(data),
    )


def _requests(path: Path, row: Plain) -> Requests | None:
    """The lists of all requests, without those that have no answer."""
    if not all(isinstance(row.get(name), list) for name in LISTS):
        return None
    columns = [cast("list[object]", row[name]) for name in LISTS]
    if len({len(column) for column in columns}) != 1:
        raise ConfigError(f"{path}: {', '.join(LISTS)} differ in length")
    try:
        kept = [
            (int(cast("int", read)), int(cast("int", wrote)), float(cast("float", at)), first, gaps)
            for read, wrote, first, gaps, at in zip(*columns, strict=True)
            if wrote
        ]
        return Requests(
            prompt_tokens=[one[0] for one in kept],
            output_tokens=[one[1] for one in kept],
            started_s=[one[2] for one in kept],
            ttft_s=[float(cast("float", one[3])) for one in kept],
            gaps_s=[[float(gap) for gap in cast("list[float]", one[4])] for one in kept],
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a request in it makes no sense: {error}") from error


def _cores(data: Plain) -> int:
    """Number of cores in the file, at its top or under ``about``."""
    for place in (data, _inner(data, "about")):
        found = _inner(place, "host").get("cores")
        if isinstance(found, int) and found > 0:
            return found
    return 1


def _inner(data: Plain, name: str) -> Plain:
    value = data.get(name)
    return cast("Plain", value) if isinstance(value, dict) else {}


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    items = cast("dict[object, object]", value).items()
    return {str(name): float(one) for name, one in items if isinstance(one, int | float)}


def _series(value: object) -> dict[str, Sequence[float]]:
    if not isinstance(value, dict):
        return {}
    items = cast("dict[object, object]", value).items()
    return {str(name): cast("list[float]", one) for name, one in items if isinstance(one, list)}


def _mapping(value: object, path: Path) -> Plain:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object, not {type(value).__name__}")
    return cast("Plain", value)
