"""``triptych calibrate``: find the compression point of a model, and write its profile."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.cli.list_options import integers, names, numbers, numbers_or_zero
from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.cli.quality.studies import run_with_progress
from triptych.core.config import AppConfig, CompressorConfig, ModelConfig
from triptych.core.errors import ConfigError
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.core.profile import Profile
    from triptych.evals.studies.calibration import Calibration, CalibrationResult

COLUMNS = {
    "context": "context",
    "data": "bytes_data_ratio",
    "all-in": "bytes_all_in_ratio",
    "KL": "kl",
    "top-1": "top1_agreement",
    "perplexity ratio": "perplexity_ratio",
}
TIME = "us per token"
LIMITS, CANDIDATES, FITS = "Limits of quality", "Candidates for settings", "What is fitted besides"
TEXTS, METHODS, FILES = "Texts to measure on", "Other methods", "Files"
"""Headings of options."""


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Known model name, directory, .gguf file or Hugging Face name.")
    ] = ModelConfig().name,
    output: Annotated[
        Path, typer.Option(help="Profile file to write.", rich_help_panel=FILES)
    ] = Path("profile.json"),
    max_kl: Annotated[
        float, typer.Option(help="Maximum KL to the full cache, nats.", rich_help_panel=LIMITS)
    ] = 0.01,
    min_top1: Annotated[
        float, typer.Option(help="Minimum top-1 agreement.", rich_help_panel=LIMITS)
    ] = 0.96,
    max_perplexity_ratio: Annotated[
        float, typer.Option(help="Maximum ratio.", rich_help_panel=LIMITS)
    ] = 1.01,
    high_format: Annotated[
        str, typer.Option(help="Format of significant tokens.", rich_help_panel=CANDIDATES)
    ] = "k8v4",
    low_formats: Annotated[
        str, typer.Option(help="Candidate formats of the others.", rich_help_panel=CANDIDATES)
    ] = "k4v2,k4v4",
    alphas: Annotated[
        str, typer.Option(help="Candidates for alpha_high.", rich_help_panel=CANDIDATES)
    ] = "2,3,4,5,6,8",
    low_alphas: Annotated[
        str,
        typer.Option(
            help="Candidates for alpha_low; above 0 tokens are dropped.", rich_help_panel=CANDIDATES
        ),
    ] = "0",
    scales: Annotated[
        Literal["none", "head", "layer"],
        typer.Option(
            help="Also fit thresholds of each KV head or layer, and keep them if they take fewer "
            "bytes within the limits.",
            rich_help_panel=FITS,
        ),
    ] = "none",
    bases: Annotated[
        bool,
        typer.Option(
            "--bases",
            help="Also fit bases of keys and values of each head, for the method oscar.",
            rich_help_panel=FITS,
        ),
    ] = False,
    pair_order: Annotated[
        bool,
        typer.Option(
            "--pair-order",
            help="Also order the RoPE pairs of each head by energy, for the method block_gtq.",
            rich_help_panel=FITS,
        ),
    ] = False,
    windows: Annotated[
        str, typer.Option(help="Candidates for recent_window_tokens.", rich_help_panel=CANDIDATES)
    ] = "16,32",
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens.", rich_help_panel=TEXTS)
    ] = "1024",
    documents: Annotated[
        int, typer.Option(min=1, help="Texts per context length.", rich_help_panel=TEXTS)
    ] = 6,
    steps: Annotated[
        int, typer.Option(min=1, help="Tokens scored after each context.", rich_help_panel=TEXTS)
    ] = 128,
    methods: Annotated[
        str,
        typer.Option(
            help="Other methods to measure with the chosen settings, for the estimates in answers; "
            "all: those that a server can offer; empty: none.",
            rich_help_panel=METHODS,
        ),
    ] = "all",
    learned: Annotated[
        str,
        typer.Option(
            help="Files of learned networks, as compressor.learned.", rich_help_panel=METHODS
        ),
    ] = "auto",
    profile: Annotated[
        str,
        typer.Option(
            help="Measure --methods with the settings of this profile, instead of choosing "
            "settings: a file, or auto: the one that is included for the model.",
            rich_help_panel=METHODS,
        ),
    ] = "",
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Also find the methods among which an adaptive server chooses "
            "(compressor.adaptive): those of the measured ones with no other below them in bytes "
            "and KL; and time them.",
            rich_help_panel=METHODS,
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write all rows to this file; with --profile, those of its methods.",
            rich_help_panel=FILES,
        ),
    ] = None,
) -> None:
    """Find the smallest compressed cache within the quality limits, and write a profile.

    Set compressor.profile to the file. Models with a known name include a profile.
    """
    from triptych.evals.studies.calibration import (
        Calibration,
        Target,
        calibrate,
        with_other_methods,
    )
    from triptych.evals.studies.pareto import with_pareto

    plan = Calibration(
        model=model,
        target=Target(kl=max_kl, top1_agreement=min_top1, perplexity_ratio=max_perplexity_ratio),
        high_format=high_format,
        low_formats=tuple(names(low_formats)),
        alphas=tuple(numbers(alphas)),
        low_alphas=tuple(numbers_or_zero(low_alphas)),
        scales=scales,
        windows=tuple(integers(windows)),
        contexts=tuple(integers(contexts)),
        documents=documents,
        steps=steps,
        other_methods=tuple(names(methods)),
        learned=tuple(names(learned)),
    )
    output.parent.mkdir(parents=True, exist_ok=True)

    def extend(made: "Profile") -> "Profile":
        made = _with_bases(made, plan) if bases else made
        return _with_pair_order(made, plan) if pair_order else made

    if profile:
        extended = extend(_known(model, profile))
        extended = with_other_methods(extended, plan, run_with_progress)
        extended = with_pareto(extended, plan) if pareto else extended
        extended.write(output)
        if json_file:
            every = extended.measured_methods.items()
            rows = {name: [asdict(one) for one in each] for name, each in every}
            write_json({"host": host_info(), "measured_methods": rows}, json_file)
        _show_profile(extended)
        notes.print(f"wrote {output}", markup=False, soft_wrap=True)
        return
    found = calibrate(plan, run_with_progress, extend)
    found = replace(found, profile=with_pareto(found.profile, plan)) if pareto else found
    found.profile.write(output)
    if json_file:
        rows = [row.as_json() for row in found.rows]
        parts = {"host": host_info(), "chosen": found.chosen, "rows": rows}
        if found.scaled is not None:
            parts |= {"scaled": found.scaled.as_json(), "scales": found.profile.alpha_scales}
        write_json(parts, json_file)
    _show(found)
    notes.print(f"wrote {output}", markup=False, soft_wrap=True)


def _with_bases(made: "Profile", plan: "Calibration") -> "Profile":
    """The profile with bases of keys and values, with a progress bar of layers."""
    from triptych.evals.studies.calibration import with_bases

    bars = progress_bars(24)
    with bars:
        bar = bars.add_task("bases", total=made.geometry.layers)
        return with_bases(made, plan, lambda: bars.advance(bar))


def _with_pair_order(made: "Profile", plan: "Calibration") -> "Profile":
    """The profile with the order of RoPE pairs, with a progress bar of layers."""
    from triptych.evals.studies.calibration import with_pair_order

    bars = progress_bars(24)
    with bars:
        bar = bars.add_task("pairs", total=made.geometry.layers)
        return with_pair_order(made, plan, lambda: bars.advance(bar))


def _show(found: "CalibrationResult") -> None:
    lines = [
        [row.method, "chosen" if row.method == found.chosen else "", *_figures(row.as_json())]
        for row in sorted(found.rows, key=lambda row: (str(row.context), row.bytes_all_in_ratio))
    ]
    if found.scaled is not None:
        note = "kept" if found.profile.alpha_scales else "not kept"
        lines.append(["with scales", note, *_figures(found.scaled.as_json())])
    console.print(make_table(("method", "", *COLUMNS), lines))
    _show_profile(found.profile)


def _show_profile(profile: "Profile") -> None:
    """Methods that were measured, and the frontier."""
    console.print(make_table(("method", "", *COLUMNS), _other_lines(profile)))
    if profile.pareto:
        title = "methods among which an adaptive server chooses"
        console.print(make_table(("method", TIME), list(profile.pareto.items()), title))


def _known(model: str, name: str) -> "Profile":
    """The profile of a file, or the one that is included. Raises: ConfigError if there is none"""
    from triptych.workers.models.compression_profile import find_profile
    from triptych.workers.models.facts import describe
    from triptych.workers.models.store.model_store import resolve

    config = AppConfig(model=ModelConfig(name=model), compressor=CompressorConfig(profile=name))
    found = find_profile(config, describe(resolve(model)))
    if found is None:
        raise ConfigError(f"profile={name!r}: there is none for {model!r}; leave the option out")
    return found


def _other_lines(profile: "Profile") -> list[list[object]]:
    return [
        [
            name,
            "",
            one.context,
            "",
            one.bytes_ratio,
            one.kl,
            one.top1_agreement,
            one.perplexity_ratio,
        ]
        for name, measured in profile.measured_methods.items()
        for one in measured
    ]


def _figures(row: dict[str, object]) -> list[object]:
    return [row[key] for key in COLUMNS.values()]
