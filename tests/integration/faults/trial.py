"""One trial: send requests, let a process die at a point, then check answers and pages."""

import asyncio
import itertools
import random
from dataclasses import dataclass, field

from tests.integration.faults.cluster import Answer, Cluster
from tests.integration.faults.points import (
    FIRST_DEATH,
    LOWERING_POINTS,
    POINTS,
    Point,
)
from triptych.core.messages import Request, Sampling

CLIENTS, ANSWER_TOKENS = 6, 32
BEGINNING = tuple(random.Random("beginning").choices(range(2, 250), k=128))
"""Two blocks with which the prompts of every second client begin; of these they read the second
where the cache has it."""
UNCACHED = tuple(random.Random("uncached").choices(range(2, 250), k=150))
"""The prompt of two other clients, which a third begins with: one of them computes it for all."""
STARVED_S = 1.5
"""Pause of this process after which an answer that was computed again says nothing: others paused
as long, and messages of seconds ago count as lost."""
STOPPED_S = 10.0
"""Pause after which nothing of a trial says anything: somebody has stopped the processes."""
TRIES = 8
"""Attempts of a trial: requests migrate at random, so one attempt may not pass the point."""
SAME_TOKENS = ("prefill", "compress", "decode")
"""Roles whose death must not change a token. After the death of the router, the pool or both decode
workers, an answer is computed again from its output tokens. Their keys and values are then
compressed in other steps, so later tokens can differ."""


def requests() -> list[Request]:
    """Different prompts or seeds, so that no two answers are alike."""
    sampling = [
        Sampling(
            max_tokens=ANSWER_TOKENS,
            temperature=0.7,
            seed=i,
            ignore_eos=True,
            logprobs=1 if is_asking(i) else -1,
        )
        for i in range(CLIENTS)
    ]
    return [
        Request(
            id="",
            prompt=prompt(i),
            sampling=sampling[i],
            reply_to="",
        )
        for i in range(CLIENTS)
    ]


def prompt(client: int) -> tuple[int, ...]:
    own = tuple(random.Random(client).choices(range(2, 250), k=24 + 10 * client))
    if has_cached_beginning(client):
        return BEGINNING + own
    return UNCACHED if client < CLIENTS - 1 else UNCACHED[:128] + own


def has_cached_beginning(client: int) -> bool:
    return client % 2 == 0


def is_asking(client: int) -> bool:
    """Whether it wants to know how likely each token was."""
    return client % 3 == 1


def fate(client: int, answer: Answer) -> str:
    """How an answer ended that did not come to its end as it should; empty if it did."""
    if answer.ending != "length":
        return answer.ending
    wanted = answer.tokens if is_asking(client) else []
    return "" if answer.rated == wanted else "log probabilities of other tokens"


async def prepare(cluster: Cluster) -> str:
    """Have the beginning cached that clients share, for clients with this salt."""
    salt = f"salt {next(SALTS)}"
    sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    first = Request(id="", prompt=(*BEGINNING, 2, 3), sampling=sampling, reply_to="")
    await cluster.answer(first, salt)
    await cluster.settled()
    return salt


SALTS = itertools.count()


async def concurrent_answers(cluster: Cluster, salt: str, seed: int = 0) -> list[Answer]:
    """Send all requests within 50 ms; return their answers in the order of the requests."""
    luck = random.Random(seed)

    async def ask(client: int, request: Request) -> Answer:
        await asyncio.sleep(luck.uniform(0, 0.05))
        return await cluster.answer(request, salt)

    return await asyncio.gather(*itertools.starmap(ask, enumerate(requests())))


@dataclass
class Trial:
    """Result of one death."""

    point: str
    seed: int
    pass_number: int
    died: bool
    lost: list[str]
    """How the answers ended that were not completed."""
    wrong: int
    """Answers whose tokens differ from those of a run without a death."""
    retried: int
    """Answers of more than one attempt."""
    wrong_at_once: int
    """Answers of a single attempt whose tokens differ."""
    faults: list[str] = field(default_factory=list[str])
    longest_pause_s: float = 0.0
    """Of this process: on a busy machine it waits for a core."""

    @property
    def is_starved(self) -> bool:
        """Whether processes stood still so long that they may have been given up as dead."""
        return self.longest_pause_s > STARVED_S

    def is_good(self, point: Point) -> bool:
        """Lowered requests have other tokens in each run, since they are chosen at random."""
        must_equal = point.role in SAME_TOKENS and point not in LOWERING_POINTS
        changed = self.wrong if must_equal else 0
        return self.died and not self.lost and not changed and not self.faults


@dataclass
class Trials:
    """The reference run without a death: its answers, and how often each point is passed."""

    cluster: Cluster
    whole: list[Answer]
    passes: dict[Point, int]

    @classmethod
    async def of(cls, cluster: Cluster) -> "Trials":
        await concurrent_answers(cluster, await prepare(cluster))
        await cluster.settled()
        salt = await prepare(cluster)
        before = {point: cluster.board.passes(point) for point in POINTS}
        whole = await concurrent_answers(cluster, salt)
        await cluster.settled()
        passes = {point: cluster.board.passes(point) - before[point] for point in POINTS}
        assert [fate(client, answer) for client, answer in enumerate(whole)] == [""] * CLIENTS
        assert len({tuple(answer.tokens) for answer in whole}) == CLIENTS
        assert [answer.shared_bytes > 0 for answer in whole] == [cluster.shares_prefixes] * CLIENTS
        return cls(cluster, whole, passes)

    async def run(self, point: Point, seed: int) -> Trial:
        """Let a process die at a point, on the pass that the seed selects."""
        for _ in range(TRIES - 1):
            trial = await self._try(point, seed)
            is_doubtful = trial.is_starved and trial.retried > 0
            if trial.longest_pause_s > STOPPED_S:
                continue
            if (trial.died and not is_doubtful) or trial.lost or trial.faults:
                return trial
        return await self._try(point, seed)

    async def _try(self, point: Point, seed: int) -> Trial:
        board, luck = self.cluster.board, random.Random(f"{point.name} {seed}")
        salt = await prepare(self.cluster)
        number = luck.randint(1, max(1, self._usual_passes(point) // 2))
        board.arm(point, number)
        if point.is_second:
            board.arm(FIRST_DEATH, luck.randint(2, ANSWER_TOKENS))
        self.cluster.longest_pause_s = 0.0
        answers, faults = await concurrent_answers(self.cluster, salt, seed), list[str]()
        try:  # what is done for a request goes on when its client has everything
            await self.cluster.settled()
        except TimeoutError as error:
            faults.append(str(error))
        changed = [
            answer
            for answer, other in zip(answers, self.whole, strict=True)
            if answer.ending == "length" and answer.tokens != other.tokens
        ]
        return Trial(
            point=point.name,
            seed=seed,
            pass_number=number,
            died=not board.disarm(),
            lost=[lost for client, answer in enumerate(answers) if (lost := fate(client, answer))],
            wrong=len(changed),
            retried=sum(answer.retries > 0 for answer in answers),
            wrong_at_once=sum(answer.retries == 0 for answer in changed),
            faults=faults,
            longest_pause_s=self.cluster.longest_pause_s,
        )

    def _usual_passes(self, point: Point) -> int:
        """Expected passes of a point; a takeover worker continues one or two requests."""
        return 2 if point.is_second else self.passes[point]
