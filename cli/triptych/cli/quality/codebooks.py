"""``triptych codebooks``: fit codebooks of a model's keys, by which a2ats selects pages."""

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.output import notes, progress_bars
from triptych.core.config import ModelConfig


def codebooks(
    model: Annotated[
        str, typer.Argument(help="Known model name, directory, .gguf file or Hugging Face name.")
    ] = ModelConfig().name,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("codebooks.safetensors"),
    context: Annotated[int, typer.Option(min=128, help="Tokens of each text.")] = 1024,
    documents: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 3,
) -> None:
    """Fit a codebook of 256 keys to each KV head, for decode.selection.method: a2ats.

    Keys of texts of the calibration split are clustered by their logits. Set
    decode.selection.codebooks to the file.
    """
    from triptych.evals.studies.codebook_study import CodebookStudy, fit_key_codebooks
    from triptych.workers.models.store.model_store import resolve

    path = resolve(model)
    bars = progress_bars(24)
    with bars:
        bar = bars.add_task("texts", total=documents)
        study = CodebookStudy(context=context, documents=documents)
        fit_key_codebooks(path, study, output, lambda _name: bars.advance(bar))
    notes.print(f"wrote {output}", markup=False, soft_wrap=True)
