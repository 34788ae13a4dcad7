"""``triptych spread``: find how pages are best spread over heads, and write it into a profile."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.core.config import AppConfig, CompressorConfig, ModelConfig
from triptych.core.head_budgets import BUDGET_MAX, BUDGET_STEPS
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.core.profile import Profile

SHOWN = (0.125, 0.25, 0.5, 0.75)
"""Mean shares of the table."""


@dataclass(frozen=True)
class HeadShares:
    """What one head row reads of its pages, for each step of the mean share."""

    layer: int
    kv_head: int
    shares: list[float]


def spread(
    model: Annotated[
        str, typer.Argument(help="A known name, a directory, a .gguf file, a hub name.")
    ] = ModelConfig().name,
    output: Annotated[Path, typer.Option(help="Where to write the profile.")] = Path(
        "profile.json"
    ),
    profile: Annotated[
        str, typer.Option(help="The profile that it is added to: auto, none, or a file.")
    ] = "auto",
    context: Annotated[int, typer.Option(min=256, help="Tokens of each text.")] = 4096,
    documents: Annotated[int, typer.Option(min=1, help="Texts.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Tokens after each text that look back.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all shares here.")] = None,
) -> None:
    """Find how many of its pages each head has to read, and write it into a profile.

    decode.selection reads a share of the pages. With this profile, heads that look at little read
    less than the others, and as much in all. A model that Triptych knows brings its own along.
    """
    from triptych.evals.studies.head_budgets import (
        HeadBudgetStudy,
        find_head_budgets,
        profile_to_extend,
    )
    from triptych.workers.models.store.model_store import resolve

    path = resolve(model)
    settings = AppConfig(
        model=ModelConfig(name=model), compressor=CompressorConfig(profile=profile)
    )
    made = profile_to_extend(settings, path)
    bars = progress_bars(24)
    with bars:
        bar = bars.add_task("texts", total=documents)
        plan = HeadBudgetStudy(context=context, documents=documents, steps=steps)
        found = find_head_budgets(path, plan, lambda _name: bars.advance(bar))
    made = made.with_head_budgets(found)
    output.parent.mkdir(parents=True, exist_ok=True)
    made.write(output)
    rows = _rows(made)
    if json_file:
        shares = [asdict(row) for row in rows]
        write_json({"host": host_info(), "context": context, "rows": shares}, json_file)
    _show(rows)
    notes.print(f"wrote {output}", markup=False, soft_wrap=True)


def _rows(made: "Profile") -> list[HeadShares]:
    codes, size, heads = made.head_budget_codes, BUDGET_STEPS + 1, made.geometry.kv_heads
    return [
        HeadShares(
            layer=row // heads,
            kv_head=row % heads,
            shares=[round(code / BUDGET_MAX, 3) for code in codes[row * size : (row + 1) * size]],
        )
        for row in range(made.geometry.head_rows)
    ]


def _show(rows: Sequence[HeadShares]) -> None:
    steps = [round(mean * BUDGET_STEPS) for mean in SHOWN]
    lines = [[row.layer, row.kv_head, *(row.shares[step] for step in steps)] for row in rows]
    console.print(make_table(("layer", "KV head", *(f"at {mean:g}" for mean in SHOWN)), lines))
