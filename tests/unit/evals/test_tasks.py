"""Tasks: the fact is in the prompt, the question is not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from triptych.core.errors import ConfigError
from triptych.evals.data.tasks import TASKS, make_tasks
from triptych.evals.data.vocabulary import Vocabulary

PHRASE = {f" zq{chr(97 + n // 26)}{chr(97 + n % 26)}": 900 + n for n in range(100)}
RARE_WORDS = {token: word for word, token in PHRASE.items()}
PIECES = re.compile(r" zq[a-z]{2}|.", re.DOTALL)


@dataclass(frozen=True)
class CharacterVocabulary(Vocabulary):
    """One token per character, and some whole words that only a rare phrase has."""

    @property
    def size(self) -> int:
        return 1000

    def encode(self, text: str) -> list[int]:
        return [PHRASE[word] if word in PHRASE else ord(word) for word in PIECES.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(RARE_WORDS.get(token, chr(token)) for token in tokens)


VOCABULARY = CharacterVocabulary(Path())


@pytest.mark.parametrize("kind", TASKS)
def test_the_answer_is_in_the_prompt_and_the_question_is_not(kind: str) -> None:
    made = make_tasks([kind], VOCABULARY, "evaluation", context=2500, count=4, seed=1)
    assert len(made) == 4
    for task in made:
        prompt, asked = VOCABULARY.decode(task.case.prompt), VOCABULARY.decode(task.case.forced)
        answer = VOCABULARY.decode(task.expected)
        assert answer.strip() in prompt
        assert "What is" not in prompt
        assert prompt.find(answer.strip()) < 0.95 * len(prompt)
        assert task.case.free_tokens == len(task.expected) > 0
        assert asked
        assert task.score(task.expected) == 1.0
        wrong = (task.expected[0] + 1, *task.expected[1:])
        assert task.score(wrong) == 0.0
        if kind != "repetition":
            assert len(task.case.prompt) == 2500


def test_the_same_seed_makes_the_same_tasks_and_another_one_others() -> None:
    def prompts(seed: int) -> list[tuple[int, ...]]:
        made = make_tasks(["passkey"], VOCABULARY, "evaluation", context=900, count=3, seed=seed)
        return [task.case.prompt for task in made]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_depths_are_spread_over_the_context_but_not_over_the_recent_window() -> None:
    made = make_tasks(["passkey"], VOCABULARY, "evaluation", context=2000, count=5, seed=0)
    depths = [VOCABULARY.decode(task.case.prompt).find("The pass key is") / 2000 for task in made]
    assert depths == sorted(depths)
    assert depths[0] < 0.15
    assert 0.7 < depths[-1] < 0.9


def test_wrong_kinds_and_contexts_are_refused() -> None:
    with pytest.raises(ConfigError, match="passky"):
        make_tasks(["passky"], VOCABULARY, "evaluation", context=900, count=1, seed=0)
    with pytest.raises(ConfigError, match="context of 30 tokens"):
        make_tasks(["passkey"], VOCABULARY, "evaluation", context=30, count=1, seed=0)
