"""``triptych profile``: where the time and the bytes of each step go."""

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
    """What a server answers."""

    workers: list[dict[str, object]]


def profile(
    config: Annotated[
        Path | None, typer.Option(help="A Serve file; default: the settings of the server.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Look on at a server that runs, at work that others give it.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=False)] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="The most to look on, with --url.")
    ] = 10.0,
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
    """Run random prompts through the three stages in this process, and look on; or at a server.

    Every moment of a step belongs to one part: an operation, or what lies between. With --url one
    worker of each stage is looked at, for so many steps or so long; nothing is asked of it.
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
        from triptych.cli.measure.profile_plot import draw

        for path in draw(taken.report, taken.limit, plot):
            notes.print(f"wrote {path}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Taken:
    """A profile."""

    report: "ProfileReport"
    events: "Sequence[Event]"
    """Of its trace."""
    facts: Mapping[str, object]
    """What else there is to tell of it."""
    limit: float | None = None
    """Gigabytes that memory gives in a second; None: it was not measured where the worker is."""
    queues: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that a request spent in each state, on the mean; empty: not known."""
    cost: float | None = None
    """What looking costs, as a share of a step; None: nobody asked."""


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
    """Look on in this process."""
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
    """Have the workers of a server that runs look on at themselves.

    Raises: BenchmarkError if there is none, it refuses, or answers something else
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
    """The events of several workers' traces, in time; it begins with the first."""
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
    """Have requests with random prompts answered together."""
    chance = random.Random(seed)
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    prompts = [[chance.randrange(server.vocab_size) for _ in range(prompt)] for _ in range(count)]
    with progress_bars(8) as bars:
        bar = bars.add_task("tokens", total=count * answer)
        for event in server.stream([server.request(asked, sampling) for asked in prompts]):
            bars.advance(bar, len(getattr(event, "tokens", ())))


def seconds_by_state(lives: "Sequence[RequestTrace]") -> dict[str, float]:
    """Seconds that a request spent in each state, on the mean."""
    total = dict[str, float]()
    for life in lives:
        ends = [entered for _, entered in life.steps[1:]] + [life.ended]
        for (state, entered), left in zip(life.steps, ends, strict=True):
            total[state] = total.get(state, 0.0) + left - entered
    return {state: seconds / len(lives) for state, seconds in total.items()}


def overhead_of(profiler: "Profiler") -> float | None:
    """How much longer a decode step takes that is looked at; None if there is nothing to compare.

    The median over steps that come one after the other, one of them looked at, so that neither
    the growth of the answers nor a slow minute of the machine counts.
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
    """Tables: parts, layers, and what the decode steps read."""
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
