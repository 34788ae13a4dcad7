"""Writes the parts of the documents that are generated from the code: ``make docs``.

A document has a pair of marks, ``<!-- generated: NAME -->`` and ``<!-- end -->``, around each such
part; the text between them is replaced. Words after the name are arguments, as in
``<!-- generated: cli bench serve -->``. ``tests/arch/test_generated_docs.py`` compares.
"""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import getdoc, isclass, isfunction
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from typer.main import get_command

from tests.arch.result_tables import (
    RESULTS,
    adaptive_choices,
    adaptive_links,
    adaptive_memory,
    claims,
    compress_times,
    frontier,
    image_methods,
    pipelines,
    reclaim,
    simulated_reclaim,
    static_kernels,
    table,
)
from triptych.cli.checks import diagnosis
from triptych.cli.config import Setting, all_settings
from triptych.cli.main import app
from triptych.core import errors
from triptych.core.config import AppConfig, StepPluginConfig
from triptych.core.layout import FORMATS, PageLayout
from triptych.core.methods.composition import Method
from triptych.core.methods.table import METHODS
from triptych.deployments.grpc.service import CODES
from triptych.kvpool.plugins import EVICTION_POLICIES
from triptych.router.plugins import BATCH_POLICIES, PLACEMENT_POLICIES
from triptych.workers.plugins import STEP_PLUGINS

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "docs/benchmarks.md",
    "docs/cli.md",
    "docs/configuration.md",
    "docs/extending.md",
    "docs/features.md",
    "docs/papers.md",
    "docs/quality.md",
    "docs/simulator.md",
    "docs/troubleshooting.md",
)
PARTS = ("core", "kernels", "kvpool", "router", "workers", "simulator", "evals")
MARKED = re.compile(r"(<!-- generated: (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
SOURCE = re.compile(r"Source:\s+(.+?)(?=\n\s*\n|\n\s*[A-Z]\w+:\s|\Z)", re.DOTALL)


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.;]) ", paragraph)[0].rstrip(".;")


# ---------------------------------------------------------------- configuration


def configuration() -> str:
    """Every setting, by the part of the configuration that it stands in."""
    meanings = dict(_sections(AppConfig))
    told = list[str]()
    for section, settings in groupby(all_settings(AppConfig), key=_section):
        title = f"`{section}`" if section else "The application"
        rows = [_row(setting) for setting in settings]
        told.append(f"## {title}\n\n{meanings[section]}\n\n")
        told.append(table(("setting", "default", "unit", "type", "meaning"), rows) + "\n")
    rows = [_row(setting) for setting in all_settings(StepPluginConfig)]
    told.append(f"## An entry of `decode.plugins`\n\n{getdoc(StepPluginConfig)}\n\n")
    told.append(table(("setting", "default", "unit", "type", "meaning"), rows) + "\n")
    return "".join(told)


def _section(setting: Setting) -> str:
    return setting.key.rpartition(".")[0]


def _row(setting: Setting) -> tuple[str, ...]:
    name = setting.key.rpartition(".")[2]
    return f"`{name}`", f"`{setting.default!r}`", setting.unit, setting.type, setting.meaning


