"""``triptych key``: create API keys for clients."""

import hashlib
import json
import secrets
from typing import Annotated

import typer

from triptych.cli.output import JsonFlag, notes
from triptych.core.messages import Floor

PREFIX = "sk-"
"""Prefix by which clients and secret scanners recognize an API key."""

app = typer.Typer(help="Create API keys for clients.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def keys() -> None:
    """Create API keys for clients."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the client that uses the key.")],
    concurrent: Annotated[
        int, typer.Option(min=0, help="Maximum concurrent requests; 0: no limit for this key.")
    ] = 0,
    per_minute: Annotated[
        int, typer.Option(min=0, help="Maximum requests per minute; 0: no limit.")
    ] = 0,
    weight: Annotated[
        float,
        typer.Option(min=0.001, max=1000, help="Weight of this key in fair queueing between keys."),
    ] = 1.0,
    floor: Annotated[
        Floor, typer.Option(help="Lowest class that may store tokens of its requests.")
    ] = "low",
    method: Annotated[
        str, typer.Option(help="Compression method of its requests that name none; empty: default.")
    ] = "",
    max_kl: Annotated[
        float,
        typer.Option(min=0, help="Largest measured KL of the method of its requests; 0: any."),
    ] = 0.0,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow the key to read router decisions and profiles.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create an API key, and print its entry for the file named by ``ingress.api_keys``.

    The entry holds only the SHA-256 digest. The key itself is printed once, to standard error.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    entry = {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "max_concurrent_requests": concurrent,
        "requests_per_minute": per_minute,
        "weight": weight,
        "floor": floor,
        "method": method,
        "max_kl": max_kl,
        "admin": admin,
    }
    if as_json:
        typer.echo(json.dumps({"key": key, "entry": entry}, indent=2))
        return
    notes.print(f"the key, which is nowhere else: {key}", markup=False, soft_wrap=True)
    lines = [f"{field}: {json.dumps(value)}" for field, value in entry.items()]
    typer.echo("- " + "\n  ".join(lines))
