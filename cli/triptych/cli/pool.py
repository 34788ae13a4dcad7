"""``triptych pool``: inspect the page pool of a running server."""

import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from triptych.cli.output import JsonFlag, console, make_table, show
from triptych.core.config import MIB, NetworkConfig
from triptych.core.errors import ConfigError
from triptych.deployments.transport.run_dir import pool_sockets
from triptych.kvpool.pool.stats import PoolStats
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.calls import CheckPool, StatPool
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.stub import PoolStub

app = typer.Typer(help="Inspect the page pool of a running server.", no_args_is_help=True)

TIMEOUT_S = 5.0
MOST_ROWS = 20


@app.callback()
def group() -> None:
    """Inspect the page pool of a running server."""


Address = Annotated[
    str | None,
    typer.Option(
        help="unix:/path/of.sock, or host:port of another node; default: the only pool of this "
        "user on this machine."
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        help="File with the access token between nodes (network.token_file), for host:port."
    ),
]


@app.command()
def stat(address: Address = None, token_file: TokenFile = "", as_json: JsonFlag = False) -> None:
    """Show pages by worker, format, tenant and request. Exit code 1 if the sums do not match."""
    with pool_at(address or find_pool(), token_file) as pool:
        ledger = pool.call(StatPool())
    show(_as_data(ledger), _as_table(ledger), as_json=as_json)
    if not as_json:
        for part in _parts(ledger):
            console.print(part)
        for line in (*_kept(ledger), *ledger.faults):
            console.print(line, markup=False, soft_wrap=True)
    if ledger.faults:
        raise typer.Exit(1)


@app.command()
def check(address: Address = None, token_file: TokenFile = "", as_json: JsonFlag = False) -> None:
    """Check owner, lease and free-list entry of every page against the totals.

    Exit code 1 if a check fails.
    """
    with pool_at(address or find_pool(), token_file) as pool:
        faults, ledger = list(pool.call(CheckPool()).faults), pool.call(StatPool())
    faults += ledger.faults
    rows = [(fault,) for fault in faults] or [(f"all {ledger.pages} pages are accounted for",)]
    show({"faults": faults, "pages": ledger.pages}, make_table(("check",), rows), as_json=as_json)
    if faults:
        raise typer.Exit(1)


@contextmanager
def pool_at(address: str, token_file: str = "") -> Generator[PoolStub, None, None]:
    """A client of a pool; its calls raise PoolUnavailable if the pool does not answer.

    ``token_file`` holds the access token for pools of other nodes.

    Raises: ConfigError if the file does not hold a token
    """
    access = Access.of(NetworkConfig(token_file=token_file), "") if token_file else None
    pool = PoolStub(FrameChannel(address, access), TIMEOUT_S)
    try:
        yield pool
    finally:
        pool.close()


def find_pool() -> str:
    """The address of the only pool of this user on this machine.

    Raises: ConfigError if there is none, or more than one
    """
    sockets = [path for path in pool_sockets() if _listens(path)]
    if len(sockets) != 1:
        found = ", ".join(f"unix:{path}" for path in sockets) or "none"
        raise ConfigError(f"--address: cannot tell which pool is meant (found: {found})")
    return f"unix:{sockets[0]}"


def _listens(path: Path) -> bool:
    """Whether a pool listens at a socket; False for the socket of a killed server."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _as_data(ledger: PoolStats) -> dict[str, object]:
    return {
        **asdict(ledger),
        "held_pages": ledger.held_pages,
        "held_bytes": ledger.held_bytes,
    }


def _as_table(ledger: PoolStats) -> Table:
    used = ledger.held_bytes / 2**20
    rows: list[tuple[object, ...]] = [
        (line.name, line.requests, line.request_pages, line.extent_pages, line.silent_s)
        for line in ledger.workers
    ]
    rows.append(("(free)", None, ledger.free_pages, None, None))
    title = (
        f"{ledger.arena}: {ledger.pages} pages of {ledger.page_bytes} bytes, {used:.1f} MiB held, "
        f"{ledger.reclaimed_pages_total} taken back from lost workers"
    )
    return make_table(("worker", "requests", "pages", "stock", "silent s"), rows, title)


def _parts(ledger: PoolStats) -> Iterator[Table]:
    """Pages of requests and prefixes, by format, by tenant and by request."""
    stock = {"(workers' stock)": ledger.extent_pages} if ledger.extent_pages else {}
    named = {f"{name[:12]}…" if len(name) > 12 else name: n for name, n in ledger.by_tenant.items()}
    for title, pages in (
        ("format", {**ledger.by_format, **stock}),
        ("tenant", named),
        ("request", ledger.by_request),
    ):
        largest = sorted(pages.items(), key=lambda item: -item[1])
        rows = [
            (name or "(not said)", count, count * ledger.page_bytes / MIB)
            for name, count in largest[:MOST_ROWS]
        ]
        if len(largest) > MOST_ROWS:
            rest = sum(count for _, count in largest[MOST_ROWS:])
            rows.append(
                (f"({len(largest) - MOST_ROWS} more)", rest, rest * ledger.page_bytes / MIB)
            )
        if rows:
            yield make_table((title, "pages", "MiB"), rows)


def _kept(ledger: PoolStats) -> Iterator[str]:
    """Lines about the prefix cache: memory, sharing, sessions and disk."""
    prefix, disk = ledger.prefix, ledger.disk
    if prefix.blocks or prefix.asked_tokens:
        windows = f" and {prefix.windows} window entries" if prefix.windows else ""
        yield (
            f"prefixes in memory: {prefix.blocks} blocks{windows}, {prefix.bytes / MIB:.1f} MiB, "
            f"{prefix.borrowed_bytes / MIB:.1f} MiB lent to requests, "
            f"{prefix.hit_tokens} of {prefix.asked_tokens} tokens known, "
            f"{prefix.evictions} evicted"
        )
    if prefix.readers:
        yield (
            f"{prefix.readers} requests read pages of prefixes where they lie, and hold "
            f"{prefix.shared_bytes / MIB:.1f} MiB less for it"
        )
    if prefix.sessions:
        yield (
            f"{prefix.sessions} conversations may go on: {prefix.session_bytes / MIB:.1f} MiB of "
            "prefixes are evicted last for them"
        )
    if disk.capacity_bytes:
        skipped = sum(disk.skipped.values())
        yield (
            f"prefixes on disk: {disk.objects} blocks, {disk.bytes / MIB:.1f} of "
            f"{disk.capacity_bytes / MIB:.1f} MiB, {disk.stored} stored, {disk.loaded} brought "
            f"back, {disk.evictions} evicted, {disk.damaged} damaged, {disk.failed} failed, "
            f"{skipped} skipped, {disk.waiting} wait"
        )
    if disk.fault:
        yield f"the disk takes nothing: {disk.fault}"
