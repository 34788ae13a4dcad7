"""``triptych profile``: time and bytes of each step, by part and by layer."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, cast

import httpx
import typer
from pydantic import TypeAdapter, ValidationError

from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.cli.serving.serve_file import read_serve_file
from triptych.core.config import AppConfig
from triptych.core.errors import BenchmarkError
from triptych.core.messages import Sampling
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.router import RequestTrace
    from triptych.workers.local import LocalServer
    from triptych.workers.profiling.profiler import Profiler
    from triptych.workers.profiling.report import Event, ProfileReport

WARM_UP_TOKENS = 16
MS, MB = 1e3, 1e6
ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Profiled:
    """Response of ``/profile``."""

    workers: list[dict[str, object]]


def profile(
    config: Annotated[
        Path | None, typer.Option(help="Ray Serve config file; default: the default settings.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Profile a running server under its current load.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=False)] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="Maximum duration in seconds, with --url.")
    ] = 10.0,
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 4,
    prompt: Annotated[int, typer.Option(min=2, help="Prompt length in tokens.")] = 1024,
    answer: Annotated[int, typer.Option(min=2, help="Output length in tokens.")] = 128,
    steps: Annotated[
        int, typer.Option(min=1, help="Maximum number of profiled steps per stage.")
    ] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    overhead: Annotated[
        bool,
        typer.Option(
            "--overhead", help="Profile every second decode step, and report the overhead."
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace file for Perfetto or chrome://tracing.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot to PATH.png and PATH.svg.")] = None,
) -> None:
    """Profile the three stages with random prompts in this process, or a running server.

    Each part is an operation, or the time between operations. With --url, one worker of each stage
    is profiled until --steps or --seconds is reached; the command sends no requests.
    """
    from triptych.workers.profiling.report import chrome_trace

    if url is not None:
        taken = ask(url, api_key, steps, seconds, trace=trace is not None)
    else:
        settings = read_serve_file(config)[0].config if config else AppConfig()
        taken = run(settings, requests, prompt, answer, steps, seed, overhead=overhead)
    if json_file:
        write_json({"host": host_info(), **taken.facts, **taken.report.as_json()}, json_file)
    if trace:
        write_json(chrome_trace(taken.events), trace)
    show(taken)
    if plot:
        from triptych.cli.measure.profile_plot import plot_profile

        for path in plot_profile(taken.report, taken.limit, plot):
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Taken:
    """A profile."""

    report: "ProfileReport"
    events: "Sequence[Event]"
    """Trace events."""
    facts: Mapping[str, object]
    """Further fields of the result file."""
    limit: float | None = None
    """Memory bandwidth in GB/s; None: not measured."""
    queues: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean seconds of a request in each state; empty: not known."""
    cost: float | None = None
    """Overhead of profiling, as a share of a step; None: not measured."""


def run(
    settings: AppConfig,
    requests: int,
    prompt: int,
    answer: int,
    steps: int,
    seed: int,
    *,
    overhead: bool,
) -> Taken:
    """Profile the engines in this process."""
    from triptych.kernels.bench.attention_cpu import READ_BYTES, read_seconds
    from triptych.workers.local import LocalServer
    from triptych.workers.profiling.profiler import Profiler
    from triptych.workers.profiling.report import report_of, trace_events

    profiler = Profiler(steps, every=2 if overhead else 1)
    with LocalServer(settings) as server:
        answer_all(server, 1, min(prompt, 256), WARM_UP_TOKENS, seed)
        with server.instrumented(profiler.around):
            answer_all(server, requests, prompt, answer, seed + 1)
        queues = seconds_by_state(server.request_traces[-requests:])
        weight_bytes = server.weight_bytes
    limit = READ_BYTES / min(read_seconds(10)) / 1e9
    cost = overhead_of(profiler) if overhead else None
    facts = {"requests": requests, "prompt": prompt, "answer": answer, "read_gb_per_s": limit}
    facts |= {"seconds_by_state": queues, "overhead": cost}
    report = report_of(profiler.steps, weight_bytes)
    return Taken(report, trace_events(profiler.steps), facts, limit, queues, cost)


