"""``triptych simulate replay``: a live router's decisions, made again."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.output import JsonFlag, make_table, show
from triptych.router.replay import replay


def simulate_replay(
    file: Annotated[Path, typer.Argument(help="What a server with router.record wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Let the simulator's coordinator decide again what a live one decided. Exit code 1 if not."""
    found = replay(file)
    outcome = found.difference or "every decision the same"
    row = [found.starts, found.calls, found.sent, outcome]
    table = make_table(("starts", "calls", "messages sent", "outcome"), [row])
    show({**asdict(found), "same": not found.difference}, table, as_json=as_json)
    if found.difference:
        raise typer.Exit(1)
