"""Abort 1,000 requests beside twelve victims, and compare the victims' tokens with a calm run.

    python -m tests.e2e.abort_storm --seeds 20 --json benchmarks/results/abort_storm.json
    python -m tests.e2e.abort_storm --policies auto --caches off --seeds 2
    python -m tests.e2e.abort_storm --json benchmarks/results/abort_storm.json --resume

Each seed is one calm run of the victims alone, some runs beside neighbours that are not aborted,
and one beside the storm. A log probability may differ between calm and busy runs, since requests
are in other batches: the largest difference beside neighbours is the noise. In the storm no
difference may be larger, and no token may change whose two best candidates are further apart than
twice the noise. Each outlier is computed again beside neighbours, without aborts: a difference that
occurs there as well has nothing to do with aborts. Exit code 1 if an outlier is left, a stream of a
victim does not end whole, or bookings or pages are left.

The file of ``--json`` is written after each seed; with ``--resume`` its seeds are not run again.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from rich.progress import track

from tests.e2e.conftest import MODEL, Server, serve_run
from triptych.cli.list_options import names
from triptych.cli.output import console, make_table, write_json
from triptych.evals.data.texts import sources
from triptych.evals.data.vocabulary import Vocabulary
from triptych.loadgen.report.host import host_info
from triptych.workers.models.store.model_store import resolve

POLICIES, CACHES = ("uniform:fp16", "auto"), ("off", "on")
VICTIMS, NEIGHBOURS = 12, 12
LENGTHS = (20, 400)
"""Fewest and most tokens of a prompt."""
OPEN_ABORTERS = 24
"""Requests of the storm that are open at a time."""
LONGEST_LIFE_S = 0.4
RECHECKS = 4
RETURNED_WITHIN_S = 60

Prompt = list[int]


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The answer to one victim."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    """Log probability of the best token minus that of the second best."""
    ending: str = "cut"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A victim's answer next to that of the calm run."""

    seed: int
    victim: int
    noise: float
    """Largest difference of a log probability before the first other token."""
    changed_at: int | None
    """Position of the first other token; None: all are the same."""
    margin: float = 0.0
    """How far apart the two best candidates of the calm run are there."""

    def exceeds(self, bound: float) -> bool:
        return self.noise > bound or (self.changed_at is not None and self.margin > 2 * bound)

    @property
    def size(self) -> float:
        """The least bound within which this difference is."""
        return max(self.noise, self.margin / 2)


def compare(seed: int, victim: int, calm: Victim, busy: Victim) -> Difference:
    """Two answers to the same prompt."""
    pairs = enumerate(zip(calm.tokens, busy.tokens, strict=False))
    changed = next((at for at, (one, other) in pairs if one != other), None)
    known = zip(calm.logprobs[:changed], busy.logprobs[:changed], strict=False)
    return Difference(
        seed=seed,
        victim=victim,
        noise=max((abs(one - other) for one, other in known), default=0.0),
        changed_at=changed,
        margin=0.0 if changed is None else calm.margins[changed],
    )


@dataclass
class Outcome:
    """What one server showed."""

    policy: str
    cache: str
    seeds: list[int] = field(default_factory=list[int])
    """Those that were run."""
    beside_neighbours: list[Difference] = field(default_factory=list[Difference])
    in_storm: list[Difference] = field(default_factory=list[Difference])
    outliers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    aborted: int = 0
    not_whole: int = 0
    """Streams of victims that did not end with ``length``."""
    left: int = 0
    """Storms after which bookings or pages were left."""

    @classmethod
    def read(cls, saved: dict[str, Any]) -> "Outcome":
        """What ``asdict`` made of one."""
        differences: dict[str, Any] = {
            name: [Difference(**one) for one in saved[name]]
            for name in ("beside_neighbours", "in_storm")
        }
        return cls(**(saved | differences))

    @property
    def bound(self) -> float:
        """The largest difference without aborts."""
        return max((one.size for one in self.beside_neighbours), default=0.0)

    @property
    def faults(self) -> list[str]:
        bad = [f"{one} is not explained" for one in self.outliers if not one["explained"]]
        bad += [f"{self.not_whole} streams of victims were not whole"] * bool(self.not_whole)
        return bad + [f"{self.left} storms left bookings or pages"] * bool(self.left)


# ------------------------------------------------------------------ requests


