"""Let processes die at every named point, with many seeds.

    python -m tests.integration.faults --seeds 20 --json benchmarks/results/fail_points.json
    python -m tests.integration.faults --seeds 20 --parts
    python -m tests.integration.faults --seeds 20 --lowering
    python -m tests.integration.faults --seeds 1 --devices

``--parts`` tests the points of layer-wise prefill, ``--lowering`` those of requests whose high
tokens become low, ``--devices`` all but two, and two others, with pages in arenas of devices of a
fake driver. Prints a summary; writes a result file only with ``--json``. The exit code is 1 if an
answer or a page was lost, if an answer changed after the death of a prefill, compress or decode
worker, if a queued write of a dead worker came to a page of another request, or if no process died
at a point.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from tests.integration.faults.cluster import Cluster
from tests.integration.faults.points import (
    DEVICE_POINTS,
    LOWERING_POINTS,
    PART_POINTS,
    PLACES,
    WHOLE_POINTS,
)
from tests.integration.faults.trial import CLIENTS, Trial, Trials
from tests.tiny import save_tiny_model
from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info


async def run(
    seeds: range,
    wanted: Sequence[str],
    out: Path | None,
    *,
    in_parts: bool,
    is_lowering: bool,
    on_devices: bool,
    are_apart: bool,
) -> int:
    every = WHOLE_POINTS
    for is_chosen, chosen in (
        (in_parts, PART_POINTS),
        (is_lowering, LOWERING_POINTS),
        (on_devices or are_apart, DEVICE_POINTS),
    ):
        every = chosen if is_chosen else every
    points = [point for point in every if point.role in wanted or point.name in wanted]
    trials = list[Trial]()
    bad = list[Trial]()
    with TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder), layers=7 if in_parts else 2)
        modes = {
            "in_parts": in_parts,
            "is_lowering": is_lowering,
            "on_devices": on_devices,
            "are_apart": are_apart,
        }
        async with Cluster(model, **modes) as cluster:
            tries = await Trials.of(cluster)
            for seed in seeds:
                for point in track(points, f"seed {seed}", console=console):
                    trial = await tries.run(point, seed)
                    trials.append(trial)
                    if not trial.is_good(point):
                        bad.append(trial)
                        console.print(trial, soft_wrap=True)
                    if out:
                        done = range(seeds.start, seed + 1)
                        found = report(done, trials, bad, dict(cluster.deaths))
                        has_devices = on_devices or are_apart
                        late = {"late_writes": cluster.late_writes} if has_devices else {}
                        write_json(found | late, out)
    show(trials)
    return 1 if bad else 0


def report(
    seeds: range, trials: list[Trial], bad: list[Trial], deaths: dict[str, int]
) -> dict[str, object]:
    return {
        "host": host_info(),
        "first_seed": seeds.start,
        "seeds": len(seeds),
        "deaths": deaths,
        "roles": by_role(trials),
        "points": by_point(trials),
        "bad": [vars(one) for one in bad],
    }


def by_role(trials: list[Trial]) -> list[dict[str, object]]:
    """Totals for each kind of process that died."""
    roles = dict.fromkeys(role_of(one) for one in trials)
    return [{"role": r, **totals([one for one in trials if role_of(one) == r])} for r in roles]


def by_point(trials: list[Trial]) -> list[dict[str, object]]:
    names = dict.fromkeys(one.point for one in trials)
    return [{"point": n, **totals([one for one in trials if one.point == n])} for n in names]


def role_of(trial: Trial) -> str:
    return trial.point.partition(":")[0]


def totals(trials: list[Trial]) -> dict[str, object]:
    return {
        "trials": len(trials),
        "died": sum(one.died for one in trials),
        "answers": CLIENTS * len(trials),
        "lost": sum(len(one.lost) for one in trials),
        "retried": sum(one.retried for one in trials),
        "changed": sum(one.wrong for one in trials),
        "changed_at_once": sum(one.wrong_at_once for one in trials),
        "faults": sum(len(one.faults) for one in trials),
    }


def show(trials: list[Trial]) -> None:
    """Print the totals of each point, then those of each kind of process."""
    for rows in (by_point(trials), by_role(trials)):
        console.print(make_table(tuple(rows[0]), [list(one.values()) for one in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="trials of each point; default 20")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--roles", default=",".join(PLACES), help="kinds of process; default all")
    parser.add_argument("--point", action="append", help="a point, in place of roles; repeatable")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--parts", action="store_true", help="points of layer-wise prefill")
    kinds.add_argument("--lowering", action="store_true", help="points of lowered requests")
    kinds.add_argument("--devices", action="store_true", help="pages in arenas of devices")
    kinds.add_argument("--apart", action="store_true", help="devices that cannot access each other")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    asked = parser.parse_args()
    wanted = asked.point or asked.roles.split(",")
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    modes = {
        "in_parts": asked.parts,
        "is_lowering": asked.lowering,
        "on_devices": asked.devices,
        "are_apart": asked.apart,
    }
    sys.exit(asyncio.run(run(seeds, wanted, asked.json, **modes)))


if __name__ == "__main__":
    main()
