"""``triptych drain``: wait until a server answers nobody any more."""

import time
from typing import Annotated

import httpx
import typer

from triptych.cli.output import notes
from triptych.cli.scrape import read_metrics

RUNNING = "triptych_num_requests_running"
LOOK_EVERY_S = 1.0
QUIET_LOOKS = 3
"""A client that asked just before its way here was closed is still to be seen."""

Url = Annotated[str, typer.Option(help="The server.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds after which to give up.")]


def drain(url: Url = "http://127.0.0.1:8000", timeout: Timeout = 600.0) -> None:
    """Wait until no answer is in progress. Exit code 1 if some still are after the time.

    It stops no new requests: whoever routes them does, as Kubernetes does for a pod that it ends.
    """
    deadline, quiet = time.monotonic() + timeout, 0
    while quiet < QUIET_LOOKS:
        running = _running(url)
        quiet = 0 if running else quiet + 1
        if running and time.monotonic() > deadline:
            notes.print(f"triptych: {running:.0f} answers are still in progress at {url}")
            raise typer.Exit(1)
        time.sleep(LOOK_EVERY_S)


def _running(url: str) -> float:
    """Answers in progress; none where there is no server."""
    try:
        return read_metrics(url).total(RUNNING)
    except httpx.HTTPError:
        return 0.0
