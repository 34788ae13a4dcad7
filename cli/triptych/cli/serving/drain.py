"""``triptych drain``: wait until a server answers nobody any more."""

import json
import time
from typing import Annotated

import httpx
import typer

from triptych.cli.output import JsonFlag, notes
from triptych.cli.serving.scrape import read_metrics

RUNNING = "triptych_num_requests_running"
LOOK_EVERY_S = 1.0
QUIET_LOOKS = 3
"""A client that asked just before its way here was closed is still to be seen."""

Url = Annotated[str, typer.Option(help="The server.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds after which to give up.")]


def drain(
    url: Url = "http://127.0.0.1:8000", timeout: Timeout = 600.0, as_json: JsonFlag = False
) -> None:
    """Wait until no answer is in progress. Exit code 1 if some still are after the time.

    It stops no new requests: whoever routes them does, as Kubernetes does for a pod that it ends.
    """
    began, running = time.monotonic(), _wait(url, timeout)
    if as_json:
        waited_s = round(time.monotonic() - began, 1)
        typer.echo(json.dumps({"url": url, "in_progress": running, "waited_s": waited_s}, indent=2))
    elif running:
        notes.print(f"triptych: {running} answers are still in progress at {url}")
    if running:
        raise typer.Exit(1)


def _wait(url: str, timeout_s: float) -> int:
    """Answers that are still in progress after the time; 0 as soon as none are."""
    deadline, quiet = time.monotonic() + timeout_s, 0
    while quiet < QUIET_LOOKS:
        running = _running(url)
        quiet = 0 if running else quiet + 1
        if running and time.monotonic() > deadline:
            return int(running)
        time.sleep(LOOK_EVERY_S)
    return 0


def _running(url: str) -> float:
    """Answers in progress; none where there is no server."""
    try:
        return read_metrics(url).total(RUNNING)
    except httpx.HTTPError:
        return 0.0