def ask(url: str, api_key: str | None, steps: int, seconds: float, *, trace: bool) -> Taken:
    """Profile the workers of a running server through its HTTP API.

    Raises: BenchmarkError if it does not answer, refuses, or sends no profile
    """
    from triptych.workers.profiling.report import ProfileReport

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    body = {"steps": steps, "seconds": seconds, "trace": trace}
    with notes.status(f"looking on for {seconds:.0f} s at most"):
        try:
            answer = httpx.post(
                f"{url.rstrip('/')}/profile",
                json=body,
                headers=headers,
                timeout=seconds + ANSWER_TIMEOUT_S,
            )
        except httpx.HTTPError as error:
            raise BenchmarkError(f"--url={url}: {error}: is a server there?") from error
    if answer.is_error:
        raise BenchmarkError(f"--url={url}: {answer.status_code}: {_message(answer)}")
    try:
        workers = TypeAdapter(Profiled).validate_json(answer.content).workers
        reports = [TypeAdapter(ProfileReport).validate_python(one) for one in workers]
    except ValidationError as error:
        raise BenchmarkError(f"--url={url}: no profile: of another version? {error}") from error
    names = [str(one.get("worker")) for one in workers]
    if not any(report.steps for report in reports):
        raise BenchmarkError(f"--url={url}: nobody asked it anything for {seconds:.0f} s")
    return Taken(ProfileReport.joined(reports), joined(workers), {"workers": names})


def joined(workers: "Sequence[Mapping[str, object]]") -> "list[Event]":
    """Trace events of several workers, sorted by time; the first is at 0."""
    events = [event for one in workers for event in cast("list[Event]", one["trace"])]
    events.sort(key=_begins)
    return [event | {"ts": _begins(event) - _begins(events[0])} for event in events]


def _begins(event: "Event") -> float:
    return cast("float", event["ts"])


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def answer_all(server: "LocalServer", count: int, prompt: int, answer: int, seed: int) -> None:
    """Run concurrent requests with random prompts."""
    chance = random.Random(seed)
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    prompts = [[chance.randrange(server.vocab_size) for _ in range(prompt)] for _ in range(count)]
    with progress_bars(8) as bars:
        bar = bars.add_task("tokens", total=count * answer)
        for event in server.stream([server.request(asked, sampling) for asked in prompts]):
            bars.advance(bar, len(getattr(event, "tokens", ())))


def seconds_by_state(traces: "Sequence[RequestTrace]") -> dict[str, float]:
    """Mean seconds of a request in each state."""
    total = dict[str, float]()
    for trace in traces:
        ends = [entered for _, entered in trace.steps[1:]] + [trace.ended]
        for (state, entered), left in zip(trace.steps, ends, strict=True):
            total[state] = total.get(state, 0.0) + left - entered
    return {state: seconds / len(traces) for state, seconds in total.items()}


def overhead_of(profiler: "Profiler") -> float | None:
    """Relative overhead of profiling a decode step; None if there is nothing to compare.

    The median ratio of consecutive steps of which one is profiled, so that growing contexts and
    slow phases of the machine cancel out.
    """
    watched = [
        (step.begin_s, step.took_s, True)
        for step in profiler.steps
        if step.stage == "decode" and step.tokens
    ]
    others = [(step.begin_s, step.took_s, False) for step in profiler.unprofiled]
    ratios = [
        (after / before) if is_watched else (before / after)
        for (_, before, was_watched), (_, after, is_watched) in pairwise(sorted(watched + others))
        if was_watched != is_watched
    ]
    return median(ratios) - 1.0 if ratios else None


def show(taken: Taken) -> None:
    """Print tables of parts and layers, and what the decode steps read."""
    report = taken.report
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
    states = [[state, MS * seconds] for state, seconds in taken.queues.items()]
    if states:
        console.print(make_table(("state", "ms"), states, "a request, on the mean"))
    if taken.cost is not None:
        more = f"{100 * taken.cost:+.1f} %"
        console.print(f"a step that is looked at takes {more} next to its neighbours (median)")
    decode = [row for row in report.steps if row.stage == "decode" and row.tokens]
    if not decode:
        return
    known = [row.reused for row in decode if row.reused is not None]
    read = sum(row.pages_read for row in decode) / sum(row.pages for row in decode)
    speed = median(row.gb_per_s for row in decode)
    text = f"decode steps: {MS * median(row.seconds for row in decode):.1f} ms, {speed:.1f} GB/s"
    text += f" of {taken.limit:.1f} that memory gives" if taken.limit else ""
    console.print(f"{text}; {100 * read:.1f} % of the pages read")
    if known:
        console.print(f"of the pages read, {100 * median(known):.1f} % were at the step before too")
