"""``triptych top``: live figures of a running server in the terminal."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Annotated

import httpx
import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from triptych.cli.output import JsonFlag, console
from triptych.cli.serving.scrape import Metrics, read_metrics
from triptych.cli.serving.top_view import TopFigures, figures_between, render
from triptych.core.errors import BenchmarkError

Url = Annotated[str, typer.Option(help="Server URL.")]
Interval = Annotated[float, typer.Option(min=0.2, help="Seconds between samples of /metrics.")]
Looks = Annotated[int, typer.Option(min=0, help="Number of samples; 0: until Ctrl-C.")]


def top(
    url: Url = "http://127.0.0.1:8000",
    interval: Interval = 1.0,
    looks: Looks = 0,
    as_json: JsonFlag = False,
) -> None:
    """Show stages, queues, pages and tokens per second of a running server.

    Into a pipe or a file, print one sample after another. With --json, print one line of JSON per
    sample.
    """
    samples = watch(url, interval, looks)
    try:
        if as_json:
            for figures in samples:
                typer.echo(json.dumps(asdict(figures) if figures else None))
            return
        views = (_view(figures, url) for figures in samples)
        if not console.is_terminal:  # where Live prints only its last view
            for view in views:
                console.print(view)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(view, refresh=True)
    except KeyboardInterrupt:  # the usual way to end the command
        pass


def _view(figures: TopFigures | None, url: str) -> RenderableType:
    return render(figures, url) if figures else Text(f"{url} does not answer", style="red")


def watch(url: str, interval_s: float, looks: int = 0) -> Iterator[TopFigures | None]:
    """Figures of each sample, the first without rates; None if the server does not answer.

    Raises: BenchmarkError if the first sample fails, or is not from a Triptych server
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
    """Raises BenchmarkError if no Triptych server answers."""
    try:
        metrics = read_metrics(url)
    except httpx.HTTPError as error:
        raise BenchmarkError(f"--url={url}: no metrics ({error}): is a server there?") from error
    if "triptych_num_requests_open" not in metrics:
        raise BenchmarkError(f"--url={url}: answers, but with no metrics of Triptych")
    return metrics
