"""``triptych serve``: fetch what is missing, then run ``serve run`` to its end."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.model import fetch_with_progress
from triptych.cli.output import notes
from triptych.cli.serving.child import run_interruptible
from triptych.cli.serving.panel import start_panel
from triptych.cli.serving.serve_file import default_serve_file, read_http, read_serve_file

ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="A Ray Serve config file; without one, the defaults on 127.0.0.1:8000."),
]


def serve(config: ConfigFile = None) -> None:
    """Serve a config file: check it, fetch its model, and hand over to Ray Serve."""
    path = config or default_serve_file()
    apps, http = read_serve_file(path), read_http(path)
    for app in apps:
        fetch_with_progress(app.config.model.name)
        for title, text in start_panel(app, http):  # unbroken lines: one of them is to be copied
            notes.print(f"{title:>10}  {text}", markup=False, soft_wrap=True)
    notes.print(f"==> serve run {path}", soft_wrap=True)
    command = str(Path(sys.executable).with_name("serve"))
    # Ray answers SIGTERM by killing all it runs, and a killed pool leaves its pages in shared
    # memory; an interrupt ends the application first.
    raise typer.Exit(run_interruptible([command, "run", str(path)]))
