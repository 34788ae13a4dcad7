"""``triptych config``: list the settings under ``args:`` of the Serve config file."""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from triptych.cli.output import JsonFlag, console
from triptych.core import config as settings
from triptych.core.config import StepPluginConfig

app = typer.Typer(help="Describe the settings of the config file.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration."""

    key: str
    """Dotted path below ``args:``."""
    type: str
    default: object
    unit: str
    """Empty: it has none."""
    meaning: str

    def __str__(self) -> str:
        unit = f", {self.unit}" if self.unit else ""
        return f"{self.default!r}  ({self.type}{unit})"


@app.callback()
def group() -> None:
    """Describe the settings of the config file."""


@app.command()
def explain(as_json: JsonFlag = False) -> None:
    """List every setting of the config file with its default, type, unit and description."""
    found = list(all_settings(settings.AppConfig))
    if as_json:
        typer.echo(json.dumps([asdict(setting) for setting in found], indent=2))
        return
    for setting in found:
        console.print(f"[bold]{setting.key}[/bold]: {escape(str(setting))}")
        console.print(f"    {setting.meaning}", markup=False, soft_wrap=True)


def all_settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    """Walk a config dataclass and those nested in it, in the order of the source."""
    hints, meanings = get_type_hints(cls), field_docstrings(cls)
    for field in fields(cast("Any", cls)):
        hint, key = hints[field.name], prefix + field.name
        if is_dataclass(hint):
            yield from all_settings(cast("type", hint), f"{key}.")
        else:
            yield Setting(
                key,
                _type_name(hint),
                _default(field),
                _unit(field.name),
                meanings.get(field.name, ""),
            )


def field_docstrings(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line."""
    body = cast("ast.ClassDef", ast.parse(inspect.getsource(cls).strip()).body[0]).body
    found = dict[str, str]()
    for field, below in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(str(below.value.value).replace("``", "`").split())
    return found


def _unit(name: str) -> str:
    """The unit that a name ends with; that of a rate stands before its seconds."""
    units = {"bytes_s": "bytes/s", "s": "s"} | {
        unit: unit for unit in ("bytes", "tokens", "pages", "requests", "layers")
    }
    return next((unit for end, unit in units.items() if name.endswith(f"_{end}")), "")


def _default(field: "Field[Any]") -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type_name(option) for option in get_args(hint))
    if get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        return f"list of {_type_name(get_args(hint)[0])}"
    if get_origin(hint) is tuple:
        return f"[{', '.join(_type_name(option) for option in get_args(hint))}]"
    if get_origin(hint) is dict:
        key, value = (_type_name(option) for option in get_args(hint))
        return f"{key} to {value}"
    if hint is StepPluginConfig:
        return "entry"
    return hint.__name__ if isinstance(hint, type) else str(hint)