def _sections(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    yield prefix, " ".join((getdoc(cls) or "").split()).replace("``", "`")
    hints: dict[str, Any] = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from _sections(hints[field.name], f"{prefix}.{field.name}".lstrip("."))


# ---------------------------------------------------------------- features and papers


def formats() -> str:
    """What each page format holds, at the shape of SmolLM2's heads."""
    head_dim, page_bytes = 64, 3584
    raw = FORMATS["fp16"].read_bytes(head_dim)
    rows = [
        (
            f"`{name}`",
            f"{form.key_bits}",
            f"{form.value_bits}",
            f"{PageLayout(form, head_dim, page_bytes).read_bytes:.4g}",
            f"{raw / PageLayout(form, head_dim, page_bytes).read_bytes:.2f}x",
            f"{PageLayout(form, head_dim, page_bytes).tokens}",
        )
        for name, form in FORMATS.items()
    ]
    head = (
        "format",
        "bits of keys",
        "of values",
        "bytes read per token",
        "smaller than FP16",
    )
    return table((*head, f"tokens in a page of {page_bytes:,} bytes"), rows)


def methods() -> str:
    """The built-in compression methods and their parts, each with its smallest unit."""
    roles = ("scorer", "budget", "merger", "basis", "codec")
    rows = list[tuple[str, ...]]()
    for name in METHODS.builtin:
        method = METHODS.load(name)
        assert isinstance(method, Method)
        parts = [getattr(method, role) for role in roles]
        cells = ["-" if part is None else f"{part.name} ({part.granularity})" for part in parts]
        rows.append((f"`{name}`", method.idea, *cells, ", ".join(sorted(method.needs)) or "-"))
    return table(("method", "idea", *roles, "needs"), rows)


def policies() -> str:
    """What stands in the plug-in tables."""
    kinds = (
        ("compression", "compressor.policy", METHODS),
        ("batching", "router.batch_policy", BATCH_POLICIES),
        ("placement", "router.placement", PLACEMENT_POLICIES),
        ("decode step", "decode.plugins", STEP_PLUGINS),
        ("eviction of prefixes", "pool.prefix_eviction", EVICTION_POLICIES),
    )
    rows = [
        (kind, f"`{setting}: {name}`", _what_it_does(name, registry.builtin))
        for kind, setting, registry in kinds
        for name in registry.builtin
    ]
    return table(("kind", "setting", "what it does"), rows)


def _what_it_does(name: str, table: Mapping[str, str]) -> str:
    """First sentence of a plug-in's docstring, or, of a second name, the first one."""
    first = next(other for other, target in table.items() if target == table[name])
    return first_sentence(_told(table[name])) if first == name else f"An alias of `{first}`"


def _told(target: str) -> str:
    """The docstring of a plug-in; of an object that has none of its own, that of its module."""
    module, _, name = target.partition(":")
    home = import_module(module)
    plugin = getattr(home, name)
    return getdoc(plugin if isfunction(plugin) or isclass(plugin) else home) or ""


def papers() -> str:
    """Every ``Source:`` line of the code: whose idea it is, for what, and where."""
    rows = [
        (source, meaning, f"[{'/'.join(path.with_suffix('').parts[2:])}](../{path.as_posix()})")
        for part in PARTS
        for path in sorted(p.relative_to(ROOT) for p in (ROOT / part).rglob("*.py"))
        for source, meaning in _sources(ROOT / path)
    ]
    return table(("source", "used for", "where"), sorted(rows))


def _sources(path: Path) -> Iterator[tuple[str, str]]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and (found := SOURCE.search(text)):
            source = " ".join(found[1].split()).split(". ")[0]
            yield source.rstrip("."), first_sentence(text)


# ---------------------------------------------------------------- troubleshooting


def error_tree() -> str:
    """Every error that a client can get, by status."""
    rows = [
        (
            str(error.http_status),
            f"`{CODES[error.http_status].name}`",
            f"`{error.code}`" if error.code else "",
            "yes" if error.retryable else "no",
            " ".join((error.__doc__ or "").split("\n\n")[0].split()).replace("``", "`"),
        )
        for error in sorted(_tree(errors.TriptychError), key=lambda one: one.http_status)
        if error.http_status not in {499, 500}
    ]
    return table(
        ("status", "over gRPC", "`code`", "a retry helps", "what happened"), dict.fromkeys(rows)
    )


def _tree(error: type[errors.TriptychError]) -> Iterator[type[errors.TriptychError]]:
    yield error
    for kind in error.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from _tree(kind)


def remedies() -> str:
    """Every fault and warning of ``triptych doctor``, with what it advises."""
    module = ast.parse(Path(diagnosis.__file__).read_text(encoding="utf-8"))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    rows = [row for check in diagnosis.CHECKS for row in _findings(functions[check.__name__])]
    return table(("what", "found", "remedy"), rows)


def _findings(function: ast.FunctionDef) -> Iterator[tuple[str, ...]]:
    texts = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="Finding"), args=[check, status, what, remedy]):
                if not (isinstance(status, ast.Constant) and status.value == "ok"):
                    yield _text(check, texts), _text(what, texts), _text(remedy, texts)


