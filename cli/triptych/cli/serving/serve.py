"""``triptych serve``: download the model if needed, then run ``serve run``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.model import fetch_with_progress
from triptych.cli.output import notes
from triptych.cli.serving.child import run_interruptible
from triptych.cli.serving.panel import start_panel
from triptych.cli.serving.serve_file import default_serve_file, read_http, read_serve_file
from triptych.core.config.cache_dirs import set_library_environment
from triptych.deployments.transport import run_dir

ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="Ray Serve config file; default: the default settings, at 127.0.0.1:8000."),
]


def serve(config: ConfigFile = None) -> None:
    """Check a config file, download its model if needed, and start the server with Ray Serve."""
    path = config or default_serve_file()
    apps, http = read_serve_file(path), read_http(path)
    for app in apps:
        fetch_with_progress(app.config.model.name)
        for title, text in start_panel(app, http):  # no line breaks: the curl command is copied
            notes.print(f"{title:>10}  {text}", markup=False, soft_wrap=True)
    notes.print(f"==> serve run {path}", soft_wrap=True)
    command = str(Path(sys.executable).with_name("serve"))
    # Ray answers SIGTERM by killing all it runs, and a killed pool leaves its pages in shared
    # memory; an interrupt ends the application first.
    set_library_environment()
    before = run_dir.all_run_dirs()
    status = run_interruptible([command, "run", str(path)])
    run_dir.remove_left_over(before)
    raise typer.Exit(status)
