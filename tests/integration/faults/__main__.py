"""Let processes die at every named point, with many seeds.

    python -m tests.integration.faults --seeds 20
    python -m tests.integration.faults --seeds 20 --parts

Writes ``benchmarks/results/fail_points.json``, or ``fail_points_parts.json`` for prompts that are
encoded layer by layer as they are read, and ends with 1 if anything was lost.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from tests.integration.faults.cluster import Cluster
from tests.integration.faults.points import PART_POINTS, PLACES, WHOLE_POINTS
from tests.integration.faults.trial import Trial, Trials
from tests.tiny import save_tiny_model
from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


async def run(seeds: int, roles: set[str], out: Path, *, in_parts: bool) -> int:
    points = [p for p in (PART_POINTS if in_parts else WHOLE_POINTS) if p.role in roles]
    trials = list[Trial]()
    bad = list[Trial]()
    with TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder), layers=7 if in_parts else 2)
        async with Cluster(model, in_parts=in_parts) as cluster:
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
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    out = asked.json or RESULTS / f"fail_points{'_parts' if asked.parts else ''}.json"
    roles = set(asked.roles.split(","))
    sys.exit(asyncio.run(run(asked.seeds, roles, out, in_parts=asked.parts)))


if __name__ == "__main__":
    main()
