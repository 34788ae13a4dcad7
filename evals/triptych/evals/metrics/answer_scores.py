"""Scores of answers against references, as the usual harnesses compute them: 0 to 1."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from triptych.evals.metrics.text_overlap import rouge_l

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
PUNCTUATION = str.maketrans("", "", string.punctuation)

Score = Callable[[str, str], float]
"""From an answer and a reference."""


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and repeated blanks.

    Source: SQuAD's evaluation script, which LongBench uses too
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if both are the same once normalized."""
    return float(normalized(answer) == normalized(reference))


def contains(answer: str, reference: str) -> float:
    """1 if the reference is a part of the answer, both normalized."""
    return float(f" {normalized(reference)} " in f" {normalized(answer)} ")


def starts_with(answer: str, reference: str) -> float:
    """1 if the answer begins with the reference, both normalized: letters of choices, classes."""
    return float(f"{normalized(answer)} ".startswith(f"{normalized(reference)} "))


def f1(answer: str, reference: str) -> float:
    """F1 of the words that both have, each as often as it occurs.

    Source: SQuAD's evaluation script
    """
    ours, theirs = normalized(answer).split(), normalized(reference).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * common / (len(ours) + len(theirs))


def number(answer: str, reference: str) -> float:
    """1 if the last numbers of both are the same, as for GSM8K."""
    ours, theirs = NUMBER.findall(answer), NUMBER.findall(reference)
    return float(bool(ours) and bool(theirs) and _value(ours[-1]) == _value(theirs[-1]))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


METRICS: Mapping[str, Score] = {
    "exact_match": exact_match,
    "contains": contains,
    "starts_with": starts_with,
    "f1": f1,
    "number": number,
    "rouge_l": lambda answer, reference: rouge_l([reference], [answer]),
}
"""By the name in a task file."""


def best_score(metric: str, answer: str, references: Sequence[str]) -> float:
    """The largest score against any of the references, at least one.

    Raises: ConfigError if the metric needs a library that is not installed
    """
    return max(METRICS[metric](answer, reference) for reference in references)
