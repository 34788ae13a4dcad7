"""Workloads of the comparison: lengths, clients or rates, and conversations."""

import re
from dataclasses import dataclass
from math import exp, log
from random import Random

from benchmarks.peers.peer import ServerNeeds
from triptych.core.errors import ConfigError
from triptych.loadgen.measure import levels_of
from triptych.loadgen.workload.arrivals import arrivals_s
from triptych.loadgen.workload.turns import Segment, Session, Turn

CONVERSATIONS = "conversations"
BUSY, CACHE = "+busy", "+cache"
CLIENTS, TURNS, SHARED_TOKENS, MESSAGE_TOKENS = 8, 6, 1000, 64
"""Of the conversations: each message and each answer has as many tokens."""
SET_SIZE = 4
PROMPT_TOKENS, OUTPUT_TOKENS, LOADS = (32, 3000), (16, 256), (0.3, 0.8)
"""Limits of a random set; a load of 1 is as much as a core pair of 2026 can serve."""
SECONDS_PER_PROMPT_TOKEN, SECONDS_PER_OUTPUT_TOKEN = 0.002, 0.004
RANDOM_CLIENTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class PeerWorkload:
    """One row of the comparison; ``name`` is how it is written on the command line."""

    name: str
    prompt_tokens: int
    output_tokens: int
    clients: int = 16
    """At a time; with a rate, for how many at a time a server is started."""
    rate_per_s: float | None = None
    """Arrivals per second, whatever the server does; None: each client waits for its answer."""
    is_conversation: bool = False
    is_busy: bool = False
    """Another process takes a core."""
    has_cache: bool = False
    """The prefix cache is on, as it is by default, although no prompt repeats."""

    @property
    def context_tokens(self) -> int:
        if self.is_conversation:
            return SHARED_TOKENS + 2 * TURNS * MESSAGE_TOKENS
        return self.prompt_tokens + self.output_tokens

    def needs(self, port: int) -> ServerNeeds:
        """Settings of a server for this workload; conversations have the prefix cache on."""
        return ServerNeeds(
            port=port,
            clients=self.clients,
            context_tokens=self.context_tokens,
            prefix_cache=self.is_conversation or self.has_cache,
        )


def parse_workload(name: str) -> PeerWorkload:
    """Read ``PROMPT/OUTPUT/CLIENTS``, ``PROMPT/OUTPUT/RATEps`` or ``conversations``.

    Behind each may stand ``+cache``, ``+busy`` or both in this order.

    >>> parse_workload("512/64/4").clients, parse_workload("64/256/0.5ps+busy").rate_per_s
    (4, 0.5)
    >>> parse_workload("3500/128/4+cache").needs(8000).prefix_cache
    True

    Raises: ConfigError if it is none of these
    """
    free, is_busy = name.removesuffix(BUSY), name.endswith(BUSY)
    plain, has_cache = free.removesuffix(CACHE), free.endswith(CACHE)
    if plain == CONVERSATIONS:
        return PeerWorkload(
            name=name,
            prompt_tokens=SHARED_TOKENS + MESSAGE_TOKENS,
            output_tokens=MESSAGE_TOKENS,
            clients=CLIENTS,
            is_conversation=True,
            is_busy=is_busy,
        )
    if found := re.fullmatch(r"(\d+)/(\d+)/(\d+)", plain):
        prompt, output, clients = map(int, found.groups())
        return PeerWorkload(
            name=name,
            prompt_tokens=prompt,
            output_tokens=output,
            clients=clients,
            is_busy=is_busy,
            has_cache=has_cache,
        )
    if found := re.fullmatch(r"(\d+)/(\d+)/([\d.]+)ps", plain):
        return PeerWorkload(
            name=name,
            prompt_tokens=int(found[1]),
            output_tokens=int(found[2]),
            rate_per_s=float(found[3]),
            is_busy=is_busy,
            has_cache=has_cache,
        )
    raise ConfigError(
        f"workload {name!r}: expected such as 512/64/4 (prompt, output, clients), "
        f"512/64/0.5ps (requests per second), {CONVERSATIONS}, or one of them with {CACHE} or "
        f"{BUSY}"
    )


def random_names(seed: int) -> list[str]:
    """Names of workloads with random lengths: half with clients, half with rates.

    >>> random_names(1) == random_names(1), len(random_names(2))
    (True, 4)
    """
    source, names = Random(seed), list[str]()
    for number in range(SET_SIZE):
        prompt, output = (_log_uniform(source, *ends) for ends in (PROMPT_TOKENS, OUTPUT_TOKENS))
        cost_s = prompt * SECONDS_PER_PROMPT_TOKEN + output * SECONDS_PER_OUTPUT_TOKEN
        rate = f"{source.uniform(*LOADS) / cost_s:.2g}ps"
        names.append(f"{prompt}/{output}/{rate if number % 2 else source.choice(RANDOM_CLIENTS)}")
    return names


def _log_uniform(source: Random, low: int, high: int) -> int:
    return round(exp(source.uniform(log(low), log(high))))


def sessions_of(workload: PeerWorkload, scope: str, requests: int | None) -> list[Session]:
    """Requests of one round: the same for equal scopes, and other prompts for others."""
    if workload.is_conversation:
        return [_conversation(scope, f"{scope}/{at}", TURNS) for at in range(CLIENTS)]
    count = request_count(workload, requests)
    start_s = [0.0] * count
    if workload.rate_per_s is not None:
        start_s = arrivals_s(count, workload.rate_per_s, scope)
    return [
        Session((_single(workload, f"{scope}/{at}"),), start) for at, start in enumerate(start_s)
    ]


def request_count(workload: PeerWorkload, requests: int | None) -> int:
    """Number of requests in a round.

    >>> request_count(parse_workload("512/64/16"), None)
    32
    """
    if workload.is_conversation:
        return CLIENTS * TURNS
    clients, rate = workload.clients, workload.rate_per_s
    levels = levels_of([clients], [], requests) if rate is None else levels_of([], [rate], requests)
    return levels[0].requests


def warmup_of(workload: PeerWorkload) -> list[Session]:
    """Two requests of the workload's lengths, with prompts of their own."""
    if workload.is_conversation:
        return [_conversation("warm", "warm/0", 2)]
    return [Session((_single(workload, f"warm/{number}"),)) for number in range(2)]


def _single(workload: PeerWorkload, key: str) -> Turn:
    return Turn((Segment(key, workload.prompt_tokens),), workload.output_tokens)


def _conversation(scope: str, name: str, turns: int) -> Session:
    """Each turn repeats what was sent before; other tokens stand for the answers."""
    history, found = [Segment(f"{scope}/shared", SHARED_TOKENS)], list[Turn]()
    for number in range(turns):
        history.append(Segment(f"{name}/message{number}", MESSAGE_TOKENS))
        found.append(Turn(tuple(history), MESSAGE_TOKENS))
        history.append(Segment(f"{name}/answer{number}", MESSAGE_TOKENS))
    return Session(tuple(found))
