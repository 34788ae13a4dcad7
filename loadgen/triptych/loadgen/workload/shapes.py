"""Workloads: lengths of prompts and answers, shared prefixes, turns and pauses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from random import Random

from triptych.core.errors import ConfigError
from triptych.loadgen.workload.arrivals import POISSON
from triptych.loadgen.workload.turns import Segment, Turn

SPREAD = 0.6
"""Standard deviation of the logarithm of a length."""
WIDE_SPREAD = 1.2
CHAT_SPREAD = 1.0
REASONING_SPREADS = 1.84, 0.97
"""Standard deviation of the logarithm of prompts and answers."""
MEAN_TURNS = 4.0
MOST_TURNS = 12
AGENT_STEPS = (3, 8)
PREFIXES = 8
MANY_PREFIXES = 200
PREFIX_SHARE = 0.75
IMAGES = 15

ZIPF_EXPONENT, ZIPF_LIMIT = 1.1, 1024
"""Of the lengths that BurstGPT's own generator draws."""
_ZIPF = tuple(accumulate(rank**-ZIPF_EXPONENT for rank in range(1, ZIPF_LIMIT + 1)))
_ZIPF_MEAN = sum(r * r**-ZIPF_EXPONENT for r in range(1, ZIPF_LIMIT + 1)) / _ZIPF[-1]


@dataclass(frozen=True, slots=True)
class Means:
    """Mean lengths and pauses; their exact meaning depends on the workload."""

    prompt_tokens: int
    output_tokens: int
    pause_s: float


Make = Callable[[Random, str, str, Means], tuple[Turn, ...]]
"""Turns of one session, from a source of chance, a name of its own, the scope in which
beginnings are shared, and means."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload and its defaults."""

    make: Make
    means: Means
    burstiness: float = POISSON
    has_images: bool = False
    """Whether its turns have images: then they are chats in text."""


