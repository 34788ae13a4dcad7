"""Generated tasks whose question comes after the prompt was compressed.

All are seeded and need no data file. The filler is the prose of a split. A small model fails
some of them with its full cache already, so every score stands next to that one.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Case
from triptych.evals.data.texts import Split, prose
from triptych.evals.data.vocabulary import Vocabulary

DEEPEST = 0.85
"""Facts lie before this share of the context, so that no recent window holds them."""
WORDS = ("river", "candle", "anchor", "violin", "garden", "marble", "saddle", "lantern", "pepper")
REPETITIONS = 100
DISTRACTORS = 4
RARE_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """A case with a known answer."""

    kind: str
    case: Case
    expected: tuple[int, ...]

    def score(self, answer: Sequence[int]) -> float:
        """1 if the answer is the expected one, token by token, else 0."""
        return float(tuple(answer) == self.expected)


@dataclass(frozen=True)
class Maker:
    """What the generators of tasks share."""

    vocabulary: Vocabulary
    filler: Sequence[int]
    context: int
    """Tokens of the prompt."""

    def task(
        self,
        kind: str,
        number: int,
        facts: Sequence[tuple[float, str]],
        question: str,
        answer: str,
    ) -> Task:
        """Put facts at their depths into filler, and split question and answer into tokens."""
        prompt = self._place([(depth, self.vocabulary.encode(fact)) for depth, fact in facts])
        return self.asked(kind, number, prompt, question, answer)

    def asked(
        self, kind: str, number: int, prompt: Sequence[int], question: str, answer: str
    ) -> Task:
        """The question is what is the same with and without the answer behind it."""
        alone = self.vocabulary.encode(question)
        whole = self.vocabulary.encode(question + answer)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, whole, strict=False))
        asked = tuple(token for token, _ in same)
        expected = tuple(whole[len(asked) :])
        case = Case(
            name=f"{kind}-{number}",
            prompt=tuple(prompt),
            forced=asked,
            free_tokens=len(expected),
        )
        return Task(kind=kind, case=case, expected=expected)

    def _place(self, facts: Sequence[tuple[float, list[int]]]) -> list[int]:
        room = self.context - sum(len(fact) for _, fact in facts)
        if room < 1 or room > len(self.filler):
            raise ConfigError(
                f"tasks with a context of {self.context} tokens: expected between "
                f"{self.context - room + 1} and {len(self.filler)}"
            )
        prompt, used = list[int](), 0
        for depth, fact in sorted(facts):
            until = round(depth * room)
            prompt += [*self.filler[used:until], *fact]
            used = until
        return prompt + list(self.filler[used:room])


Generate = Callable[[Maker, random.Random, int, float], Task]
"""Maker, randomness, number of the task and depth of its fact, to a task."""


def passkey(maker: Maker, draw: random.Random, number: int, depth: float) -> Task:
    """One number somewhere in the text."""
    key = draw.randrange(10_000, 100_000)
    fact = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    question = "\nWhat is the pass key? The pass key is"
    return maker.task("passkey", number, [(depth, fact)], question, f" {key}")


def needles(maker: Maker, draw: random.Random, number: int, depth: float) -> Task:
    """Several numbers under different names; one is asked for."""
    names = draw.sample(WORDS, DISTRACTORS + 1)
    numbers = [draw.randrange(10_000, 100_000) for _ in names]
    places = [depth, *(draw.uniform(0, DEEPEST) for _ in names[1:])]
    facts = [
        (place, f"\nThe magic number for {name} is {value}.\n")
        for place, name, value in zip(places, names, numbers, strict=True)
    ]
    question = f"\nWhat is the magic number for {names[0]}? The magic number for {names[0]} is"
    return maker.task("needles", number, facts, question, f" {numbers[0]}")


def repetition(maker: Maker, draw: random.Random, number: int, depth: float) -> Task:
    """The same random words a hundred times over; after the first half, the rest is asked for."""
    del depth
    words = draw.sample(WORDS, 6)
    line = " ".join(words)
    prompt = maker.vocabulary.encode(f"{line}.\n" * REPETITIONS)
    half = " ".join(words[:3])
    return maker.asked("repetition", number, prompt, half, line.removeprefix(half))


def rare(maker: Maker, draw: random.Random, number: int, depth: float) -> Task:
    """A phrase of tokens that the rest of the text does not have."""
    used, decode = set(maker.filler), maker.vocabulary.decode
    phrase = ""
    for token in draw.sample(range(maker.vocabulary.size), maker.vocabulary.size):
        text = decode([token])
        if token not in used and text.startswith(" ") and text[1:].isalpha() and text.isascii():
            phrase += text
        if phrase.count(" ") == RARE_TOKENS:
            break
    fact = f"\nThe secret phrase is:{phrase}.\n"
    question = "\nWhat is the secret phrase? The secret phrase is:"
    return maker.task("rare", number, [(depth, fact)], question, phrase)


def aliasing(maker: Maker, draw: random.Random, number: int, depth: float) -> Task:
    """Two facts that differ in one letter and in their numbers."""
    right, wrong = (draw.randrange(1_000, 10_000) for _ in range(2))
    names = draw.sample(("Anna", "Anne"), 2)
    facts = [
        (depth, f"\n{names[0]}'s code is {right}.\n"),
        (draw.uniform(0, DEEPEST), f"\n{names[1]}'s code is {wrong}.\n"),
    ]
    question = f"\nWhat is {names[0]}'s code? {names[0]}'s code is"
    return maker.task("aliasing", number, facts, question, f" {right}")


TASKS: dict[str, Generate] = {
    task.__name__: task for task in (passkey, needles, repetition, rare, aliasing)
}


def make_tasks(
    kinds: Sequence[str],
    vocabulary: Vocabulary,
    split: Split,
    *,
    context: int,
    count: int,
    seed: int,
) -> list[Task]:
    """``count`` tasks of each kind, facts at depths that are spread evenly.

    Raises: ConfigError for a kind that there is not, or a context that filler cannot fill
    """
    tokens = vocabulary.encode(prose(split))
    made = list[Task]()
    for kind in kinds:
        if kind not in TASKS:
            raise ConfigError(f"task {kind!r}: expected one of {sorted(TASKS)}")
        draw = random.Random(f"{seed} {kind}")
        for number in range(count):
            start = draw.randrange(max(1, len(tokens) - context))
            maker = Maker(vocabulary, tokens[start : start + context], context)
            depth = DEEPEST * (number + 0.5) / count
            made.append(TASKS[kind](maker, draw, number, depth))
    return made
