"""``triptych profile``: where the time and the bytes of each step go."""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.cli.servefile import read_serve_file
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling

if TYPE_CHECKING:
    from triptych.router import Life
    from triptych.workers.local import LocalServer
    from triptych.workers.profile_report import ProfileReport
    from triptych.workers.profiler import Profiler

WARM_UP_TOKENS = 16
MS, MB = 1e3, 1e6


def profile(
    config: Annotated[
        Path | None, typer.Option(help="A Serve file; default: the settings of the server.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="At once.")] = 4,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 1024,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Of each stage at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    overhead: Annotated[
        bool,
        typer.Option("--overhead", help="Look at one of two decode steps: what does looking cost?"),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw PATH.png and PATH.svg.")] = None,
) -> None:
    """Run random prompts through the three stages in this process, and look on.

    Every moment of a step belongs to one part: an operation, or what lies between.
    """
    from triptych.kernels.bench import READ_BYTES, read_seconds
    from triptych.workers.local import LocalServer
    from triptych.workers.profile_report import chrome_trace, report_of
    from triptych.workers.profiler import Profiler

    settings = read_serve_file(config)[0].config if config else AppConfig()
    profiler, host = Profiler(steps, every=2 if overhead else 1), host_info()
    with LocalServer(settings) as server:
        answer_all(server, 1, min(prompt, 256), WARM_UP_TOKENS, seed)
        server.look_on(profiler.around)
        answer_all(server, requests, prompt, answer, seed + 1)
        queues = seconds_by_state(server.lives[-requests:])
        weight_bytes = server.weight_bytes
    report, limit = (
        report_of(profiler.steps, weight_bytes),
        READ_BYTES / min(read_seconds(10)) / 1e9,
    )
    cost = overhead_of(profiler) if overhead else None
    if json_file:
        told = {"requests": requests, "prompt": prompt, "answer": answer, "read_gb_per_s": limit}
        told |= {"seconds_by_state": queues, "overhead": cost}
        write_json({"host": host, **told, **report.as_json()}, json_file)
    if trace:
        write_json(chrome_trace(profiler.steps), trace)
    show(report, queues, limit)
    if cost is not None:
        console.print(f"a step that is looked at takes {100 * cost:+.1f} % (medians)")
    if plot:
        from triptych.cli.profile_plot import draw

        for path in draw(report, limit, plot):
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)


def answer_all(server: "LocalServer", count: int, prompt: int, answer: int, seed: int) -> None:
    """Have requests with random prompts answered together."""
    chance = random.Random(seed)
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    prompts = [[chance.randrange(server.vocab_size) for _ in range(prompt)] for _ in range(count)]
    with progress_bars(8) as bars:
        bar = bars.add_task("tokens", total=count * answer)
        for event in server.stream([server.request(asked, sampling) for asked in prompts]):
            bars.advance(bar, len(getattr(event, "tokens", ())))


def seconds_by_state(lives: "Sequence[Life]") -> dict[str, float]:
    """Seconds that a request spent in each state, on the mean."""
    total = dict[str, float]()
    for life in lives:
        ends = [entered for _, entered in life.steps[1:]] + [life.ended]
        for (state, entered), left in zip(life.steps, ends, strict=True):
            total[state] = total.get(state, 0.0) + left - entered
    return {state: seconds / len(lives) for state, seconds in total.items()}


def overhead_of(profiler: "Profiler") -> float:
    """How much longer a decode step takes that is looked at: medians of both kinds."""
    watched = [step.took_s for step in profiler.steps if step.stage == "decode"]
    others = [step.took_s for step in profiler.unwatched if step.stage == "decode"]
    return median(watched) / median(others) - 1.0


def show(report: "ProfileReport", queues: dict[str, float], limit: float) -> None:
    """Tables: parts, layers, and what the decode steps read."""
    parts = [
        [row.stage, row.part, row.calls, MS * row.seconds, 100 * row.share, row.nbytes / MB or None]
        for row in report.parts
    ]
    console.print(make_table(("stage", "part", "calls", "ms", "%", "MB"), parts))
    layers = [
        [row.layer, MS * row.seconds, MS * row.attention_s, row.nbytes / MB]
        for row in report.layers
    ]
    if layers:
        console.print(make_table(("layer", "ms", "attention ms", "MB"), layers, "decode by layer"))
    states = [[state, MS * seconds] for state, seconds in queues.items()]
    console.print(make_table(("state", "ms"), states, "a request, on the mean"))
    decode = [row for row in report.steps if row.stage == "decode" and row.tokens]
    if not decode:
        return
    known = [row.reused for row in decode if row.reused is not None]
    read = sum(row.pages_read for row in decode) / sum(row.pages for row in decode)
    speed = median(row.gb_per_s for row in decode)
    text = f"decode steps: {MS * median(row.seconds for row in decode):.1f} ms, {speed:.1f} GB/s"
    console.print(f"{text} of {limit:.1f} that memory gives; {100 * read:.1f} % of the pages read")
    if known:
        console.print(f"of the pages read, {100 * median(known):.1f} % were at the step before too")
