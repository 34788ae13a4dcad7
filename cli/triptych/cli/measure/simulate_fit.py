"""``triptych simulate fit`` and ``simulate replay``: fit costs to runs, replay decisions."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from triptych.cli.output import JsonFlag, console, make_table, notes, show, write_json
from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.results import Requests, Result, read_results
from triptych.router import check_policies
from triptych.router.replay import replay
from triptych.simulator import Cluster, Costs, Job
from triptych.simulator.fit import Fitted, Observation, Prediction, fit, predict, summary

LEAST_FREE_CORES = 0.05

SHOWN = ("mean_ttft_s", "mean_tpot_s", "request_throughput")


def simulate_fit(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Result files of bench serve --save-dir; none: only predict, with --costs."
        ),
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(help="Result files to predict, not used for the fit; repeatable."),
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=1, help="Number of prefill workers of the server.")
    ] = 1,
    compress: Annotated[
        int, typer.Option(min=1, help="Number of compress workers of the server.")
    ] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode workers of the server.")] = 1,
    policy: Annotated[
        str, typer.Option(help="router.batch_policy of the server.")
    ] = RouterConfig().batch_policy,
    own_cores: Annotated[
        bool, typer.Option(help="Each worker had its own cores; default: they shared them.")
    ] = False,
    costs_file: Annotated[
        Path | None, typer.Option("--costs", help="Cost file to start from.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write costs and predictions to this file.")
    ] = None,
) -> None:
    """Fit the simulator's costs to measured runs.

    With --held-out it also prints the prediction error for runs that are not used for the fit.
    """
    check_policies(RouterConfig(batch_policy=policy), Cluster().max_batch_requests)
    cluster = Cluster(
        prefill=prefill,
        compress=compress,
        decode=decode,
        shared_cores=not own_cores,
        router=RouterConfig(batch_policy=policy),
    )
    start = Costs.read(costs_file) if costs_file else Costs()
    observed = [observation for path in files or () for observation in observations_of(path)]
    others = [observation for path in held_out or () for observation in observations_of(path)]

    def note(number: int, loss: float) -> None:
        notes.print(f"round {number}: squared errors {loss:.3f}")

    if costs_file and others and not observed:
        fitted = Fitted(start, [], 0)
    else:
        fitted = fit(observed, cluster, start, note)
    foretold = [predict(one, cluster, fitted.costs) for one in others]
    if json_file:
        write_json(
            {
                "simulated": True,
                "host": host_info(),
                "own_cores": own_cores,
                "policy": policy,
                "costs": fitted.costs.as_dict(),
                "fitted_to": [as_json(one) for one in fitted.predictions],
                "held_out": [as_json(one) for one in foretold],
                "held_out_errors": errors(foretold),
            },
            json_file,
        )
    if fitted.predictions:
        console.print(make_table(*table("fitted to", fitted.predictions)))
    if foretold:
        console.print(make_table(*table("held out", foretold)))
        for name, error in errors(foretold).items():
            console.print(
                f"{name}: off by {error:.0%} on the mean of {len(foretold)} held-out runs"
            )


def observations_of(path: Path) -> list[Observation]:
    """The runs of a result file.

    Raises: ConfigError if the file does not list every request
    """
    return [_observation(result) for result in read_results(path)]


def _observation(result: Result) -> Observation:
    requests = result.requests
    if requests is None:
        raise ConfigError(
            f"{result.path}: it does not list its requests: use bench serve --save-dir"
        )
    concurrency = result.figures.get("max_concurrency")
    jobs = zip(requests.prompt_tokens, requests.output_tokens, requests.started_s, strict=True)
    return Observation(
        name=result.name,
        sessions=[
            (Job(f"r{number}", prompt, output, at_s),)
            for number, (prompt, output, at_s) in enumerate(jobs)
        ],
        concurrency=int(concurrency) if concurrency else None,
        cores=result.cores,
        free_cores=max(LEAST_FREE_CORES, result.cores - result.figures.get("other_cores", 0.0)),
        measured=summary(requests.ttft_s, tpots_s(requests), result.figures["request_throughput"]),
    )


def tpots_s(requests: Requests) -> list[float]:
    """TPOT of each answer with more than one token."""
    return [sum(gaps) / len(gaps) for gaps in requests.gaps_s if gaps]


def errors(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Mean absolute error of each figure, relative to the measured value."""
    if not predictions:
        return {}
    return {
        name: fmean(abs(one.ratios[name] - 1.0) for one in predictions)
        for name in predictions[0].measured
    }


def as_json(prediction: Prediction) -> dict[str, object]:
    return {
        "run": prediction.name,
        "measured": prediction.measured,
        "predicted": prediction.predicted,
        "ratios": prediction.ratios,
    }


def table(
    title: str, predictions: Sequence[Prediction]
) -> tuple[list[str], list[list[object]], str]:
    """Columns, rows and title: measured and predicted side by side."""
    columns = ["run", *(f"{name} {side}" for name in SHOWN for side in ("measured", "predicted"))]
    rows: list[list[object]] = [
        [
            one.name,
            *(value for name in SHOWN for value in (one.measured[name], one.predicted[name])),
        ]
        for one in predictions
    ]
    return columns, rows, title


def simulate_replay(
    file: Annotated[Path, typer.Argument(help="Recording that a server with router.record wrote.")],
    as_json: JsonFlag = False,
) -> None:
    """Replay a recording, and compare the decisions. Exit code 1 if a decision differs."""
    found = replay(file)
    outcome = found.difference or "every decision the same"
    row = [found.starts, found.calls, found.sent, outcome]
    table = make_table(("starts", "calls", "messages sent", "outcome"), [row])
    show({**asdict(found), "same": not found.difference}, table, as_json=as_json)
    if found.difference:
        raise typer.Exit(1)
