"""Time that methods take to compress, and what it adds to the prefill of the same prompts."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.core.config import AppConfig, ModelConfig
from triptych.core.errors import ModelError
from triptych.core.messages import (
    Compress,
    Compressed,
    CompressItem,
    Encode,
    Message,
    Prefill,
    Prefilled,
    Request,
    Sampling,
    Send,
)
from triptych.core.pages import PagePlan
from triptych.evals.frontier.record_file import TimeRecord
from triptych.evals.methods.served_engines import EngineMethod
from triptych.kvpool import LocalPool
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.factory import load_model, make_engines
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.stage import Engine

REPEATS = 3
"""Measurements of each batch; the shortest counts, since noise only adds time."""
SPARE = 2.2
"""Pages of the pool over the raw pages of the largest batch: compressed pages come beside them, and
those of 16 bits take as many."""


def compress_times(
    method: EngineMethod, prompt: Sequence[int], batches: Sequence[int]
) -> Iterator[TimeRecord]:
    """Time one method at each batch size.

    Prefill computes equal prompts once and gives each request its own pages, so a batch costs one
    prefill; the compressor treats each as a prompt of its own.

    Raises: ModelError if a stage refuses a prompt
    """
    with _Stages.of(method.config, method.model_path, prompt, max(batches)) as stages:
        stages.measure(1)  # compiles and warms up
        for batch in batches:
            compress, prefill = (min(one) for one in zip(*_repeated(stages, batch), strict=True))
            yield TimeRecord(
                method=method.name,
                context=len(prompt),
                batch=batch,
                compress_us=round(1e6 * compress / (batch * len(prompt)), 3),
                prefill_us=round(1e6 * prefill / len(prompt), 3),
            )


def _repeated(stages: "_Stages", batch: int) -> Iterator[tuple[float, float]]:
    return (stages.measure(batch) for _ in range(REPEATS))


@dataclass
class _Stages:
    """Prefill and compressor on a pool of their own, driven by hand."""

    pool: LocalPool
    prefill: Engine
    compress: Engine
    prompt: tuple[int, ...]

    @classmethod
    def of(
        cls, config: AppConfig, model_path: Path, prompt: Sequence[int], batch: int
    ) -> "_Stages":
        facts = describe(model_path)
        settings = replace(
            config,
            model=replace(config.model, dtype=ModelConfig().dtype),  # as it is served
            pool=replace(config.pool, prefix_bytes=0),
        )
        plan = PagePlan.of(
            settings,
            facts.geometry,
            find_profile(settings, facts),
            learned=find_networks(settings, facts),
        )
        pages = batch * plan.geometry.head_rows * plan.raw.pages(len(prompt))
        pool = LocalPool(round(SPARE * pages) + plan.geometry.head_rows, plan.page_bytes)
        context = load_model(settings, plan, model_path, ("prefill", "compress"))
        prefill, compress = make_engines(settings, plan, context, pool, ("prefill", "compress"))
        return cls(pool, prefill, compress, tuple(prompt))

    def __enter__(self) -> "_Stages":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def measure(self, batch: int) -> tuple[float, float]:
        """Seconds to compress a batch, and of the prefill of its prompt."""
        sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
        requests = [
            Request(id=f"time-{number}", prompt=self.prompt, sampling=sampling, reply_to="none")
            for number in range(batch)
        ]
        ids = [one.id for one in requests]
        done = self._prefilled(requests)
        items = [CompressItem(request=one.request, handle=one.handle) for one in done if one.handle]
        assert len(items) == batch
        began_s = time.perf_counter()
        _messages(self.compress.accept(Compress(items=tuple(items))))
        self.compress.accept(Encode(requests=tuple(ids), arena=self.pool.arena.id))
        sent = _messages(self.compress.step())
        took_s = time.perf_counter() - began_s
        encoded = sum(isinstance(message, Compressed) for message in sent)
        if encoded < batch:
            raise ModelError(f"the compressor encoded {encoded} of {batch} prompts: {sent[-1:]}")
        self.pool.withdraw(ids)
        return took_s, done[0].token_s * len(self.prompt)

    def _prefilled(self, requests: Sequence[Request]) -> list[Prefilled]:
        self.prefill.accept(Prefill(requests=tuple(requests)))
        found = list[Prefilled]()
        while len(found) < len(requests):
            sent = _messages(self.prefill.step())
            found += [message for message in sent if isinstance(message, Prefilled)]
        return found


def _messages(sends: Iterable[Send] | None) -> list[Message]:
    return [send.message for send in sends or ()]
