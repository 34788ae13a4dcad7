"""Eviction policies of the prefix cache: hits and saved seconds on a synthetic Zipf workload.

    python benchmarks/kvpool/prefix_eviction.py --json benchmarks/results/prefix_eviction.json

Requests ask for one of many documents, with a popularity of rank ** -1.1 that drifts: every
thousand requests a tenth of the documents change places. A document has 1 to 64 blocks behind one
of eight shared system prompts. Its bytes depend on its compression, and the seconds of a block grow
with the tokens before it, as those of attention do. What is missing is published after each
request. Nothing is timed: seconds are the model's, and the same seed gives the same figures.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from triptych.cli.output import console, make_table, write_json
from triptych.kvpool.prefix.blocks import Limits, Namespace, Payload
from triptych.kvpool.prefix.eviction import CostPolicy, EvictionPolicy, LruPolicy
from triptych.kvpool.prefix.index import PrefixIndex

BLOCK_TOKENS = 64
SYSTEM_PROMPTS, LONGEST, ZIPF, DRIFT_EVERY = 8, 64, 1.1, 1000
HERE = Namespace(salt=b"", model="m", revision="1", profile="auto")
PAGES = np.zeros(1, np.int32)


@dataclass(frozen=True)
class Document:
    """A prompt: one number for each block stands for its tokens."""

    blocks: tuple[int, ...]
    block_bytes: int

    @property
    def tokens(self) -> list[int]:
        """All tokens, and one more to compute."""
        return [block for block in self.blocks for _ in range(BLOCK_TOKENS)] + [0]

    def payloads(self, first: int) -> list[Payload]:
        return [
            Payload(PAGES, self.block_bytes, block_seconds(at))
            for at in range(first, len(self.blocks))
        ]


@dataclass(frozen=True)
class Row:
    """One policy with one size of cache."""

    policy: str
    cache_share: float
    """Its bytes over those of all documents."""
    byte_hit_rate: float
    seconds_saved: float
    """Of all seconds that the prompts would take without a cache."""
    evictions: int


def block_seconds(at: int) -> float:
    """Of the block at a place of its prompt: weights, then attention to all before."""
    return 0.02 + 0.0005 * at


def documents(count: int, chance: random.Random) -> list[Document]:
    made = list[Document]()
    for number in range(count):
        blocks = min(LONGEST, 1 + int(chance.expovariate(1 / 12)))
        system = [1 + chance.randrange(SYSTEM_PROMPTS)] * 4
        own = [1_000_000 + number * LONGEST + at for at in range(blocks)]
        made.append(Document((*system, *own), chance.choice([120, 260, 460]) * 1024))
    return made


def requests(
    count: int, known: Sequence[Document], drift: float, chance: random.Random
) -> Iterator[Document]:
    """Documents by popularity; who has which changes slowly."""
    order = list(known)
    weights = list(accumulate((rank + 1) ** -ZIPF for rank in range(len(order))))
    for number in range(count):
        if number % DRIFT_EVERY == DRIFT_EVERY - 1:
            for _ in range(int(drift * len(order) / 2)):
                one, other = chance.randrange(len(order)), chance.randrange(len(order))
                order[one], order[other] = order[other], order[one]
        yield chance.choices(order, cum_weights=weights)[0]


def measure(name: str, policy: EvictionPolicy, share: float, asked: argparse.Namespace) -> Row:
    chance = random.Random(asked.seed)
    known = documents(asked.documents, chance)
    total = int(share * sum(len(d.blocks) * d.block_bytes for d in known))
    index = PrefixIndex(BLOCK_TOKENS, Limits(total_bytes=total, tenant_bytes=total), policy)
    hit_bytes = all_bytes = 0
    saved = spent = 0.0
    for document in requests(asked.requests, known, asked.drift, chance):
        tokens = document.tokens
        pin = index.acquire(HERE, tokens)
        found = len(pin.blocks) if pin else 0
        costs = [block_seconds(at) for at in range(len(document.blocks))]
        saved, spent = saved + sum(costs[:found]), spent + sum(costs)
        hit_bytes += found * document.block_bytes
        all_bytes += len(costs) * document.block_bytes
        if found < len(costs):
            done = index.publish(HERE, tokens[:-1], document.payloads(found), tenant="")
            if done.pin:
                index.release(done.pin.id)
        if pin:
            index.release(pin.id)
    stat = index.stat()
    return Row(
        name, share, round(hit_bytes / all_bytes, 4), round(saved / spent, 4), stat.evictions
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--shares", default="0.02,0.05,0.1,0.2,0.4")
    parser.add_argument("--half-lives", default="256,1024,4096")
    parser.add_argument("--drift", type=float, default=0.1, help="share of the documents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    policies: dict[str, EvictionPolicy] = {"lru": LruPolicy()}
    for half_life in options.half_lives.split(","):
        policies[f"cost, half life {half_life}"] = CostPolicy(float(half_life))
    rows = [
        measure(name, policy, float(share), options)
        for share in options.shares.split(",")
        for name, policy in policies.items()
    ]
    console.print(make_table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows]))
    if options.json:
        asked = {key: getattr(options, key) for key in ("documents", "requests", "drift", "seed")}
        write_json({**asked, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
