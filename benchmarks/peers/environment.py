"""A virtual environment for each peer, made once in the cache directory."""

import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from triptych.cli.output import notes
from triptych.core.config.cache_dirs import writable_cache_dir

MADE = "made.json"
"""Written last, so that an environment that pip did not finish is made again."""


def peers_dir() -> Path:
    """Where environments, weights and logs of the peers lie."""
    return writable_cache_dir() / "peers"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Packages of one peer, apart from ours."""

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Packages that come as dependencies and break the peer."""
    build_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables while pip builds the packages."""
    finish: Callable[[Path], None] | None = None
    """What else ``site_packages`` needs."""

    @property
    def path(self) -> Path:
        return peers_dir() / "environments" / self.name

    def program(self, name: str) -> str:
        """Path of one of its programs."""
        return str(self.path / "bin" / name)

    @property
    def site_packages(self) -> Path:
        """Where its packages lie."""
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.path)}))

    def make(self) -> None:
        """Make the environment, unless it is there with these packages.

        Raises: CalledProcessError if pip cannot install them
        """
        if _made_with(self.path) == list(self.packages):
            return
        notes.print(f"{self.name}: installing {', '.join(self.packages)}")
        venv.create(self.path, with_pip=True, clear=True)
        self._pip("install", *self.packages)
        if self.unwanted:
            self._pip("uninstall", "--yes", *self.unwanted)
        if self.finish is not None:
            self.finish(self.site_packages)
        (self.path / MADE).write_text(json.dumps(list(self.packages)), encoding="utf-8")

    def _pip(self, *arguments: str) -> None:
        command = [self.program("python"), "-m", "pip", "--no-input", "-qq", *arguments]
        subprocess.run(command, check=True, env=inherited(self.build_variables))


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with these variables."""
    return {**os.environ, **variables}


def _made_with(path: Path) -> list[str] | None:
    """Packages of a finished environment."""
    made = path / MADE
    return json.loads(made.read_text(encoding="utf-8")) if made.is_file() else None
