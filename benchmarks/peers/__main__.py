"""Triptych and other servers side by side: the same weights, client and prompts, in turns.

    python -m benchmarks.peers --peers openvino,llama --out benchmarks/results/peers.json

Each peer gets an environment of its own in the cache directory, at its first use. In every round
each server has a turn. A turn beside which other processes used more than ``--most-other-cores`` is
disturbed: it stays in the file, no median has it, and it is repeated, up to ``--attempts`` turns.
Turns that are in the file already are not measured again. A plot is written beside the file.
"""

import argparse
import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.peers import results
from benchmarks.peers.catalogue import PEERS, servers_named
from benchmarks.peers.comparison import Comparison, run
from benchmarks.peers.environment import peers_dir
from benchmarks.peers.measure import Conditions
from benchmarks.peers.peer import Peer
from benchmarks.peers.plot import plot
from benchmarks.peers.rounds import MOST_ATTEMPTS, MOST_OTHER_CORES, Plan
from benchmarks.peers.servers import Fleet
from benchmarks.peers.summary import ratios, summarize
from benchmarks.peers.tables import ratio_table, summary_table
from benchmarks.peers.triptych_server import TOPOLOGIES
from benchmarks.peers.workloads import BUSY, parse_workload, random_names
from triptych.cli.list_options import names
from triptych.cli.output import console, notes
from triptych.core.errors import ConfigError

WORKLOADS = "512/64/1,512/64/4,512/64/16,64/256/16,3500/128/4"


def prepared(servers: Sequence[Peer]) -> list[Peer]:
    """Make environments and weights; a peer that cannot be installed is left out."""
    found = list[Peer]()
    for server in servers:
        try:
            server.prepare()
        except (subprocess.CalledProcessError, OSError) as error:
            notes.print(f"{server.name} is left out: {error}", markup=False, style="red")
        else:
            found.append(server)
    return found


def workload_names(asked: argparse.Namespace) -> list[str]:
    """Those asked for, or a random set; with ``--busy`` beside a busy core."""
    drawn = asked.random_set
    found = names(asked.workloads) if drawn is None else random_names(drawn)
    found = [name if name.endswith(BUSY) or not asked.busy else name + BUSY for name in found]
    for name in found:
        parse_workload(name)
    return found


def compare(asked: argparse.Namespace) -> Comparison:
    """Make everything ready for the turns.

    Raises: ConfigError if an option makes no sense, or does not fit what is in the file
    """
    peers, topologies = names(asked.peers), names(asked.topologies)
    wanted, workloads = servers_named(peers, topologies), workload_names(asked)
    conditions = Conditions(peers, topologies, asked.seed, asked.requests)
    rows = results.read(asked.out, conditions)
    servers = prepared(wanted)
    return Comparison(
        path=asked.out,
        plan=Plan(
            workloads=workloads,
            servers=[server.name for server in servers],
            rounds=asked.rounds,
            most_other_cores=asked.most_other_cores,
            most_attempts=asked.attempts,
        ),
        conditions=conditions,
        servers={server.name: server for server in servers},
        ports={server.name: asked.port + at for at, server in enumerate(servers)},
        rows=rows,
    )


def stop_at_signals() -> None:
    """Let SIGINT and SIGTERM end the servers too; in a shell's background SIGINT is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS), help="may be empty")
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES), help="of Triptych")
    parser.add_argument(
        "--workloads",
        default=WORKLOADS,
        help="PROMPT/OUTPUT/CLIENTS, PROMPT/OUTPUT/RATEps or conversations; with +cache the prefix"
        " cache is on",
    )
    parser.add_argument("--random-set", type=int, metavar="SEED", help="random workloads instead")
    parser.add_argument("--busy", action="store_true", help="a busy loop beside every server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, help="of each turn; default: 10, 12, 32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-other-cores", type=float, default=MOST_OTHER_CORES)
    parser.add_argument("--attempts", type=int, default=MOST_ATTEMPTS)
    parser.add_argument("--restart", action="store_true", help="stop each server after its turn")
    parser.add_argument("--port", type=int, default=18100, help="first of a port for each server")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    asked = parser.parse_args(arguments)
    stop_at_signals()
    try:
        comparison = compare(asked)
        run(comparison, Fleet(peers_dir() / "logs", restart=asked.restart))
        plot(summarize(comparison.plan, comparison.rows), asked.out.with_suffix(".png"))
    except ConfigError as error:
        parser.error(str(error))
    data = comparison.write()
    if asked.json:
        typer.echo(json.dumps(data, indent=2))
        return
    console.print(summary_table(summarize(comparison.plan, comparison.rows)))
    console.print(ratio_table(ratios(comparison.plan, comparison.rows)))


if __name__ == "__main__":
    main()
