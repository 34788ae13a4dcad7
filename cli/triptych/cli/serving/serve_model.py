"""Write a Serve config file for ``triptych serve MODEL --port ...``."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from triptych.cli.serving.serve_file import DEFAULT
from triptych.core.errors import ConfigError

FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the command; None or empty: not given."""

    host: str | None = None
    port: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    ingresses: int | None = None
    served_model_name: Sequence[str] = ()
    api_key: Sequence[str] = ()
    dtype: str | None = None
    kv_cache_memory_bytes: str | None = None
    enable_prefix_caching: bool | None = None
    quantization: str | None = None
    generation_config: str | None = None
    chat_template: Path | None = None
    settings: Sequence[str] = ()
    """Any other setting as ``KEY=VALUE``."""

    @property
    def is_empty(self) -> bool:
        return self == ModelOptions()


def is_config_file(text: str) -> bool:
    """Whether an argument names a config file and not a model."""
    return text.endswith(FILES) or (Path(text).is_file() and not text.endswith(".gguf"))


def write_serve_file(directory: Path, model: str | None, options: ModelOptions) -> Path:
    """Write the config file for a model into a directory, and its API keys beside it.

    The directory is private, and there as long as the server runs.

    Raises: ConfigError for a setting that is not ``KEY=VALUE``
    """
    keys = directory / "keys.json"
    if options.api_key:
        keys.write_text(json.dumps(_key_entries(options.api_key)), encoding="utf-8")
    args = _args(model, options, keys)
    http: dict[str, object] = {"host": options.host or "127.0.0.1", "port": options.port or 8000}
    (app,) = _applications()
    body = {**DEFAULT, "http_options": http, "applications": [{**app, "args": args}]}
    path = directory / "serve.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return path


def _applications() -> list[dict[str, Any]]:
    return list(DEFAULT["applications"])  # type: ignore[call-overload]


def _args(model: str | None, options: ModelOptions, keys: Path) -> dict[str, Any]:
    given: dict[str, object] = {
        "model.name": model,
        "model.served_model_name": list(options.served_model_name) or None,
        "model.max_model_len": options.max_model_len,
        "model.dtype": options.dtype,
        "model.quantization": options.quantization,
        "model.generation_config": options.generation_config,
        "model.chat_template": options.chat_template and str(options.chat_template.absolute()),
        "decode.max_num_seqs": options.max_num_seqs,
        "ingress.num_replicas": options.ingresses,
        "pool.kv_cache_memory_bytes": options.kv_cache_memory_bytes or "auto",
        "pool.enable_prefix_caching": options.enable_prefix_caching,
        "ingress.api_keys": str(keys) if options.api_key else None,
    }
    found = dict[str, Any]()
    for key, value in (*given.items(), *map(_setting, options.settings)):
        if value is not None:
            _put(found, key, value)
    return found


def _setting(text: str) -> tuple[str, object]:
    """A ``KEY=VALUE``; the value is YAML."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as topology=colocated")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is not YAML") from error


def _put(settings: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    at = settings
    for section in sections:
        inner: object = at.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: {section} is a value, not a section")
        at = cast("dict[str, Any]", inner)
    at[last] = value


def _key_entries(keys: Sequence[str]) -> list[Mapping[str, str]]:
    """The entries of ``ingress.api_keys``, which hold only digests."""
    if not all(keys):
        raise ConfigError("--api-key: expected a key, not an empty text")
    return [
        {"name": f"key-{number}", "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for number, key in enumerate(keys, 1)
    ]
