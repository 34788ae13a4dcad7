"""Generated tasks whose question comes after the prompt was compressed.

All are seeded and need no data file. The filler is the prose of a split. A small model fails
some of them even with its full cache, so every score is reported next to the full cache's.
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
"""Facts are placed before this share of the context, outside of recent windows."""
NOUNS = ("river", "candle", "anchor", "violin", "garden", "marble", "saddle", "lantern", "pepper")
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
class TaskBuilder:
    """Builds tasks from facts, a question and an answer."""

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
        """Insert facts into the filler at their depths, and tokenize question and answer."""
        prompt = self._place([(depth, self.vocabulary.encode(fact)) for depth, fact in facts])
        return self.with_prompt(kind, number, prompt, question, answer)

    def with_prompt(
        self, kind: str, number: int, prompt: Sequence[int], question: str, answer: str
    ) -> Task:
        """A task; the question's tokens are those that the answer after it does not change."""
        alone = self.vocabulary.encode(question)
        whole = self.vocabulary.encode(question + answer)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, whole, strict=False))
        forced = tuple(token for token, _ in same)
        expected = tuple(whole[len(forced) :])
        case = Case(
            name=f"{kind}-{number}",
            prompt=tuple(prompt),
            forced=forced,
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


Generate = Callable[[TaskBuilder, random.Random, int, float], Task]
"""From builder, randomness, task number and depth of its fact to a task."""


def passkey_texts(rng: random.Random) -> tuple[str, str, str]:
    """A fact with a random number, the question about it, and the answer."""
    key = rng.randrange(10_000, 100_000)
    fact = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    return fact, "\nWhat is the pass key? The pass key is", f" {key}"


def passkey(builder: TaskBuilder, rng: random.Random, number: int, depth: float) -> Task:
    """One number somewhere in the text."""
    fact, question, answer = passkey_texts(rng)
    return builder.task("passkey", number, [(depth, fact)], question, answer)


def needles(builder: TaskBuilder, rng: random.Random, number: int, depth: float) -> Task:
    """Several numbers under different names; the question names one."""
    names = rng.sample(NOUNS, DISTRACTORS + 1)
    numbers = [rng.randrange(10_000, 100_000) for _ in names]
    places = [depth, *(rng.uniform(0, DEEPEST) for _ in names[1:])]
    facts = [
        (place, f"\nThe magic number for {name} is {value}.\n")
        for place, name, value in zip(places, names, numbers, strict=True)
    ]
    question = f"\nWhat is the magic number for {names[0]}? The magic number for {names[0]} is"
    return builder.task("needles", number, facts, question, f" {numbers[0]}")


def repetition(builder: TaskBuilder, rng: random.Random, number: int, depth: float) -> Task:
    """The same random words 100 times; the question is their first half, the answer the rest."""
    del depth
    nouns = rng.sample(NOUNS, 6)
    line = " ".join(nouns)
    prompt = builder.vocabulary.encode(f"{line}.\n" * REPETITIONS)
    half = " ".join(nouns[:3])
    return builder.with_prompt("repetition", number, prompt, half, line.removeprefix(half))


def rare(builder: TaskBuilder, rng: random.Random, number: int, depth: float) -> Task:
    """A phrase of tokens that occur nowhere else in the text."""
    used, decode = set(builder.filler), builder.vocabulary.decode
    phrase = ""
    for token in rng.sample(range(builder.vocabulary.size), builder.vocabulary.size):
        text = decode([token])
        if token not in used and text.startswith(" ") and text[1:].isalpha() and text.isascii():
            phrase += text
        if phrase.count(" ") == RARE_TOKENS:
            break
    fact = f"\nThe secret phrase is:{phrase}.\n"
    question = "\nWhat is the secret phrase? The secret phrase is:"
    return builder.task("rare", number, [(depth, fact)], question, phrase)


def aliasing(builder: TaskBuilder, rng: random.Random, number: int, depth: float) -> Task:
    """Two facts that differ in one letter and in their numbers."""
    right, wrong = (rng.randrange(1_000, 10_000) for _ in range(2))
    names = rng.sample(("Anna", "Anne"), 2)
    facts = [
        (depth, f"\n{names[0]}'s code is {right}.\n"),
        (rng.uniform(0, DEEPEST), f"\n{names[1]}'s code is {wrong}.\n"),
    ]
    question = f"\nWhat is {names[0]}'s code? {names[0]}'s code is"
    return builder.task("aliasing", number, facts, question, f" {right}")


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
    """``count`` tasks of each kind, with facts at evenly spaced depths.

    Raises: ConfigError for an unknown kind, or a context that is longer than the filler
    """
    tokens = vocabulary.encode(prose(split))
    made = list[Task]()
    for kind in kinds:
        if kind not in TASKS:
            raise ConfigError(f"task {kind!r}: expected one of {sorted(TASKS)}")
        rng = random.Random(f"{seed} {kind}")
        for number in range(count):
            start = rng.randrange(max(1, len(tokens) - context))
            builder = TaskBuilder(vocabulary, tokens[start : start + context], context)
            depth = DEEPEST * (number + 0.5) / count
            made.append(TASKS[kind](builder, rng, number, depth))
    return made
