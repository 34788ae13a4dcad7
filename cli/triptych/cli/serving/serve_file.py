"""Read the Triptych applications of a Ray Serve config file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from triptych.core.config import HOST, AppConfig, is_host
from triptych.core.config.cache_dirs import writable_cache_dir
from triptych.core.config.machine import usable_cores
from triptych.core.errors import ConfigError
from triptych.kvpool import bracketed

IMPORT_PATH = "triptych.deployments.app:build_app"

DEFAULT: dict[str, object] = {
    "proxy_location": "HeadOnly",
    "logging_config": {"enable_access_log": False},
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [{"name": "triptych", "route_prefix": "/", "import_path": IMPORT_PATH}],
}


@dataclass(frozen=True, slots=True)
class ServedApp:
    """One Triptych application of the file."""

    name: str
    route_prefix: str
    config: AppConfig
    topology_note: str = ""
    """Why ``topology: auto`` became what it is; empty: it was given."""


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Host and port at which the server listens."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def url(self) -> str:
        """URL for a client on the same machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{bracketed(host)}:{self.port}"

    @property
    def address(self) -> str:
        """Host and port at which the server listens."""
        return f"{bracketed(self.host)}:{self.port}"


def read_http(path: Path) -> HttpOptions:
    """``http_options`` of a Serve file.

    Raises: ConfigError naming the key and what was expected
    """
    return parse_http(read_text(path), str(path))


def parse_http(text: str, path: str) -> HttpOptions:
    """Like ``read_http``, for the text of the file ``path``."""
    body: object = yaml.safe_load(text)
    options: object = cast("dict[str, Any]", body).get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{path}: http_options={options!r}: expected a mapping")
    given, usual = cast("dict[str, Any]", options), HttpOptions()
    host, port = given.get("host", usual.host), given.get("port", usual.port)
    if not isinstance(host, str) or not is_host(host):
        raise ConfigError(f"{path}: http_options.host={host!r}: expected {HOST}")
    if type(port) is not int or not 0 < port < 65536:
        raise ConfigError(f"{path}: http_options.port={port!r}: expected 1 to 65535")
    return HttpOptions(host, port)


def read_serve_file(path: Path) -> list[ServedApp]:
    """Parse the file, and check the ``args`` of every Triptych application.

    Raises: ConfigError naming the file, the key, the value and what was expected
    """
    return parse_serve_config(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file.

    Raises: ConfigError naming it
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_serve_config(text: str, path: str) -> list[ServedApp]:
    """Like ``read_serve_file``, for the text of the file ``path``."""
    try:
        body: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    applications = (
        cast("dict[str, Any]", body).get("applications") if isinstance(body, dict) else None
    )
    if not isinstance(applications, list):
        raise ConfigError(f"{path}: no list 'applications': this is not a Ray Serve config file")
    ours = [_read_app(path, item) for item in cast("list[Any]", applications) if _is_ours(item)]
    if not ours:
        raise ConfigError(f"{path}: no application has import_path {IMPORT_PATH}")
    return ours


def check_schema(text: str, path: str) -> None:
    """Check the keys of a Serve file that Ray Serve reads itself. Imports Ray, which takes seconds.

    Raises: ConfigError naming what Ray Serve would refuse
    """
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(yaml.safe_load(text))
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: Ray Serve refuses it: {error}") from error


def default_serve_file() -> Path:
    """Write a config file with all defaults."""
    path = writable_cache_dir() / "serve.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(DEFAULT, sort_keys=False), encoding="utf-8")
    return path


def _is_ours(item: Any) -> bool:
    return isinstance(item, dict) and cast("dict[str, Any]", item).get("import_path") == IMPORT_PATH


def _read_app(path: str, item: dict[str, Any]) -> ServedApp:
    args: object = item.get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"{path}: args={args!r}: expected a mapping")
    try:
        asked, cores = AppConfig.from_mapping(cast("dict[str, object]", args)), usable_cores()
        config = asked.on_machine(cores)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    note = f" (topology: auto on {cores} cores)" if asked.topology == "auto" else ""
    name, prefix = str(item.get("name", "default")), str(item.get("route_prefix", "/"))
    return ServedApp(name, prefix, config, note)
