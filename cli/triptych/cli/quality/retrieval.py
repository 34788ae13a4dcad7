"""``triptych retrieval``: find the heads that retrieve, and write them into a profile."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.core.config import AppConfig, CompressorConfig, ModelConfig
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.studies.retrieval_heads import RetrievalHeads


@dataclass(frozen=True)
class LayerRow:
    """Ranked query heads of a layer, and the error of its attention if few tokens are kept."""

    layer: int
    heads: list[int]
    """Query heads, first those with the most attention to facts."""
    attention: list[float]
    """Their attention to a fact, from the queries that predict its answer."""
    error: float
    """Relative error of the attention of the layer when few tokens are kept."""


def retrieval(
    model: Annotated[
        str, typer.Argument(help="Known model name, directory, .gguf file or Hugging Face name.")
    ] = ModelConfig().name,
    output: Annotated[Path, typer.Option(help="Profile file to write.")] = Path("profile.json"),
    profile: Annotated[
        str, typer.Option(help="Profile to extend: auto, none, or a file.")
    ] = "auto",
    context: Annotated[int, typer.Option(min=128, help="Tokens per prompt and text.")] = 1024,
    facts: Annotated[int, typer.Option(min=1, help="Number of facts that are asked for.")] = 24,
    documents: Annotated[
        int, typer.Option(min=1, help="Number of texts for the errors of layers.")
    ] = 3,
    steps: Annotated[
        int, typer.Option(min=1, help="Tokens after each text whose attention is measured.")
    ] = 64,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all scores to this file.")
    ] = None,
) -> None:
    """Find the heads that retrieve facts from a prompt, and write them into a profile.

    The method compresskv keeps the tokens to which these heads attend, and more of them in layers
    whose attention changes most. Models with a known name include a profile.
    """
    from triptych.evals.studies.head_budgets import profile_to_extend
    from triptych.evals.studies.retrieval_heads import RetrievalStudy, find_retrieval_heads
    from triptych.workers.models.store.model_store import resolve

    path = resolve(model)
    settings = AppConfig(
        model=ModelConfig(name=model), compressor=CompressorConfig(profile=profile)
    )
    made = profile_to_extend(settings, path)
    bars = progress_bars(24)
    with bars:
        bar = bars.add_task("prompts", total=facts + documents)
        plan = RetrievalStudy(context=context, facts=facts, documents=documents, steps=steps)
        found = find_retrieval_heads(path, plan, lambda _name: bars.advance(bar))
    made = replace(made, retrieval_heads=found.heads, layer_errors=found.errors)
    output.parent.mkdir(parents=True, exist_ok=True)
    made.write(output)
    rows = _rows(found)
    if json_file:
        layers = [asdict(row) for row in rows]
        answers = {"found": found.found, "asked": found.asked}
        write_json({"host": host_info(), "context": context, **answers, "rows": layers}, json_file)
    _show(rows)
    notes.print(f"{found.found} of {found.asked} answer tokens were found", markup=False)
    notes.print(f"wrote {output}", markup=False, soft_wrap=True)


def _rows(found: "RetrievalHeads") -> list[LayerRow]:
    return [
        LayerRow(
            layer=layer,
            heads=list(heads),
            attention=[round(float(found.scores[layer, head]), 4) for head in heads],
            error=error,
        )
        for layer, (heads, error) in enumerate(zip(found.heads, found.errors, strict=True))
    ]


def _show(rows: list[LayerRow]) -> None:
    lines = [
        [row.layer, ", ".join(map(str, row.heads[:4])), row.attention[0], row.error] for row in rows
    ]
    console.print(make_table(("layer", "heads", "attention of the first", "error"), lines))
