"""``triptych model``: download, list and delete models."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from triptych.cli.output import JsonFlag, console, make_table, notes, show
from triptych.core.config import ModelConfig

app = typer.Typer(help="Download, list and delete models.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(help="Known model name, directory, .gguf file or Hugging Face name.")
]
DEFAULT = ModelConfig().name


@app.command()
def fetch(
    name: Name = DEFAULT,
    verify: Annotated[
        bool, typer.Option(help="Check the file hashes of a model that is already on this machine.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Download a model and prepare it for serving; offline if it is on this machine."""
    _print_path(name, fetch_with_progress(name, verify=verify), as_json=as_json)


app.command("pull", help="Same as fetch, by the name that Ollama has for it.")(fetch)


@app.command()
def path(name: Name = DEFAULT, as_json: JsonFlag = False) -> None:
    """Print the directory of a model that is on this machine."""
    from triptych.workers.models.store.model_store import resolve

    _print_path(name, resolve(name, allow_download=False), as_json=as_json)


def _print_path(name: str, place: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"name": name, "path": str(place)}, indent=2))
    else:
        console.print(str(place), soft_wrap=True)


@app.command("list")
def list_models(as_json: JsonFlag = False) -> None:
    """List the models on this machine, and those that have a known name."""
    from triptych.workers.models.store.catalogue import KNOWN_MODELS
    from triptych.workers.models.store.installed import installed_models

    here = installed_models()
    rows = [_row(one.name, one.source, one.size_bytes, str(one.path)) for one in here]
    names = {model.name for model in here}
    absent = [known for known in KNOWN_MODELS.values() if known.name not in names]
    rows += [_row(known.name, "known", known.wheel_bytes, None) for known in absent]
    columns = ("name", "source", "MB", "on this machine")
    lines = [
        (row["name"], row["source"], int(str(row["size_bytes"])) / 1e6, row["path"] or "-")
        for row in rows
    ]
    show(rows, make_table(columns, lines), as_json=as_json)


def _row(name: str, source: str, size_bytes: int, path: str | None) -> dict[str, object]:
    return {"name": name, "source": source, "size_bytes": size_bytes, "path": path}


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help="Name of the model, as `model list` prints it.")],
    as_json: JsonFlag = False,
) -> None:
    """Delete a model from this machine. Servers that run have it in memory."""
    from triptych.workers.models.store.installed import find_installed

    model = find_installed(name)
    model.delete()
    if as_json:
        freed = {"name": name, "path": str(model.path), "freed_bytes": model.size_bytes}
        typer.echo(json.dumps(freed, indent=2))
    else:
        console.print(f"{name}: {model.size_bytes / 1e6:.0f} MB deleted", soft_wrap=True)


def fetch_with_progress(name: str, *, verify: bool = False) -> Path:
    """Fetch a model and hash its weights, with one progress bar per stage that takes long."""
    from triptych.workers.models.facts import weights_of
    from triptych.workers.models.store.model_store import fetch as fetch_model

    bars = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=notes,
        disable=not notes.is_terminal,
    )
    tasks = dict[str, TaskID]()

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage)
            if not notes.is_terminal:
                notes.print(f"{name}: {stage} ({total_bytes / 1e6:.0f} MB)")
        bars.update(tasks[stage], completed=done_bytes, total=total_bytes)

    with bars:
        path = fetch_model(name, report, verify=verify)
        weights_of(path, report)  # the digest is cached for all processes of the server
    return path
