"""``triptych key``: make API keys for clients."""

import hashlib
import json
import secrets
from typing import Annotated

import typer

from triptych.cli.output import JsonFlag, notes

PREFIX = "sk-"
"""What clients and secret scanners know an API key by."""

app = typer.Typer(help="Make API keys for clients.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def keys() -> None:
    """Make API keys for clients."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Who will have the key.")],
    concurrent: Annotated[
        int, typer.Option(min=0, help="Requests at a time; 0: as many as the server takes.")
    ] = 0,
    per_minute: Annotated[int, typer.Option(min=0, help="Requests a minute; 0: no limit.")] = 0,
    weight: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Share of the server next to other keys.")
    ] = 1.0,
    admin: Annotated[
        bool, typer.Option("--admin", help="May read decisions and profiles, too.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a key, and print its entry for the file that ``ingress.api_keys`` names.

    The entry has a digest only: the key is shown this once.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    entry = {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "max_concurrent_requests": concurrent,
        "requests_per_minute": per_minute,
        "weight": weight,
        "admin": admin,
    }
    if as_json:
        typer.echo(json.dumps({"key": key, "entry": entry}, indent=2))
        return
    notes.print(f"the key, which is nowhere else: {key}", markup=False, soft_wrap=True)
    lines = [f"{field}: {json.dumps(value)}" for field, value in entry.items()]
    typer.echo("- " + "\n  ".join(lines))