def _text(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """The text of a literal; what is only known when it runs becomes an ellipsis."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, known) for value in values)
        case ast.Name(id=name) if name in known:
            return _text(known[name], {})
        case _:
            return "…"


# ---------------------------------------------------------------- command line


def command_line(*path: str) -> str:
    """Help, usage and options of one command; without a path, a table of all commands."""
    if not path:
        rows = [
            (f"[`{' '.join(names)}`](#triptych-{'-'.join(names)})", first_sentence(command.help))
            for names, command in all_commands().items()
        ]
        return table(("command", "purpose"), rows)
    command = all_commands()[path]
    with command.make_context("triptych", [], resilient_parsing=True) as context:
        rows = [_parameter(parameter, context) for parameter in command.params]
    usage = " ".join(["triptych", *path, *filter(None, map(_usage, command.params)), "[options]"])
    meaning = command.help.replace("``", "`")
    options = table(("option", "value", "default", "meaning"), rows)
    return f"{meaning}\n\nUsage: `{usage}`\n\n{options}"


def all_commands() -> dict[tuple[str, ...], Any]:
    """Every command that does something by itself, by its words after ``triptych``."""
    return dict(_commands(get_command(app), ()))


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    if path and (not children or command.invoke_without_command):
        yield path, command
    for name, child in children.items():
        yield from _commands(child, (*path, name))


def _usage(parameter: Any) -> str:
    """An argument as a usage line has it; nothing for an option."""
    if parameter.param_type_name != "argument":
        return ""
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _parameter(parameter: Any, context: Any) -> tuple[str, ...]:
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else parameter.opts + parameter.secondary_opts
    is_flag = getattr(parameter, "is_flag", False)
    default = parameter.default
    is_default_said = default is not None and default != "" and not is_flag
    meaning = parameter.help or ""
    if parameter.envvar:
        meaning = f"{meaning} Environment: `{parameter.envvar}`.".strip()
    return (
        ", ".join(f"`{name}`" for name in names),
        "" if is_flag else _values(parameter, context),
        "required" if parameter.required else f"`{default}`" if is_default_said else "",
        meaning,
    )


def _values(parameter: Any, context: Any) -> str:
    """The type of an option's value, and its bounds."""
    kind = parameter.display_type(context).strip("<>").removesuffix(" range").replace("|", ", ")
    kind = re.sub(r"list\[(\w+)\]", r"\1...", kind).lower()
    least, most = parameter.min, parameter.max
    if least is not None and most is not None:
        return f"{kind}, {least} to {most}"
    return f"{kind}, at least {least}" if least is not None else kind


# ---------------------------------------------------------------- results of benchmarks


class Measured(NamedTuple):
    """What a figure comes from: a result file and how it was made."""

    file: str
    command: str
    commit: str
    date: str
    machine: str
    stale: str


def results(*names: str) -> str:
    """Provenance of result files: a list of the named ones, or a table of all.

    Commit and machine are the file's ``host``, which in newer files has command and date as well;
    ``provenance.toml`` has the rest.

    Raises: KeyError for a file that has no entry there
    """
    if not names:
        every = [_measured(path.stem) for path in sorted(RESULTS.glob("*.json"))]
        rows = [(*one[:-1], "yes" if one.stale else "") for one in every]
        return table((*Measured._fields[:-1], "stale"), rows)
    return "".join(
        f"- {one.file}: {one.command}; commit {one.commit}, {one.date}, {one.machine}."
        f"{f' **Stale:** {one.stale}.' if one.stale else ''}\n"
        for one in map(_measured, names)
    )


def _measured(name: str) -> Measured:
    told = tomllib.loads((RESULTS / "provenance.toml").read_text(encoding="utf-8"))[name]
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    host = next((part["host"] for part in parts if "host" in part), {})
    cpu = re.sub(r"\((?:R|TM)\)| Processor", "", host.get("cpu", "machine not recorded"))
    command = host.get("command") or told["command"]
    if "earlier_hosts" in content:  # the last run measured the rest alone
        command = told.get("command", command)
    earlier = [one["commit"] for one in content.get("earlier_hosts", ())]
    commits = dict.fromkeys([*earlier, told.get("commit") or host.get("commit")])
    rest = f", {host['cores']} cores, load {host['load_1min']:.1f}" if host else ""
    return Measured(
        file=f"[{name}](../benchmarks/results/{name}.json)",
        command=f"`{command}`",
        commit=f"{', '.join(map(str, commits))} (added in {told['added']})",
        date=str(host.get("date") or told["date"])[:10],
        machine=cpu + rest,
        stale=told.get("stale", ""),
    )


# ---------------------------------------------------------------- putting them in

PIECES: dict[str, Callable[..., str]] = {
    "cli": command_line,
    "configuration": configuration,
    "formats": formats,
    "methods": methods,
    "policies": policies,
    "papers": papers,
    "results": results,
    "frontier": frontier,
    "adaptive_links": adaptive_links,
    "adaptive_choices": adaptive_choices,
    "adaptive_memory": adaptive_memory,
    "image_methods": image_methods,
    "claims": claims,
    "compress_times": compress_times,
    "static_kernels": static_kernels,
    "pipelines": pipelines,
    "reclaim": reclaim,
    "simulated_reclaim": simulated_reclaim,
    "errors": error_tree,
    "remedies": remedies,
}


def filled(text: str) -> str:
    """A document with its generated parts as they are today."""
    return MARKED.sub(_fresh, text)


def _fresh(found: re.Match[str]) -> str:
    return f"{found[1]}\n{PIECES[found[2]](*found[3].split())}\n{found[4]}"


def main() -> None:
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
