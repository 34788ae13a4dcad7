"""``triptych serve``: download the model if needed, then run ``serve run``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.checks.diagnosis import WORKER_NICENESS
from triptych.cli.model import fetch_with_progress
from triptych.cli.output import notes
from triptych.cli.serving.child import run_interruptible
from triptych.cli.serving.panel import start_panel
from triptych.cli.serving.serve_file import default_serve_file, read_http, read_serve_file
from triptych.core.config.cache_dirs import set_environment_defaults, set_library_environment
from triptych.deployments.transport import run_dir
from triptych.kvpool.pool.arena import remove_orphans, shared_memory_dir

RAY_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "triptych.deployments.proxy_errors:middlewares",
    WORKER_NICENESS: "0",
    "RAY_enable_output_error_log_if_still_retry": "0",
}
"""Ray reads these when it starts: errors of its proxies have OpenAI's shape, and workers get the
cores as any other process does. Calls of Serve's controller have retries without end, and at a stop
it ends under them: Ray does not print that they are retried. Variables that are set stay as they
are."""
DRAIN_MARGIN_S = 10.0
"""How much longer than the grace period the routers may take to drain."""

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
    # Ray answers SIGTERM by killing all it runs, and a killed pool leaves its pages in shared
    # memory; an interrupt ends the application first.
    set_library_environment()
    set_environment_defaults(RAY_ENVIRONMENT)
    before = run_dir.all_run_dirs()
    grace_s = max(app.config.ingress.graceful_shutdown_timeout_s for app in apps)
    module = [sys.executable, "-m", "triptych.deployments.serve_run"]
    status = run_interruptible([*module, str(path), str(grace_s + DRAIN_MARGIN_S)])
    run_dir.remove_left_over(before)
    # A pool that ends while it starts leaves its pages in shared memory.
    for directory in {app.config.pool.arena_directory or shared_memory_dir() for app in apps}:
        remove_orphans(directory)
    raise typer.Exit(status)