def uniform(_rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """One turn of exact length, without shared prefixes."""
    return (Turn((Segment(name, means.prompt_tokens),), means.output_tokens),)


def mixed(rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """One turn; lengths vary from very short to eight times the mean."""
    return (_turn(rng, name, means, WIDE_SPREAD),)


def similar(rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """Lengths around the means, such as long documents with short answers."""
    return (_turn(rng, name, means, SPREAD),)


def chat(rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """Single chat messages: log-normal lengths with the means of ShareGPT.

    Source: vLLM (arXiv 2309.06180), section 6.1, figure 11: means of 161 and 338 tokens. The spread
    is ours; the figure shows a histogram
    """
    return (_turn(rng, name, means, CHAT_SPREAD),)


def reasoning(rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """Short questions, some long ones, and answers with chains of thought.

    Source: ServeGen (arXiv 2505.09999) and the lengths of DeepSeek-R1 in its repository: mean and
    deviation of the logarithm over all clients, weighted by their rates (medians of the log-normal
    187 and 875 tokens)
    """
    of_prompts, of_answers = REASONING_SPREADS
    prompt = _length(rng, means.prompt_tokens, of_prompts)
    return (Turn((Segment(name, prompt),), _length(rng, means.output_tokens, of_answers)),)


def burstgpt(rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """Many short and a few very long prompts and answers: Zipf, scaled to the means.

    Source: BurstGPT (arXiv 2401.17644) and the generator in its repository: exponent 1.1 up to
    1,024, and Gamma arrivals of shape 0.5
    """
    prompt, output = _zipf(rng, means.prompt_tokens), _zipf(rng, means.output_tokens)
    return (Turn((Segment(name, prompt),), output),)


def conversations(rng: Random, name: str, scope: str, means: Means) -> tuple[Turn, ...]:
    """Chat: each turn repeats the history after a shared system prompt.

    The means are those of one message, of one answer and of the time to think.
    """
    history = [Segment(f"{scope}/system", means.prompt_tokens)]
    turns = list[Turn]()
    count = min(MOST_TURNS, 1 + int(rng.expovariate(1.0 / (MEAN_TURNS - 1.0)) + 0.5))
    for number in range(count):
        history.append(Segment(f"{name}/said{number}", _length(rng, means.prompt_tokens, SPREAD)))
        pause_s = rng.expovariate(1.0 / means.pause_s) if number and means.pause_s else 0.0
        turn = Turn(tuple(history), _length(rng, means.output_tokens, SPREAD), pause_s)
        turns.append(turn)
        # What the server will say is not known here; other text of its length stands for it.
        history.append(Segment(f"{name}/heard{number}", turn.output_tokens))
    return tuple(turns)


def shared_prefix(rng: Random, name: str, scope: str, means: Means) -> tuple[Turn, ...]:
    """One of a few shared prefixes of different popularity, and a unique suffix."""
    return _behind_one_of(PREFIXES, rng, name, scope, means)


def many_prefixes(rng: Random, name: str, scope: str, means: Means) -> tuple[Turn, ...]:
    """Like ``shared_prefix`` with 200 prefixes (Zipf, exponent 1), more than one cache holds."""
    return _behind_one_of(MANY_PREFIXES, rng, name, scope, means)


def _behind_one_of(
    count: int, rng: Random, name: str, scope: str, means: Means
) -> tuple[Turn, ...]:
    chosen = rng.choices(range(count), [1.0 / (rank + 1) for rank in range(count)])[0]
    common = max(1, int(means.prompt_tokens * PREFIX_SHARE))
    own = _length(rng, max(1, means.prompt_tokens - common), SPREAD)
    segments = (Segment(f"{scope}/prefix{chosen}", common), Segment(name, own))
    return (Turn(segments, _length(rng, means.output_tokens, SPREAD)),)


def agents(rng: Random, name: str, scope: str, means: Means) -> tuple[Turn, ...]:
    """Agent with tool calls: one long shared tool list, then short answers and pauses.

    The means are those of a task or of a tool's result, of one answer, and of a tool's time.
    """
    history = [Segment(f"{scope}/tools", 2 * means.prompt_tokens)]
    history.append(Segment(f"{name}/task", _length(rng, means.prompt_tokens, SPREAD)))
    turns = list[Turn]()
    for step in range(rng.randint(*AGENT_STEPS)):
        pause_s = _spread(rng, means.pause_s, WIDE_SPREAD) if step and means.pause_s else 0.0
        turn = Turn(tuple(history), _length(rng, means.output_tokens, SPREAD), pause_s)
        turns.append(turn)
        history.append(Segment(f"{name}/call{step}", turn.output_tokens))
        result = _length(rng, max(1, means.prompt_tokens // 2), WIDE_SPREAD)
        history.append(Segment(f"{name}/result{step}", result))
    return tuple(turns)


def image_chat(rng: Random, name: str, _scope: str, means: Means) -> tuple[Turn, ...]:
    """Fifteen images, each its own, and text between them; ``--prompt-tokens`` is that of the text.

    Source: MileBench, as FastCache describes it (section 4): a mean of 15.2 images and 422.3 words
    """
    images = tuple(f"{name}/image{number}" for number in range(IMAGES))
    turn = Turn((Segment(name, means.prompt_tokens),), _length(rng, means.output_tokens, SPREAD))
    return (replace(turn, images=images),)


SHAPES: dict[str, Shape] = {
    "uniform": Shape(uniform, Means(512, 64, 0.0)),
    "mixed": Shape(mixed, Means(256, 64, 0.0)),
    "chat": Shape(chat, Means(161, 338, 0.0)),
    "burstgpt": Shape(burstgpt, Means(256, 64, 0.0), burstiness=0.5),
    "conversations": Shape(conversations, Means(96, 64, 5.0)),
    "shared-prefix": Shape(shared_prefix, Means(512, 64, 0.0)),
    "many-prefixes": Shape(many_prefixes, Means(1024, 16, 0.0)),
    "agents": Shape(agents, Means(128, 48, 1.0)),
    "long-document": Shape(similar, Means(2048, 32, 0.0)),
    "image-chat": Shape(image_chat, Means(422, 64, 0.0), has_images=True),
    "reasoning": Shape(reasoning, Means(1016, 1400, 0.0)),
}


def shape_named(name: str) -> Shape:
    """Look up a workload by name.

    Raises: ConfigError if there is none of that name
    """
    if name not in SHAPES:
        raise ConfigError(f"workload {name!r}: expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _turn(rng: Random, name: str, means: Means, spread: float) -> Turn:
    prompt = _length(rng, means.prompt_tokens, spread)
    return Turn((Segment(name, prompt),), _length(rng, means.output_tokens, spread))


def _length(rng: Random, mean: int, spread: float) -> int:
    return max(1, min(8 * mean, round(_spread(rng, mean, spread))))


def _spread(rng: Random, mean: float, spread: float) -> float:
    """Log-normal with this mean."""
    return rng.lognormvariate(log(mean) - spread**2 / 2, spread)


def _zipf(rng: Random, mean: int) -> int:
    rank = rng.choices(range(1, ZIPF_LIMIT + 1), cum_weights=_ZIPF)[0]
    return max(1, round(rank * mean / _ZIPF_MEAN))
