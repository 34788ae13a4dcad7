"""Old names of settings, which work for one release, and other names that are accepted.

A table, applied once to the parsed file before anything is built from it: nothing downstream knows
an old name.
"""

import copy
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from triptych.core.errors import ConfigError

logger = logging.getLogger(__name__)


class Renamed(NamedTuple):
    """Where a setting is now, and values that changed with its name."""

    path: str
    values: Mapping[object, object] = {}


RENAMED: Mapping[str, Renamed] = {
    "model.served_name": Renamed("model.served_model_name"),
    "model.max_context_tokens": Renamed("model.max_model_len"),
    "model.longest_tokens": Renamed("model.max_model_len", {0: "auto"}),
    "model.window_overlap_tokens": Renamed("experimental.context_window_overlap_tokens"),
    "prefill.chunk_tokens": Renamed("prefill.max_num_batched_tokens"),
    "prefill.layers_at_once": Renamed("experimental.layers_at_once"),
    "compressor.basis": Renamed("compressor.kv_rotation", {"plain": "none", "rotated": "hadamard"}),
    "decode.max_batch_requests": Renamed("decode.max_num_seqs"),
    "decode.selection.spread": Renamed("decode.selection.head_budgets"),
    "pool.capacity_bytes": Renamed("pool.kv_cache_memory_bytes"),
    "router.patience_s": Renamed("router.max_overtake_s"),
    "router.cells": Renamed("router.shards"),
    "router.cell_overload": Renamed("router.shard_overload"),
    "router.trace_url": Renamed("router.otlp_traces_endpoint"),
}
"""Goes with the next release."""

ALIASES: Mapping[str, Renamed] = {
    "compressor.kv_cache_dtype": Renamed("compressor.policy"),
    "pool.enable_prefix_caching": Renamed("pool.prefix_bytes", {True: "auto", False: 0}),
}
"""Names that users of vLLM know. They stay."""

_VALUES: Mapping[str, Mapping[object, object]] = {"router.roles": {"switch": "dynamic"}}
"""Settings that kept their names, and values of theirs that did not."""

_CONTEXT, _LONGEST = "model.max_context_tokens", "model.longest_tokens"


def with_new_names(data: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The same settings under the names of this release, and a sentence for each old name.

    Raises: ConfigError if a setting is given under two names, or an alias has a value that it
        cannot have
    """
    found: dict[str, Any] = copy.deepcopy(dict(data))
    notes = list[str]()
    for old, new in _renamed_here(found).items():
        _move(found, old, new)
        notes.append(f"{old} is now {new.path}; the old name goes with the next release")
    for old, new in ALIASES.items():
        if _has(found, old):
            if new.values and not isinstance(_get(found, old), bool):
                raise ConfigError(f"{old}={_get(found, old)!r}: expected true or false")
            if not (_get(found, old) is True and _has(found, new.path)):
                _move(found, old, new)
            else:  # on, and how much it takes is said as well
                _take(found, old)
    for path, values in _VALUES.items():
        value = _get(found, path) if _has(found, path) else None
        if isinstance(value, str) and value in values:
            _put(found, path, values[value])
            text = f"{path}: {value} is now {path}: {values[value]}"
            notes.append(f"{text}; the old value goes with the next release")
    return found, notes


def warn_of_old_names(notes: list[str]) -> None:
    """Log what ``with_new_names`` found."""
    for note in notes:
        logger.warning("%s", note)


def _renamed_here(data: Mapping[str, Any]) -> dict[str, Renamed]:
    """Old names that a file has. With a longest sequence, the old context is a window's size."""
    here = {old: new for old, new in RENAMED.items() if _has(data, old)}
    if _CONTEXT in here and here.get(_LONGEST) and _get(data, _LONGEST) != 0:
        here[_CONTEXT] = Renamed("experimental.context_window_tokens")
    elif _CONTEXT in here and _LONGEST in here:  # 0, its default: it said nothing
        here[_LONGEST] = Renamed("")
    return here


def _move(data: dict[str, Any], old: str, new: Renamed) -> None:
    value = _take(data, old)
    if not new.path:
        return
    if _has(data, new.path):
        raise ConfigError(f"{old} and {new.path} are both given, which are one setting: keep one")
    is_key = isinstance(value, str | int | bool)
    _put(data, new.path, new.values.get(value, value) if is_key else value)


def _section(data: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """The mapping that holds the last name of a path; None: there is none."""
    at: object = data
    for name in path.split(".")[:-1]:
        at = cast("dict[str, object]", at).get(name) if isinstance(at, dict) else None
    return cast("dict[str, Any]", at) if isinstance(at, dict) else None


def _has(data: Mapping[str, Any], path: str) -> bool:
    section = _section(data, path)
    return section is not None and path.rpartition(".")[2] in section


def _get(data: Mapping[str, Any], path: str) -> Any:
    return (_section(data, path) or {})[path.rpartition(".")[2]]


def _take(data: Mapping[str, Any], path: str) -> Any:
    return (_section(data, path) or {}).pop(path.rpartition(".")[2])


def _put(data: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    at = data
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
