"""The file of a frontier study: a line for each result, written as it comes.

A study that is stopped goes on where it was, and methods can be added to a finished one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Footprint
from triptych.evals.metrics.fidelity import Steps


class Record(Protocol):
    """A line of the file."""

    def as_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """Result of one method on one probe."""

    method: str
    group: str
    case: str
    steps: Steps | None
    """None: the probe scores no text."""
    tokens: tuple[int, ...]
    """Its greedy tokens."""
    footprint: Footprint

    def as_json(self) -> dict[str, object]:
        steps = None if self.steps is None else self.steps.as_json()
        return {**asdict(self), "steps": steps, "kind": "probe"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises: KeyError, TypeError if a value is missing or of another kind"""
        return cls(
            method=data["method"],
            group=data["group"],
            case=data["case"],
            steps=None if data["steps"] is None else Steps.from_json(data["steps"]),
            tokens=tuple(data["tokens"]),
            footprint=Footprint(**data["footprint"]),
        )


@dataclass(frozen=True, kw_only=True)
class TimeRecord:
    """Time that a method takes to compress prompts of one length, several at once."""

    method: str
    context: int
    batch: int
    """Prompts that are compressed in one step."""
    compress_us: float
    """Microseconds per prompt token, from the message of the router to the handles."""
    prefill_us: float
    """Microseconds per prompt token of the prefill of one prompt, with what the method needs."""

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "kind": "time"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises: TypeError if a value is missing"""
        return cls(**{name: value for name, value in data.items() if name != "kind"})


@dataclass(frozen=True)
class RecordFile:
    """Results in a file of JSON lines, whose first line has the conditions."""

    path: Path

    @property
    def logits_folder(self) -> Path:
        """Folder of the full cache's logits."""
        return self.path.with_name(f"{self.path.name}.logits")

    def open(self, conditions: Mapping[str, object]) -> None:
        """Begin the file, or check that it has the same conditions.

        Raises: ConfigError if it has other conditions, or is no such file
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"kind": "conditions", **conditions})
            return
        known = next(self._lines(), dict[str, Any]())
        here = json.loads(json.dumps({"kind": "conditions", **conditions}))
        other = [name for name in here.keys() | known.keys() if here.get(name) != known.get(name)]
        if other:
            told = ", ".join(f"{name}={known.get(name)!r}" for name in sorted(other))
            raise ConfigError(
                f"records={str(self.path)!r}: of another study ({told}); give the same settings, "
                "or name another file"
            )
        if not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")  # ends a line that was cut off

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self._append(record.as_json())

    def probes(self) -> list[ProbeRecord]:
        return [ProbeRecord.from_json(one) for one in self.of_kind("probe")]

    def times(self) -> list[TimeRecord]:
        return [TimeRecord.from_json(one) for one in self.of_kind("time")]

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        """Records of a kind."""
        return (one for one in self._lines() if one.get("kind") == kind)

    def _append(self, data: Mapping[str, object]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Lines of the file; one that was cut off when the study was killed is left out.

        Raises: ConfigError if the first line is not JSON
        """
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines()):
            try:
                yield json.loads(line)
            except ValueError:
                if number == 0:
                    text = f"records={str(self.path)!r}: not a file of this command"
                    raise ConfigError(text) from None
