"""Workload options of ``bench serve`` and ``simulate``, and the levels of load."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from triptych.cli.list_options import integers, numbers
from triptych.core.config import require
from triptych.loadgen.measure import Level, levels_of
from triptych.loadgen.workload.load import Load
from triptych.loadgen.workload.shapes import shape_named
from triptych.loadgen.workload.traces import read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of the command line; None: the default of the workload."""

    shape: str = "uniform"
    trace: Path | None = None
    speed: float = 1.0
    limit: int | None = None
    burstiness: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    seed: int = 0

    def resolve(self) -> Load:
        """The load.

        Raises: ConfigError that names the wrong option, or the wrong line of the trace
        """
        require(0 < self.speed < 1e6, "--speed", self.speed, "a number above 0")
        burstiness = self.burstiness
        require(burstiness is None or 0 < burstiness < 1e6, "--burstiness", burstiness, "above 0")
        shape = shape_named(self.shape)
        load = Load(
            shape=self.shape,
            prompt_tokens=self.prompt_tokens or shape.means.prompt_tokens,
            output_tokens=self.output_tokens or shape.means.output_tokens,
            pause_s=shape.means.pause_s,
            burstiness=shape.burstiness if burstiness is None else burstiness,
            max_prompt_tokens=self.max_prompt_tokens,
            max_output_tokens=self.max_output_tokens,
            seed=self.seed,
        )
        if self.trace is None:
            require(self.speed == 1.0, "--speed", self.speed, "1 without --trace")
            return load
        require(self.shape == "uniform", "--workload", self.shape, "nothing beside --trace")
        sessions = read_trace(self.trace, speed=self.speed, limit=self.limit)
        return replace(load, shape="trace", trace=sessions)


def levels_of_options(
    load: Load, concurrency: str, rate: str, requests: int | None
) -> tuple[Level, ...]:
    """The levels of load; a trace keeps its arrival times unless a rate or concurrency is given.

    Raises: ConfigError if an option is not a list of numbers
    """
    concurrencies, rates = integers(concurrency), numbers(rate)
    if load.trace:
        count = min(len(load.trace), requests or len(load.trace))
        if not concurrencies and not rates:
            return (Level(requests=count),)
        return levels_of(concurrencies, rates, count)
    return levels_of(concurrencies or ([] if rates else [1, 4, 16]), rates, requests)


def shallow(load: Load) -> dict[str, Any]:
    """Fields by name, without converting nested values."""
    return {one.name: getattr(load, one.name) for one in fields(load)}
