"""Profile reports: seconds and bytes by part, layer and step, and a Chrome trace."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from triptych.core.messages import STAGES, Stage
from triptych.workers.decode.read_stats import Reading, reused
from triptych.workers.profiling.profiler import Step

READS_PAGES = "decode_attention"
US = 1e6
Event = dict[str, object]
"""An event of a Chrome trace."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part of one stage, over all steps."""

    stage: Stage
    part: str
    calls: int
    seconds: float
    share: float
    """Of the stage's seconds."""
    nbytes: int = 0
    """Of pages, for the attention of the decode stage."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of the decode stage, over all steps."""

    layer: int
    seconds: float
    attention_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step."""

    stage: Stage
    begin_s: float
    """Seconds after the first step; in the report of a worker, Unix time."""
    seconds: float
    tokens: int
    page_bytes: int = 0
    """Bytes of keys and values that attention read."""
    weight_bytes: int = 0
    pages: int = 0
    """Pages of the requests."""
    pages_read: int = 0
    reused: float | None = None
    """Share of the pages read that the request also read in the previous step."""

    @property
    def gb_per_s(self) -> float:
        """Bytes of weights and pages per second of the step."""
        return (self.page_bytes + self.weight_bytes) / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Time and bytes of a profile, by part, layer and step."""

    parts: list[PartRow]
    layers: list[LayerRow]
    steps: list[StepRow]

    @classmethod
    def joined(cls, reports: Sequence["ProfileReport"]) -> "ProfileReport":
        """Merge reports of workers with different stages; time begins at the first step."""
        first = min((row.begin_s for one in reports for row in one.steps), default=0.0)
        return cls(
            parts=[row for one in reports for row in one.parts],
            layers=[row for one in reports for row in one.layers],
            steps=[
                replace(row, begin_s=row.begin_s - first) for one in reports for row in one.steps
            ],
        )

    def as_json(self) -> dict[str, object]:
        steps = [{**asdict(step), "gb_per_s": step.gb_per_s} for step in self.steps]
        return {
            "parts": [asdict(row) for row in self.parts],
            "layers": [asdict(row) for row in self.layers],
            "steps": steps,
        }


def report_of(
    steps: Sequence[Step], weight_bytes: int, origin_s: float | None = None
) -> ProfileReport:
    """Report of profiled steps; ``weight_bytes`` are read by each forward pass.

    ``origin_s``: zero of the report's time, on the profiler's clock; None: the first step.
    """
    rows = _steps(steps, weight_bytes, _origin(steps, origin_s))
    decode = [step for step in steps if step.stage == "decode"]
    by_layer = _layer_bytes([step.reading for step in decode if step.reading])
    return ProfileReport(_parts(steps, sum(by_layer)), _layers(decode, by_layer), rows)


def _parts(steps: Sequence[Step], page_bytes: int) -> list[PartRow]:
    seconds, calls = dict[tuple[Stage, str], float](), dict[tuple[Stage, str], int]()
    whole = dict[Stage, float]()
    for step in steps:
        whole[step.stage] = whole.get(step.stage, 0.0) + step.took_s
        for part, _, begin_s, end_s in step.spans:
            key = (step.stage, part)
            seconds[key] = seconds.get(key, 0.0) + end_s - begin_s
            calls[key] = calls.get(key, 0) + 1
    stages = list(whole)
    ordered = sorted(seconds, key=lambda key: (stages.index(key[0]), -seconds[key]))
    return [
        PartRow(
            stage=stage,
            part=part,
            calls=calls[stage, part],
            seconds=seconds[stage, part],
            share=seconds[stage, part] / (whole[stage] or 1.0),
            nbytes=page_bytes if (stage, part) == ("decode", READS_PAGES) else 0,
        )
        for stage, part in ordered
    ]


def _layers(decode: Sequence[Step], by_layer: Sequence[int]) -> list[LayerRow]:
    seconds, attention = dict[int, float](), dict[int, float]()
    for step in decode:
        for part, layer, begin_s, end_s in step.spans:
            seconds[layer] = seconds.get(layer, 0.0) + end_s - begin_s
            if part == READS_PAGES:
                attention[layer] = attention.get(layer, 0.0) + end_s - begin_s
    return [
        LayerRow(layer, seconds.get(layer, 0.0), attention.get(layer, 0.0), nbytes)
        for layer, nbytes in enumerate(by_layer)
    ]


def _layer_bytes(readings: Sequence[Reading]) -> list[int]:
    if not readings:
        return []
    each = np.stack([reading.layer_bytes() for reading in readings])
    return [int(total) for total in each.sum(axis=0)]


def _origin(steps: Sequence[Step], origin_s: float | None) -> float:
    return min((step.begin_s for step in steps), default=0.0) if origin_s is None else origin_s


def _steps(steps: Sequence[Step], weight_bytes: int, origin_s: float) -> list[StepRow]:
    rows, before = list[StepRow](), None
    for step in steps:
        row = StepRow(
            stage=step.stage,
            begin_s=step.begin_s - origin_s,
            seconds=step.took_s,
            tokens=step.tokens,
            weight_bytes=weight_bytes if step.tokens else 0,
        )
        if step.reading is None:
            rows.append(row)
            continue
        again, total = reused(before, step.reading) if before else (0, 0)
        before = step.reading
        read = step.reading.read()
        rows.append(
            replace(
                row,
                page_bytes=int(step.reading.layer_bytes().sum()),
                pages=step.reading.pages,
                pages_read=sum(int(part.sum()) for part in read),
                reused=again / total if total else None,
            )
        )
    return rows


TRACED: tuple[Stage, ...] = (*STAGES, "encode")
"""Rows of a trace; that of a stage that not every model has comes last."""


def chrome_trace(events: Sequence[Event]) -> dict[str, object]:
    """A trace for chrome://tracing and Perfetto, with a row per stage."""
    seen = {event["pid"] for event in events}
    names: list[Event] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": stage}}
        for pid, stage in enumerate(TRACED)
        if stage in STAGES or pid in seen
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def trace_events(steps: Sequence[Step], origin_s: float | None = None) -> list[Event]:
    """All steps and spans; times are microseconds after ``origin_s``, as for ``report_of``."""
    start = _origin(steps, origin_s)
    events = list[Event]()
    for step in steps:
        pid = TRACED.index(step.stage)
        args: dict[str, object] = {"tokens": step.tokens}
        events.append(_event("step", pid, step.begin_s - start, step.took_s, args))
        for part, layer, begin_s, end_s in step.spans:
            args = {} if layer < 0 else {"layer": layer}
            events.append(_event(part, pid, begin_s - start, end_s - begin_s, args))
    return events


def _event(name: str, pid: int, begin_s: float, took_s: float, args: dict[str, object]) -> Event:
    times = {"ts": round(begin_s * US, 3), "dur": round(took_s * US, 3)}
    return {"name": name, "ph": "X", "pid": pid, "tid": 0, **times, "args": args}
