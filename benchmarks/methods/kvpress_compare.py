"""Compare our methods with kvpress on the same texts and tasks, at equal bytes.

    python benchmarks/methods/kvpress_compare.py --kvpress-python /path/to/kvpress-env/bin/python \
        --methods default,uniform:k8v4 --json benchmarks/results/quality.json --plot docs/quality

The first method sets the bytes: for each group of cases every press keeps the share of tokens that
takes as many bytes, all included, as that method. Create the environment of kvpress with:

    python -m venv ENV && ENV/bin/pip install torch kvpress==0.5.5
"""

import argparse
import json
import os
import subprocess
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from kvpress_exchange import read_records, write_cases  # beside this file

from triptych.cli.list_options import integers, names, names_or_none
from triptych.cli.output import write_json
from triptych.cli.quality.evaluate import show_results
from triptych.evals.data.tasks import TASKS
from triptych.evals.data.texts import Split
from triptych.evals.methods.method_names import COMPARED
from triptych.evals.studies.plot import plot_quality
from triptych.evals.studies.runner import Records
from triptych.evals.studies.study import Prepared, Study, measure, prepare, report
from triptych.loadgen.report.host import host_info

ROOT = Path(__file__).parents[2]
PRESSES = "knorm,snapkv,expected_attention,streaming_llm,pyramidkv,observed_attention"


def shares(records: Records) -> dict[str, float]:
    """Of each group, the bytes of a method next to the full cache's, all included."""
    return {
        group: sum(one.footprint.all_in_bytes for one in found)
        / sum(one.footprint.full_bytes for one in found)
        for group, found in records.items()
    }


def press(
    python: str, presses: str, keep: dict[str, float], prepared: Prepared
) -> dict[str, Records]:
    """Run kvpress in its own environment over the same cases."""
    groups, revision = prepared.groups, prepared.facts.revision
    with TemporaryDirectory(prefix="triptych-") as scratch:
        folder = Path(scratch)
        write_cases(folder / "job", prepared.path, revision, groups)
        (folder / "keep.json").write_text(json.dumps(keep), encoding="utf-8")
        script = ROOT / "benchmarks" / "methods" / "kvpress_run.py"
        command = [python, str(script), str(folder / "job"), "--presses", presses]
        subprocess.run(
            [*command, "--keep", str(folder / "keep.json")],
            env=os.environ | {"PYTHONPATH": str(ROOT / "evals")},
            check=True,
        )
        return read_records(folder / "job", revision, groups)


def study_of(options: argparse.Namespace) -> Study:
    known = {field.name for field in fields(Study)}
    given = {name: value for name, value in vars(options).items() if name in known}
    return Study(
        **given
        | {
            "methods": tuple(names(options.methods)),
            "contexts": tuple(integers(options.contexts)),
            "tasks": names_or_none(options.tasks),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvpress-python", required=True)
    parser.add_argument("--presses", default=PRESSES)
    parser.add_argument("--methods", default=",".join(COMPARED))
    parser.add_argument("--contexts", default="1024,2048,4096")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--split", choices=get_args(Split), default="test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--task-count", type=int, default=8)
    parser.add_argument("--greedy-tokens", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    host = host_info()
    prepared = prepare(study_of(options))
    records = measure(prepared, lambda name, count: print(f"{name}: {count}", flush=True), print)
    keep = shares(records[prepared.methods[0].name])
    records |= press(options.kvpress_python, options.presses, keep, prepared)
    results = report(prepared, records)
    show_results(results, intervals=True)
    if options.json:
        body = {"host": host, "kept_by_kvpress": keep, **results.as_json()}
        write_json(body, options.json)
    if options.plot:
        plot_quality(results.rows, results.rows[-1].context, options.plot)


if __name__ == "__main__":
    main()
