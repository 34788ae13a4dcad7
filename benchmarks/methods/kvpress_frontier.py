"""Add the presses of kvpress to the records of `triptych eval frontier`.

    python benchmarks/methods/kvpress_frontier.py --kvpress-python /path/to/kvpress-env/bin/python \
        --contexts 1024 --answer-tokens 64 --records frontier.jsonl --presses snapkv,knorm

The settings are those of the study that the file belongs to. The same texts and late pass keys go
to kvpress in its own environment (``kvpress_compare.py`` says how to make it); the next
`triptych eval frontier` with this file has rows of the presses too.
"""

import argparse
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from kvpress_exchange import read_records, write_cases  # beside this file

from triptych.cli.list_options import integers
from triptych.evals.data.texts import Split
from triptych.evals.frontier.frontier_study import FrontierStudy, PreparedFrontier, prepare_frontier
from triptych.evals.frontier.record_file import ProbeRecord, RecordFile
from triptych.evals.metrics.fidelity import Steps
from triptych.evals.studies.runner import Group, Record

ROOT = Path(__file__).parents[2]
PRESSES = "snapkv,knorm,streaming_llm,pyramidkv,tova,expected_attention"


def groups_of(prepared: PreparedFrontier) -> list[Group]:
    """The study's texts, as kvpress_run.py reads them."""
    return [
        Group(
            name=group.name,
            context_tokens=group.context,
            cases=tuple(probe.case for probe in group.probes),
        )
        for group in prepared.groups_of("texts")
    ]


def run_presses(
    prepared: PreparedFrontier, python: str, presses: str, keeps: list[str]
) -> Iterator[ProbeRecord]:
    """Run the presses in kvpress's environment; each keeps these shares of the tokens."""
    groups, revision = groups_of(prepared), prepared.facts.revision
    with TemporaryDirectory(prefix="triptych-") as scratch:
        job = Path(scratch)
        write_cases(job, prepared.path, revision, groups)
        script = ROOT / "benchmarks" / "methods" / "kvpress_run.py"
        for keep in keeps:
            options = ["--presses", presses, "--keep", keep, "--label", f"@{keep}"]
            subprocess.run(
                [python, str(script), str(job), *options],
                env=os.environ | {"PYTHONPATH": str(ROOT / "evals")},
                check=True,
            )
        for name, records in read_records(job, revision, groups).items():
            for group in prepared.groups_of("texts"):
                for probe, record in zip(group.probes, records[group.name], strict=True):
                    yield _probe_record(name, group.name, record, probe.scored_tokens)


def _probe_record(name: str, group: str, record: Record, scored: int) -> ProbeRecord:
    """The record without the steps of the question, which the study does not score either."""
    steps = record.steps
    return ProbeRecord(
        method=name,
        group=group,
        case=record.case,
        steps=None if steps is None else Steps(*(one[:scored] for one in vars(steps).values())),
        tokens=record.tokens,
        footprint=record.footprint,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvpress-python", required=True)
    parser.add_argument("--presses", default=PRESSES)
    parser.add_argument("--keep", default="0.5,0.25")
    parser.add_argument("--contexts", default="1024,4096")
    parser.add_argument("--documents", type=int, default=FrontierStudy.documents)
    parser.add_argument("--steps", type=int, default=FrontierStudy.steps)
    parser.add_argument("--answer-tokens", type=int, default=FrontierStudy.answer_tokens)
    parser.add_argument("--split", choices=get_args(Split), default="test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, required=True)
    options = parser.parse_args()
    study = FrontierStudy(
        methods=("default",),
        contexts=tuple(integers(options.contexts)),
        documents=options.documents,
        steps=options.steps,
        answer_tokens=options.answer_tokens,
        split=options.split,
        seed=options.seed,
    )
    prepared, file = prepare_frontier(study), RecordFile(options.records)
    file.open(prepared.conditions)
    keeps = options.keep.split(",")
    file.add(run_presses(prepared, options.kvpress_python, options.presses, keeps))


if __name__ == "__main__":
    main()
