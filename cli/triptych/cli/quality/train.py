"""``triptych train``: train the networks of learned compression."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import Progress

from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.core.config import ModelConfig
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.training.learned_networks import Trained

app = typer.Typer(help="Train the networks of learned compression.", no_args_is_help=True)

DEFAULT_MODEL = ModelConfig().name
ModelName = Annotated[
    str, typer.Argument(help="Known model name, directory, .gguf file or Hugging Face name.")
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        help="Captures and states of the training; the same command resumes from them. "
        "Default: next to the output."
    ),
]
Documents = Annotated[int, typer.Option(min=1, help="Documents or chats to train on.")]
HeldOut = Annotated[
    int, typer.Option(min=1, help="Further ones, for early stopping and the report.")
]
EvaluateEvery = Annotated[
    int, typer.Option(min=1, help="Steps between two held-out losses; the state is saved then.")
]
Patience = Annotated[
    int, typer.Option(min=1, help="Held-out losses without improvement before training stops.")
]
LearningRate = Annotated[float, typer.Option(help="Of the first step; decays as a cosine.")]
Hidden = Annotated[int, typer.Option(min=1, help="Units of each network's hidden layer.")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights, order of documents and phases.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the report and all held-out losses to a file.")
]


@app.callback()
def options() -> None:
    """Train the networks of learned compression."""


@app.command("scorer")
def scorer(
    model: ModelName = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("scorer.safetensors"),
    work_dir: WorkDir = None,
    context: Annotated[int, typer.Option(min=8, help="Tokens per document.")] = 2048,
    documents: Documents = 32,
    held_out: HeldOut = 6,
    steps: Annotated[int, typer.Option(min=1, help="Most training steps.")] = 600,
    evaluate_every: EvaluateEvery = 50,
    patience: Patience = 4,
    learning_rate: LearningRate = 1e-3,
    target: Annotated[
        Literal["later", "prompt"],
        typer.Option(
            help="Attention to predict: from the tokens behind a prompt, or from the prompt's own."
        ),
    ] = "later",
    loss: Annotated[
        Literal["deviance", "logarithm"],
        typer.Option(
            help="Poisson deviance, which weights tokens by their attention, or the squared error "
            "of the logarithm, which counts all alike."
        ),
    ] = "logarithm",
    hidden: Hidden = 64,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Train the scorer: which tokens later ones attend to, from keys and values alone.

    A training that was stopped goes on when the command is run again, with the same result.
    """
    from triptych.evals.training.captures import CapturePlan
    from triptych.evals.training.fit import FitPlan
    from triptych.evals.training.learned_networks import ScorerPlan, train_scorer

    plan = ScorerPlan(
        model=model,
        captures=CapturePlan(
            context=context, continuation=0, documents=documents, held_out=held_out
        ),
        fit=FitPlan(
            steps=steps,
            learning_rate=learning_rate,
            evaluate_every=evaluate_every,
            patience=patience,
        ),
        target=target,
        error=loss,
        hidden=hidden,
        seed=seed,
    )
    work = work_dir or output.with_name(output.name + ".work")
    _run(output, json_file, lambda bars: train_scorer(plan, output, work, Bars(bars).begin))


@app.command("compressor")
def compressor(
    model: ModelName = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("compressor.safetensors"),
    work_dir: WorkDir = None,
    variant: Annotated[
        Literal["gated", "paper"],
        typer.Option(help="Pooling gated by significance, or FastCache's plain networks."),
    ] = "gated",
    chats: Annotated[
        Path | None,
        typer.Option(
            help="Train the network for image tokens on these chats: JSON lines of "
            '{"messages": [...]}, as for the chat endpoint; the last message is the answer. '
            "Default: the network for text, on texts that come with Python."
        ),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=2, help="Tokens that become one.")] = 5,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a document to compress.")] = 1024,
    continuation: Annotated[
        int, typer.Option(min=1, help="Tokens after them, whose attention is matched.")
    ] = 128,
    documents: Documents = 24,
    held_out: HeldOut = 6,
    steps: Annotated[int, typer.Option(min=1, help="Most steps of matching attention.")] = 300,
    reconstruction_steps: Annotated[
        int, typer.Option(min=0, help="Steps of masked reconstruction before; 0: none.")
    ] = 0,
    polish_steps: Annotated[
        int, typer.Option(min=0, help="Steps of distillation through the model after; 0: none.")
    ] = 0,
    evaluate_every: EvaluateEvery = 25,
    patience: Patience = 4,
    learning_rate: LearningRate = 1e-3,
    hidden: Hidden = 64,
    batch: Annotated[int, typer.Option(min=1, help="Documents or chats of a step.")] = 1,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Train the compressor: networks that merge consecutive tokens of the KV cache into one.

    A training that was stopped goes on when the command is run again, with the same result.
    """
    from triptych.evals.training.captures import CapturePlan
    from triptych.evals.training.fit import FitPlan
    from triptych.evals.training.learned_networks import MergerPlan, train_merger

    plan = MergerPlan(
        model=model,
        variant=variant,
        chats=chats,
        chunk_tokens=chunk_tokens,
        captures=CapturePlan(
            context=context, continuation=continuation, documents=documents, held_out=held_out
        ),
        fit=FitPlan(
            steps=steps,
            learning_rate=learning_rate,
            evaluate_every=evaluate_every,
            patience=patience,
        ),
        reconstruction_steps=reconstruction_steps,
        polish_steps=polish_steps,
        batch=batch,
        hidden=hidden,
        seed=seed,
    )
    work = work_dir or output.with_name(output.name + ".work")
    _run(output, json_file, lambda bars: train_merger(plan, output, work, Bars(bars).begin))


class Bars:
    """A progress bar for each part of a training."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def begin(self, name: str, steps: int) -> Callable[[int, float | None], None]:
        """Add the bar of a part; early stopping completes it."""
        bar = self._bars.add_task(name, total=steps)

        def advance(done: int, loss: float | None) -> None:
            self._bars.update(bar, completed=done)
            if loss is not None:
                text = f"{name}, {done} steps: held-out loss {loss:.4f}"
                notes.print(text, markup=False, soft_wrap=True)

        return advance


def _run(output: Path, json_file: Path | None, train: Callable[[Progress], "Trained"]) -> None:
    host, started, cpu = host_info(), time.monotonic(), time.process_time()
    bars = progress_bars(24)
    with bars:
        found = train(bars)
    seconds = round(time.monotonic() - started, 1)
    if json_file:
        times = {"seconds": seconds, "cpu_seconds": round(time.process_time() - cpu, 1)}
        write_json({"host": host, **times, **found.as_json()}, json_file)
    rows = [(name.replace("_", " "), value) for name, value in asdict(found.report).items()]
    console.print(make_table(("held-out documents", ""), rows))
    notes.print(f"wrote {output} in {seconds:g} s", markup=False, soft_wrap=True)
