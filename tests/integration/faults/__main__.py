"""Let processes die at every named point, with many seeds.

    python -m tests.integration.faults --seeds 20

Writes ``benchmarks/results/fail_points.json``, and ends with 1 if anything was lost.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from tests.integration.faults.cluster import Cluster
from tests.integration.faults.points import PLACES, POINTS
from tests.integration.faults.trial import Trial, Trials
from tests.tiny import save_tiny_model
from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, write_json

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "fail_points.json"


async def run(seeds: int, roles: set[str], out: Path) -> int:
    points = [point for point in POINTS if point.role in roles]
    trials = list[Trial]()
    bad = list[Trial]()
    with TemporaryDirectory() as folder:
        async with Cluster(save_tiny_model(Path(folder))) as cluster:
            tries = await Trials.of(cluster)
            for seed in range(seeds):
                for point in track(points, f"seed {seed}", console=console):
                    trial = await tries.run(point, seed)
                    trials.append(trial)
                    if not trial.is_good(point):
                        bad.append(trial)
                        console.print(trial, soft_wrap=True)
                write_json(report(seeds, trials, bad, dict(cluster.deaths)), out)
    show(trials)
    return 1 if bad else 0


def report(
    seeds: int, trials: list[Trial], bad: list[Trial], deaths: dict[str, int]
) -> dict[str, object]:
    return {
        "host": host_info(),
        "asked": {"seeds": seeds},
        "deaths": deaths,
        "points": [row(name, trials) for name in dict.fromkeys(one.point for one in trials)],
        "bad": [vars(one) for one in bad],
    }


def row(name: str, trials: list[Trial]) -> dict[str, object]:
    mine = [one for one in trials if one.point == name]
    return {
        "point": name,
        "trials": len(mine),
        "died": sum(one.died for one in mine),
        "lost": sum(len(one.lost) for one in mine),
        "wrong": sum(one.wrong for one in mine),
        "faults": sum(len(one.faults) for one in mine),
    }


def show(trials: list[Trial]) -> None:
    rows = [row(name, trials) for name in dict.fromkeys(one.point for one in trials)]
    console.print(make_table(tuple(rows[0]), [list(one.values()) for one in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--roles", default=",".join(PLACES))
    parser.add_argument("--json", type=Path, default=RESULT)
    asked = parser.parse_args()
    sys.exit(asyncio.run(run(asked.seeds, set(asked.roles.split(",")), asked.json)))


if __name__ == "__main__":
    main()
