"""Bytes of compressed prompts by their length, and what they are spent on.

    python benchmarks/kernels/short_prompts.py --json benchmarks/results/short_prompts.json

The three engines run in this process with the settings of the server, with and without a prefix
cache. Prompts are beginnings of texts of the test split. Bytes are those of the handle that the
decode stage gets: whole pages of the pool and the entries of page tables, next to 16-bit keys and
values without any of these. Pages that a request shares with the prefix cache are among them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.handles import KVHandle
from triptych.core.messages import Compressed, Message, Sampling
from triptych.core.pages import PagePlan
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.metrics.footprint import TABLE_ENTRY_BYTES, layout_of, of_handle
from triptych.loadgen.report.host import host_info
from triptych.workers.local import LocalServer
from triptych.workers.models.store.model_store import resolve

LENGTHS = "1,2,3,4,8,16,37,64,128,256,512,1024,4096"


@dataclass
class Row:
    """Prompts of one length; bytes of all of them together."""

    prefix_cache: bool
    tokens: int
    prompts: int = 0
    ratio: float = 0.0
    """16-bit bytes by all bytes."""
    full_bytes: int = 0
    all_in_bytes: int = 0
    data_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Codes and scales, by format."""
    score_bytes: int = 0
    """Scores and positions of the tokens."""
    table_bytes: int = 0
    unfilled_bytes: int = 0
    """Of pages: places without a token, and alignment."""

    def add(self, handle: KVHandle, plan: PagePlan) -> None:
        foot, dim = of_handle(handle, plan), plan.geometry.head_dim
        self.prompts += 1
        self.full_bytes += foot.full_bytes
        self.all_in_bytes += foot.all_in_bytes
        for run in handle.runs:
            layout, tokens = layout_of(run, plan), np.frombuffer(run.tokens, "<i4")
            form = layout.format
            stored, entries = int(tokens.sum()), int((-(-tokens // layout.tokens)).sum())
            data = stored * form.read_bytes(dim)
            self.data_bytes[form.name] = self.data_bytes.get(form.name, 0) + data
            self.score_bytes += stored * (layout.token_bytes - form.read_bytes(dim))
            self.table_bytes += (entries + len(tokens)) * TABLE_ENTRY_BYTES
        used = sum(self.data_bytes.values()) + self.score_bytes + self.table_bytes
        self.unfilled_bytes = self.all_in_bytes - used
        self.ratio = round(self.full_bytes / self.all_in_bytes, 3)


def measure(
    settings: AppConfig, lengths: Sequence[int], prompts: int, *, prefix_cache: bool
) -> list[Row]:
    """Compress prompts of each length, one after another."""
    if not prefix_cache:
        settings = replace(settings, pool=replace(settings.pool, prefix_bytes=0))
    path = resolve(settings.model.name)
    texts = documents(
        Vocabulary(path).encode, "test", context=max(lengths), continuation=1, count=prompts
    )
    handles = list[KVHandle]()

    def watch(message: Message) -> None:
        if isinstance(message, Compressed):
            handles.append(message.handle)

    rows = list[Row]()
    with LocalServer(settings, path, watch=watch) as server:
        for length in lengths:
            row, greedy = Row(prefix_cache, length), Sampling(temperature=0.0, max_tokens=2)
            for number, text in enumerate(texts):
                request = server.request(text.context[:length], replace(greedy, ignore_eos=True))
                salt = f"{length} {number}"
                (answer,) = server.complete([replace(request, cache_salt=salt)])
                if answer.error is not None:
                    raise RuntimeError(answer.error.message)
                row.add(handles.pop(), server.plan)
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--prompts", type=int, default=3, help="of each length")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    lengths = [int(length) for length in options.lengths.split(",")]
    host = host_info()
    rows = [
        row
        for cached in (False, True)
        for row in measure(AppConfig(), lengths, options.prompts, prefix_cache=cached)
    ]
    columns = ("prefix cache", "tokens", "ratio", "all-in", "data", "scores", "tables", "unfilled")
    lines = [
        [
            "yes" if row.prefix_cache else "no",
            row.tokens,
            row.ratio,
            row.all_in_bytes // row.prompts,
            sum(row.data_bytes.values()) // row.prompts,
            row.score_bytes // row.prompts,
            row.table_bytes // row.prompts,
            row.unfilled_bytes // row.prompts,
        ]
        for row in rows
    ]
    console.print(make_table(columns, lines, "bytes of a compressed prompt"))
    if options.json:
        write_json({"host": host, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
