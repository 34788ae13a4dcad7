"""The result file of ``triptych eval claims``, which a second run completes."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from triptych.cli.output import write_json
from triptych.core.errors import ConfigError
from triptych.core.schema import SchemaError
from triptych.evals.claims.claims_results import ClaimsResults
from triptych.evals.claims.verdicts import verdicts
from triptych.loadgen.report.host import HostInfo, host_info


@dataclass(frozen=True, kw_only=True)
class ClaimsFile:
    """A file and what it held when it was opened."""

    path: Path | None
    """None: nothing is written."""
    known: ClaimsResults
    seconds_before: float = 0.0
    """Duration of the runs that measured ``known``."""
    earlier_hosts: tuple[HostInfo, ...] = ()
    """Conditions of those runs, the first one first."""
    started: float = field(default_factory=time.monotonic)
    host: HostInfo = field(default_factory=host_info)

    @classmethod
    def open(cls, path: Path | None, conditions: Mapping[str, object]) -> Self:
        """Read what is in the file; nothing is, if there is no file.

        Raises: ConfigError if it was measured under other conditions, or has no such figures
        """
        if path is None or not path.is_file():
            return cls(path=path, known=ClaimsResults(conditions=dict(conditions)))
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            known = ClaimsResults.from_json(data)
        except (ValueError, SchemaError) as error:
            raise ConfigError(f"{path}: not a file of this command ({error})") from error
        _check(path, known.conditions, conditions)
        return cls(
            path=path,
            known=known,
            seconds_before=data.get("seconds", 0.0),
            earlier_hosts=(*data.get("earlier_hosts", ()), data.get("host", {})),
        )

    def write(self, found: ClaimsResults) -> None:
        """Replace the file, at once for readers."""
        if self.path is not None:
            seconds = round(self.seconds_before + time.monotonic() - self.started, 1)
            earlier = {"earlier_hosts": self.earlier_hosts} if self.earlier_hosts else {}
            told = {"claims": [asdict(one) for one in verdicts(found)], **found.as_json()}
            write_json({"host": self.host, **earlier, "seconds": seconds, **told}, self.path)


def _check(path: Path, known: Mapping[str, object], conditions: Mapping[str, object]) -> None:
    """Raises: ConfigError naming the conditions that differ"""
    asked = json.loads(json.dumps(conditions))  # tuples are lists in the file
    other = [name for name in sorted(asked.keys() | known) if asked.get(name) != known.get(name)]
    if other:
        told = ", ".join(f"{name}={known.get(name)!r}, not {asked.get(name)!r}" for name in other)
        raise ConfigError(
            f"{path} was measured with {told}: give the same options, or another --json"
        )