@dataclass(frozen=True)
class Sender:
    """Sends prompts to one server."""

    session: aiohttp.ClientSession
    url: str
    max_tokens: int

    async def stream(self, prompt: Prompt, salt: str, max_tokens: int) -> AsyncIterator[Any]:
        """The events of an answer. Whoever stops to read closes the connection."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "logprobs": 2,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    async def victim(self, prompt: Prompt, salt: str) -> Victim:
        tokens, logprobs, margins = list[int](), list[float](), list[float]()
        ending, event = "cut", dict[str, Any]()
        try:
            async for event in self.stream(prompt, salt, self.max_tokens):
                if "error" in event:
                    ending = str(event["error"])
                    continue
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    told: dict[str, Any] = choice.get("logprobs") or {}
                    logprobs += told.get("token_logprobs") or []
                    margins += map(_margin, told.get("top_logprobs") or [])
                    ending = choice["finish_reason"] or ending
        except aiohttp.ClientError as error:
            ending = repr(error)
        return Victim(
            tokens=tuple(tokens), logprobs=tuple(logprobs), margins=tuple(margins), ending=ending
        )

    async def victims(self, prompts: Sequence[Prompt], salt: str) -> list[Victim]:
        return await asyncio.gather(*(self.victim(prompt, salt) for prompt in prompts))

    async def abort(self, prompt: Prompt, salt: str, luck: random.Random) -> None:
        """One request that is left after a random time, or after some tokens."""
        chunks, life_s = luck.choice((1, 3, 1000)), luck.uniform(0, LONGEST_LIFE_S)
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(life_s):
                events = self.stream(prompt, salt, 200)
                async for _ in events:
                    chunks -= 1
                    if not chunks:
                        break
                await events.aclose()  # type: ignore[attr-defined]


def _margin(candidates: dict[str, float]) -> float:
    best = sorted(candidates.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


# ------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Seed:
    """The prompts of one seed."""

    number: int
    victims: list[Prompt]
    others: list[Prompt]
    """Of neighbours and of the storm: a third begins like a victim's."""

    @classmethod
    def of(cls, number: int, text: Prompt, others: int) -> "Seed":
        luck = random.Random(number)

        def cut() -> Prompt:
            size = luck.randint(*LENGTHS)
            start = luck.randrange(len(text) - size)
            return text[start : start + size]

        victims = [cut() for _ in range(VICTIMS)]
        alike = [luck.choice(victims)[: luck.randint(1, 400)] + cut() for _ in range(others // 3)]
        rest = [cut() for _ in range(others - len(alike))]
        return cls(number, victims, luck.sample([*alike, *rest], others))


async def beside_neighbours(sender: Sender, seed: Seed, salt: str) -> list[Victim]:
    """The victims while as many others answer, none of which is aborted."""
    luck, over = random.Random(seed.number), asyncio.Event()

    async def neighbour() -> None:
        while not over.is_set():
            tokens = luck.randint(1, sender.max_tokens)
            with suppress(aiohttp.ClientError):
                async for _ in sender.stream(luck.choice(seed.others), salt, tokens):
                    pass

    neighbours = [asyncio.create_task(neighbour()) for _ in range(NEIGHBOURS)]
    found = await sender.victims(seed.victims, salt)
    over.set()
    await asyncio.gather(*neighbours)
    return found


async def in_storm(sender: Sender, seed: Seed, salt: str) -> tuple[list[list[Victim]], int]:
    """The victims, again and again until every request of the storm was aborted."""
    luck, waiting = random.Random(seed.number), iter(seed.others)
    sent = 0

    async def aborter() -> None:
        nonlocal sent
        for prompt in waiting:
            await sender.abort(prompt, salt, luck)
            sent += 1

    storm = [asyncio.create_task(aborter()) for _ in range(OPEN_ABORTERS)]
    found = list[list[Victim]]()
    while not found or not all(task.done() for task in storm):
        found.append(await sender.victims(seed.victims, salt))
    await asyncio.gather(*storm)
    return found, sent


def is_empty(server: Server) -> bool:
    """Whether no request has bookings or pages."""
    return server.metric("triptych_router_booked_bytes") == 0 and server.pages_held() == 0


async def settle(server: Server) -> bool:
    """Wait until nothing is left of earlier requests; whether it came to that."""
    try:
        await asyncio.to_thread(server.wait_until, lambda: is_empty(server), RETURNED_WITHIN_S)
    except AssertionError:
        return False
    return True


async def one_seed(server: Server, sender: Sender, seed: Seed, rounds: int, out: Outcome) -> None:
    """Calm, busy and stormy runs of one seed, added to ``out``."""
    salt = str(seed.number)
    await sender.victims(seed.victims, salt)  # with a prefix cache, all later runs find the same
    await settle(server)
    calm = await sender.victims(seed.victims, salt)

    def differences(found: Iterable[Sequence[Victim]]) -> list[Difference]:
        return [
            compare(seed.number, at, one, other)
            for victims in found
            for at, (one, other) in enumerate(zip(calm, victims, strict=True))
        ]

    busy = [await beside_neighbours(sender, seed, salt) for _ in range(rounds)]
    out.beside_neighbours += differences(busy)
    stormy, aborted = await in_storm(sender, seed, salt)
    out.left += not await settle(server)
    out.in_storm += differences(stormy)
    out.aborted += aborted
    out.not_whole += sum(one.ending != "length" for one in chain(calm, *busy, *stormy))


async def explain(server: Server, sender: Sender, seeds: Sequence[Seed], out: Outcome) -> None:
    """Look at each outlier's prompt again beside neighbours, without aborts."""
    for outlier in [one for one in out.in_storm if one.exceeds(out.bound)]:
        seed, salt = seeds[outlier.seed], str(outlier.seed)
        calm = await sender.victims(seed.victims, salt)
        again = list[Difference]()
        for _ in range(RECHECKS):
            victims = await beside_neighbours(sender, seed, salt)
            at = outlier.victim
            again.append(compare(seed.number, at, calm[at], victims[at]))
        await settle(server)
        largest = max(one.size for one in again)
        out.outliers.append(
            asdict(outlier)
            | {"without_aborts": largest, "explained": largest >= outlier.size, "bound": out.bound}
        )


async def storms(
    server: Server,
    seeds: Sequence[Seed],
    rounds: int,
    max_tokens: int,
    out: Outcome,
    save: Callable[[], None],
) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        sender = Sender(session, server.url, max_tokens)
        left = [seed for seed in seeds if seed.number not in out.seeds]
        for seed in track(left, f"{out.policy}, cache {out.cache}", console=console):
            await one_seed(server, sender, seed, rounds, out)
            out.seeds.append(seed.number)
            save()
            _tell(seed, out)
        await explain(server, sender, seeds, out)
        save()


def _tell(seed: Seed, out: Outcome) -> None:
    mine = [one for one in out.in_storm if one.seed == seed.number]
    console.print(
        f"{out.policy}, cache {out.cache}, seed {seed.number}: bound {out.bound:.5f}, storm "
        f"{max(one.size for one in mine):.5f}, {sum(o.changed_at is not None for o in mine)} of "
        f"{len(mine)} answers changed, {out.not_whole} not whole, {out.left} left",
        soft_wrap=True,
    )
    sys.stdout.flush()


def run(
    out: Outcome,
    seeds: Sequence[Seed],
    save: Callable[[], None],
    *,
    rounds: int,
    max_tokens: int,
    dtype: str,
) -> None:
    """Start a server, and run the seeds that ``out`` lacks."""
    settings: dict[str, Any] = {
        "model": {"name": MODEL, "dtype": dtype},
        "compressor": {"policy": out.policy},
        "pool": {} if out.cache == "on" else {"prefix_bytes": 0},
    }
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        server = stack.enter_context(serve_run(Path(folder), settings))
        asyncio.run(storms(server, seeds, rounds, max_tokens, out, save))


def summary(out: Outcome) -> dict[str, Any]:
    changed = [one for one in out.in_storm if one.changed_at is not None]
    calm_changed = [one for one in out.beside_neighbours if one.changed_at is not None]
    return {
        "policy": out.policy,
        "cache": out.cache,
        "seeds": len(out.seeds),
        "aborted": out.aborted,
        "answers_beside_neighbours": len(out.beside_neighbours),
        "changed_beside_neighbours": len(calm_changed),
        "bound": out.bound,
        "answers_in_storm": len(out.in_storm),
        "changed_in_storm": len(changed),
        "largest_in_storm": max((one.size for one in out.in_storm), default=0.0),
        "outliers": out.outliers,
        "faults": out.faults,
    }


def _table(outcomes: Sequence[Outcome]) -> Any:
    heads = (
        "policy",
        "cache",
        "seeds",
        "aborted",
        "changed beside neighbours",
        "bound",
        "changed in storm",
        "largest in storm",
        "outliers",
        "faults",
    )
    rows = map(summary, outcomes)
    return make_table(
        heads,
        [
            [
                one["policy"],
                one["cache"],
                one["seeds"],
                one["aborted"],
                f"{one['changed_beside_neighbours']} of {one['answers_beside_neighbours']}",
                one["bound"],
                f"{one['changed_in_storm']} of {one['answers_in_storm']}",
                one["largest_in_storm"],
                len(one["outliers"]),
                "; ".join(one["faults"]),
            ]
            for one in rows
        ],
    )


def text_tokens() -> Prompt:
    encode = Vocabulary(resolve(MODEL)).encode
    return list(chain.from_iterable(encode(text) for _, text in sources("evaluation")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000, help="of a storm")
    parser.add_argument("--rounds", type=int, default=2, help="of the victims beside neighbours")
    parser.add_argument("--tokens", type=int, default=32, help="of each victim's answer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from what --json has")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json: the file that it goes on from")
    host, text = host_info(), text_tokens()
    seeds = [Seed.of(number, text, options.requests) for number in range(options.seeds)]
    outcomes = list[Outcome]()
    if options.resume and options.json.exists():
        outcomes = [Outcome.read(one) for one in json.loads(options.json.read_text())["outcomes"]]

    def save() -> None:
        if options.json:
            found = {
                "host": host,
                "servers": [summary(one) for one in outcomes],
                "outcomes": [asdict(one) for one in outcomes],
            }
            write_json(found, options.json)

    for policy, cache in product(names(options.policies), names(options.caches)):
        known = (one for one in outcomes if (one.policy, one.cache) == (policy, cache))
        out = next(known, None)
        if out is None:
            outcomes.append(out := Outcome(policy, cache))
        if len(out.seeds) < options.seeds:
            run(
                out,
                seeds,
                save,
                rounds=options.rounds,
                max_tokens=options.tokens,
                dtype=options.dtype,
            )
    console.print(_table(outcomes))
    for fault in chain.from_iterable(one.faults for one in outcomes):
        console.print(fault, soft_wrap=True)
    return 1 if any(one.faults for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
