"""``triptych top``: a running server, live in the terminal."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Annotated

import httpx
import typer
from rich.live import Live
from rich.text import Text

from triptych.cli.output import JsonFlag, console
from triptych.cli.serving.scrape import Metrics, read_metrics
from triptych.cli.serving.top_view import TopFigures, figures_between, render
from triptych.core.errors import BenchmarkError

Url = Annotated[str, typer.Option(help="The server.")]
Interval = Annotated[float, typer.Option(min=0.2, help="Seconds from one look to the next.")]
Looks = Annotated[int, typer.Option(min=0, help="Stop after so many; 0: when Ctrl-C is pressed.")]


def top(
    url: Url = "http://127.0.0.1:8000",
    interval: Interval = 1.0,
    looks: Looks = 0,
    as_json: JsonFlag = False,
) -> None:
    """Show stages, queues, pages and tokens per second of a running server.

    With --json one line per look.
    """
    samples = watch(url, interval, looks)
    try:
        if as_json:
            for figures in samples:
                typer.echo(json.dumps(asdict(figures) if figures else None))
            return
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for figures in samples:
                lost = Text(f"{url} does not answer", style="red")
                live.update(render(figures, url) if figures else lost, refresh=True)
    except KeyboardInterrupt:  # how one leaves
        pass


def watch(url: str, interval_s: float, looks: int = 0) -> Iterator[TopFigures | None]:
    """A frame per look, the first without rates; None where the server does not answer.

    Raises: BenchmarkError if there is no server of ours at the first look
    """
    before, then = _first_look(url), time.monotonic()
    yield figures_between(before, None, 0.0)
    for _ in range(looks - 1) if looks else count():
        time.sleep(interval_s)
        try:
            now, at = read_metrics(url), time.monotonic()
        except httpx.HTTPError:
            yield None
            continue
        yield figures_between(now, before, at - then)
        before, then = now, at


def _first_look(url: str) -> Metrics:
    """Raises BenchmarkError if there is no server of ours."""
    try:
        metrics = read_metrics(url)
    except httpx.HTTPError as error:
        raise BenchmarkError(f"--url={url}: no metrics ({error}): is a server there?") from error
    if "triptych_num_requests_running" not in metrics:
        raise BenchmarkError(f"--url={url}: answers, but with no metrics of Triptych")
    return metrics
