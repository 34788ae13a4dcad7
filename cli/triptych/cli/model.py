"""``triptych model``: download models and list those on this machine."""

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

app = typer.Typer(help="Download and list models.", no_args_is_help=True)

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
    """List the models that have a known name, with download size and local path."""
    from triptych.core.errors import ModelError
    from triptych.workers.models.store.catalogue import KNOWN_MODELS
    from triptych.workers.models.store.model_store import resolve

    rows = list[dict[str, object]]()
    for known in KNOWN_MODELS.values():
        try:
            place = str(resolve(known.name, allow_download=False))
        except ModelError:
            place = None
        rows.append({"name": known.name, "download_bytes": known.wheel_bytes, "path": place})
    columns = ("name", "download MB", "on this machine")
    lines = [(row["name"], int(str(row["download_bytes"])) / 1e6, row["path"]) for row in rows]
    show(rows, make_table(columns, lines), as_json=as_json)


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
