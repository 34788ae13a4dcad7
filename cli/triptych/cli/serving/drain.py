"""``triptych drain``: wait until a server has no requests, neither running nor waiting."""

import json
import time
from typing import Annotated

import httpx
import typer

from triptych.cli.output import JsonFlag, notes
from triptych.cli.serving.scrape import read_metrics

OPEN = "triptych_num_requests_open"
LOOK_EVERY_S = 1.0
QUIET_LOOKS = 3
"""Consecutive checks without a request: late requests may still arrive."""

Url = Annotated[str, typer.Option(help="Server URL.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")]


def drain(
    url: Url = "http://127.0.0.1:8000", timeout: Timeout = 600.0, as_json: JsonFlag = False
) -> None:
    """Wait until the server has no requests. Exit code 1 if some remain after the timeout.

    The command does not stop new requests; the load balancer must, as Kubernetes does for a pod
    that terminates.
    """
    began, left = time.monotonic(), _wait(url, timeout)
    if as_json:
        waited_s = round(time.monotonic() - began, 1)
        typer.echo(json.dumps({"url": url, "in_progress": left, "waited_s": waited_s}, indent=2))
    elif left:
        notes.print(f"triptych: {left} answers are still in progress at {url}")
    if left:
        raise typer.Exit(1)


def _wait(url: str, timeout_s: float) -> int:
    """Requests that are left after the timeout; 0 as soon as there are none."""
    deadline, quiet = time.monotonic() + timeout_s, 0
    while quiet < QUIET_LOOKS:
        left = _open_requests(url)
        quiet = 0 if left else quiet + 1
        if left and time.monotonic() > deadline:
            return int(left)
        time.sleep(LOOK_EVERY_S)
    return 0


def _open_requests(url: str) -> float:
    """Number of requests, waiting ones included; 0 if the server does not answer."""
    try:
        return read_metrics(url).total(OPEN)
    except httpx.HTTPError:
        return 0.0
