"""Read recorded traces (BurstGPT CSV, Mooncake JSON lines) as sessions."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from triptych.core.errors import ConfigError
from triptych.loadgen.workload.turns import Segment, Session, Turn

BLOCK_TOKENS = 512
"""Tokens per hash of a Mooncake trace."""

CSV_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> tuple[Session, ...]:
    """Read a ``.csv`` or ``.jsonl`` trace; its first request is due at 0.

    ``speed`` of 2 sends twice as fast as recorded. ``limit`` stops after so many requests.
    Requests without an answer, which BurstGPT keeps as failures, are left out.

    Raises: ConfigError naming file and line if something in it makes no sense
    """
    readers = {".csv": _csv_sessions, ".jsonl": _json_sessions}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: a trace ends in {' or '.join(readers)}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return _scaled(reader(path, lines), path, speed, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _scaled(
    found: Iterator[Session], path: Path, speed: float, limit: int | None
) -> tuple[Session, ...]:
    sessions = list[Session]()
    for session in found:
        if limit is not None and len(sessions) >= limit:
            break
        sessions.append(session)
    if not sessions:
        raise ConfigError(f"{path}: no request in it")
    sessions.sort(key=lambda session: session.start_s)
    first = sessions[0].start_s
    return tuple(Session(one.turns, (one.start_s - first) / speed) for one in sessions)


def _csv_sessions(path: Path, lines: Iterator[str]) -> Iterator[Session]:
    """BurstGPT: ``Timestamp,Model,Request tokens,Response tokens,...`` with seconds."""
    rows = csv.DictReader(lines, strict=True)
    missing = [name for name in CSV_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}:1: no column {missing[0]!r} (need {', '.join(CSV_COLUMNS)})")
    try:
        for row in rows:
            at, where = rows.line_num, f"{path}:{rows.line_num}"
            numbers = [_number(row[name], name, where) for name in CSV_COLUMNS]
            if numbers[2] >= 1:
                yield _session(f"row{at}", *numbers, where=where)
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.reader.line_num}: {error}") from error


def _json_sessions(path: Path, lines: Iterator[str]) -> Iterator[Session]:
    """Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``."""
    for at, line in enumerate(lines, 1):
        where = f"{path}:{at}"
        if not line.strip():
            continue
        try:
            found: object = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: expected an object, not {type(found).__name__}")
        entry = cast("dict[str, Any]", found)
        names = ("timestamp", "input_length", "output_length")
        at_ms, prompt, output = (_number(entry.get(name), name, where) for name in names)
        session = _session(f"line{at}", at_ms / 1e3, prompt, output, where=where)
        hashes: object = entry.get("hash_ids", [])
        yield _with_blocks(session, hashes, where) if hashes else session


def _number(value: object, name: str, where: str) -> float:
    try:
        number = float(cast("str", value))
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {name} is {value!r}: expected a number") from None
    if not 0 <= number < 1e12:
        raise ConfigError(f"{where}: {name} is {value!r}: expected a number from 0 on")
    return number


def _session(name: str, at_s: float, prompt: float, output: float, *, where: str) -> Session:
    if prompt < 1:
        raise ConfigError(f"{where}: a prompt of {prompt:g} tokens: expected one at least")
    if prompt != int(prompt) or output != int(output):
        raise ConfigError(f"{where}: tokens {prompt!r} and {output!r}: expected whole numbers")
    return Session((Turn((Segment(name, int(prompt)),), max(1, int(output))),), at_s)


def _with_blocks(session: Session, hashes: object, where: str) -> Session:
    """The session with a prompt of blocks; equal hashes give equal tokens."""
    items = cast("list[object]", hashes) if isinstance(hashes, list) else [None]
    if not all(isinstance(item, int | str) for item in items):
        raise ConfigError(f"{where}: hash_ids: expected a list of numbers")
    (turn,) = session.turns
    need = -(-turn.prompt_tokens // BLOCK_TOKENS)
    if len(items) < need:
        raise ConfigError(
            f"{where}: {len(items)} hash_ids for {turn.prompt_tokens} tokens: "
            f"expected {need}, one for each {BLOCK_TOKENS}"
        )
    left = turn.prompt_tokens
    segments = list[Segment]()
    for item in items[:need]:
        segments.append(Segment(f"block{item}", min(BLOCK_TOKENS, left)))
        left -= BLOCK_TOKENS
    return Session((Turn(tuple(segments), turn.output_tokens),), session.start_s)
