"""Plug-in lookup: a literal table per kind, entry points of third parties, or any module's object.

Names come from the operator's configuration only, never from a request: ``module:object`` imports
that module.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from triptych.core.errors import ConfigError

T = TypeVar("T")

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@cache
def _third_party(kind: str) -> dict[str, EntryPoint]:
    """Entry points of one kind that installed packages declare, by name."""
    return {point.name: point for point in entry_points(group=f"triptych.{kind}")}


@dataclass(frozen=True)
class PluginNames:
    """The names of one kind of plug-in, checked without importing a plug-in.

    Third parties add names with entry points in the group ``triptych.<kind>``.
    """

    kind: str
    """Such as ``batch_policies``."""
    builtin: Collection[str]
    """Names of the plug-ins that come with Triptych."""

    @property
    def names(self) -> list[str]:
        """Built-in and third-party names, sorted."""
        return sorted(self._all)

    @property
    def _all(self) -> dict[str, None]:
        return dict.fromkeys((*_third_party(self.kind), *self.builtin))

    def check(self, name: str) -> None:
        """Raise ``ConfigError`` if there is no such plug-in."""
        if name not in self._all and not _REFERENCE.fullmatch(name):
            near = get_close_matches(name, self._all, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{self.kind}: no plug-in {name!r}{hint} (have {self.names}, or 'module:object')"
            )


@dataclass(frozen=True)
class Registry(PluginNames, Generic[T]):
    """Names to factories for one kind of plug-in.

    A third party cannot replace a built-in. ``module:object`` needs no entry point: one file on
    the Python path of all processes is enough. Loading imports the object and has no other effect.
    """

    builtin: Mapping[str, str]
    """Names to ``module:object``."""

    @cached_property
    def _found(self) -> dict[str, EntryPoint]:
        group = f"triptych.{self.kind}"
        ours = {name: EntryPoint(name, target, group) for name, target in self.builtin.items()}
        return _third_party(self.kind) | ours

    def load(self, name: str) -> T:
        """Raises: ConfigError if there is no such plug-in, or what it names cannot be imported"""
        self.check(name)
        if name in self._found:
            return self._found[name].load()
        try:
            return EntryPoint(name, name, f"triptych.{self.kind}").load()
        except (ImportError, AttributeError) as error:
            text = f"{self.kind}: {name!r} cannot be imported ({error}): is it on PYTHONPATH?"
            raise ConfigError(text) from error
