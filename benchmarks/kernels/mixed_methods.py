"""Time decode steps of one batch with requests of several compression methods, and of each alone.

    python benchmarks/kernels/mixed_methods.py --batch 16 --prompt 512 --answer 128 --json FILE

One server offers all methods. In turns its batch has requests of one method alone, or of all of
them. ``ratio`` is the median step of the mixed batch over the mean of the medians of the pure ones:
it should be at most 1.10. With ``--alone`` the first method is also timed on a server that offers
no other one, which shows what the offer itself costs.
"""

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import MIB, AppConfig
from triptych.core.messages import Request, Sampling, Send
from triptych.loadgen.report.host import host_info
from triptych.workers.local import LocalServer
from triptych.workers.loop import Work
from triptych.workers.stage import Engine

METHODS = ("diffkv", "uniform:k8v4", "uniform:k4v2", "uniform:fp16")
MIXED = "mixed"
WARM_UP_STEPS = 8
MAX_RATIO = 1.10


@dataclass(frozen=True)
class Row:
    """Decode steps of whole batches of one kind."""

    how: str
    step_ms: float
    """Median."""
    fastest_ms: float
    steps: int


class StepTimes:
    """Times the decode steps with a whole batch."""

    def __init__(self, batch: int) -> None:
        self._batch, self.seconds = batch, list[float]()

    def __call__(self, engine: Engine, work: Work) -> Iterable[Send] | None:
        is_whole = engine.stage == "decode" and len(engine.requests()) == self._batch
        begun = time.perf_counter()
        sends = work()
        sends = None if sends is None else list(sends)
        if is_whole and work == engine.step:
            self.seconds.append(time.perf_counter() - begun)
        return sends


def requests(server: LocalServer, how: str, batch: int, prompt: int, answer: int) -> list[Request]:
    """A batch of random prompts; of ``mixed``, methods alternate."""
    luck, sampling = (
        random.Random(how),
        Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True),
    )
    methods = METHODS if how == MIXED else (how,)
    return [
        replace(
            server.request(luck.choices(range(100, 40_000), k=prompt), sampling),
            method=methods[index % len(methods)],
        )
        for index in range(batch)
    ]


def measure(server: LocalServer, how: str, batch: int, prompt: int, answer: int) -> list[float]:
    """Seconds of the decode steps of one batch."""
    times = StepTimes(batch)
    with server.instrumented(times):
        done = server.complete(requests(server, how, batch, prompt, answer))
    for one in done:
        if one.error is not None:
            raise SystemExit(one.error.message)
    return times.seconds[WARM_UP_STEPS:]


def settings(methods: Sequence[str], model: str, batch: int, prompt: int, answer: int) -> AppConfig:
    first, *others = methods
    capacity = max(512 * MIB, 3 * batch * (prompt + answer) * 24 * 1024)
    return AppConfig.from_mapping(
        {
            "model": {"name": model},
            "compressor": {"policy": first, "methods": others, "kv_rotation": "hadamard"},
            "decode": {"max_num_seqs": batch},
            "pool": {"kv_cache_memory_bytes": capacity, "prefix_bytes": 0},
        }
    )


def row(how: str, seconds: Sequence[float]) -> Row:
    if not seconds:
        raise SystemExit("--answer: the first answers ended before the last prompt was read")
    return Row(how, median(seconds) * 1e3, min(seconds) * 1e3, len(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="turns of all kinds of batches")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = given.batch, given.prompt, given.answer
    found = {how: list[float]() for how in (*METHODS, MIXED)}
    with LocalServer(settings(METHODS, given.model, *size)) as server:
        for _ in range(given.rounds):
            for how, seconds in found.items():
                seconds += measure(server, how, *size)
    if given.alone:
        with LocalServer(settings(METHODS[:1], given.model, *size)) as server:
            alone = [measure(server, METHODS[0], *size) for _ in range(given.rounds)]
        found[f"{METHODS[0]}, offered alone"] = [one for each in alone for one in each]
    rows = [row(how, seconds) for how, seconds in found.items()]
    by_name = {one.how: one.step_ms for one in rows}
    ratio = by_name[MIXED] / mean(by_name[method] for method in METHODS)
    cells = [(one.how, f"{one.step_ms:.2f}", f"{one.fastest_ms:.2f}", one.steps) for one in rows]
    console.print(make_table(("batch", "step ms", "fastest ms", "steps"), cells))
    console.print(f"mixed over the mean of the pure ones: {ratio:.3f} (at most {MAX_RATIO})")
    if given.json:
        results = {"ratio": ratio, "max_ratio": MAX_RATIO, "rows": [asdict(one) for one in rows]}
        write_json({"host": host_info(), "size": size, **results}, given.json)


if __name__ == "__main__":
    main()
