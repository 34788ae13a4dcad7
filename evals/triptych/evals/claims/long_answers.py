"""How far compressed caches drift from the full one as answers get longer."""

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

from triptych.evals.claims.draw import Draw
from triptych.evals.metrics.fidelity import Steps, first_divergence
from triptych.evals.studies.runner import Record
from triptych.evals.studies.study import Study, measure, prepare

METHODS = ("default", "leankv", "leankv+score_every_tokens=0", "uniform:k4v2", "kivi:2", "snapkv")
CONTEXT = 512
"""Tokens of the prompt: most of the tokens that are read are those of the answer."""
PARTS = 4
"""Equal parts of an answer whose steps are averaged."""


def drift(draw: Draw, tokens: int) -> Mapping[str, float]:
    """KL and top-1 agreement by length of the answer so far, and where greedy answers part.

    ``tokens``: forced tokens of the text behind a prompt of 512 tokens; a quarter of them are
    generated in greedy answers.

    Source: DiffKV, table 3 (errors accumulate in long answers of thinking models)
    """
    study = Study(
        model=str(draw.model.path),
        methods=METHODS,
        base=draw.base,
        contexts=(min(CONTEXT, draw.context),),
        documents=1,
        steps=tokens,
        split=draw.split,
        tasks=(),
        greedy_tokens=max(2, tokens // 4),
        seed=draw.seed,
    )
    records = measure(prepare(study), lambda _name, _count: None, lambda _name, _cases: None)
    texts, answers = (
        {name: of[group] for name, of in records.items()} for group in next(iter(records.values()))
    )
    found = dict[str, float]()
    full = next(iter(answers.values()))
    for name, mine in list(texts.items())[1:]:
        found |= {f"{name}: {key}": value for key, value in _parts(mine).items()}
        parted = [
            first_divergence(ours.tokens, theirs.tokens)
            for ours, theirs in zip(answers[name], full, strict=True)
        ]
        lengths = [study.greedy_tokens if at is None else at for at in parted]
        found[f"{name}: tokens before greedy answers part"] = fmean(lengths)
    return found


def _parts(records: list[Record]) -> Mapping[str, float]:
    steps = [record.steps for record in records if record.steps is not None]
    length = min(len(one.kl) for one in steps)
    edges = [length * part // PARTS for part in range(PARTS + 1)]
    found = dict[str, float]()
    for first, end in pairwise(edges):
        found[f"KL, steps {first} to {end}"] = _mean(steps, "kl", first, end)
        found[f"top-1, steps {first} to {end}"] = _mean(steps, "agree", first, end)
    return found


def _mean(steps: list[Steps], name: str, first: int, end: int) -> float:
    return fmean(float(getattr(one, name)[first:end].mean()) for one in steps)
