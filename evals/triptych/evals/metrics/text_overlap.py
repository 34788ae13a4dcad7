# sacrebleu and rouge_score have no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
# ruff: noqa: PLC0415 - the libraries come with the extra `eval` alone
"""BLEU and ROUGE of texts, by sacrebleu and rouge_score."""

from collections.abc import Sequence

from triptych.core.errors import ConfigError

MISSING = "{}: not installed; pip install 'triptych[eval]', or leave greedy answers out"


def bleu(references: Sequence[str], answers: Sequence[str]) -> float:
    """Corpus BLEU of answers against one reference each, 0 to 100.

    Raises: ConfigError if sacrebleu is not installed
    """
    try:
        from sacrebleu import corpus_bleu
    except ImportError as error:
        raise ConfigError(MISSING.format("sacrebleu")) from error
    return float(corpus_bleu(list(answers), [list(references)]).score)


def rouge_1(references: Sequence[str], answers: Sequence[str]) -> float:
    """Mean ROUGE-1 F1 (single words) of answers against one reference each, 0 to 1.

    Raises: ConfigError if rouge_score is not installed
    """
    return _rouge("rouge1", references, answers)


def rouge_l(references: Sequence[str], answers: Sequence[str]) -> float:
    """Mean ROUGE-L F1 (longest common subsequence), as ``rouge_1``."""
    return _rouge("rougeL", references, answers)


def _rouge(kind: str, references: Sequence[str], answers: Sequence[str]) -> float:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ConfigError(MISSING.format("rouge_score")) from error
    scorer = RougeScorer([kind])
    scores = [
        float(scorer.score(reference, answer)[kind].fmeasure)
        for reference, answer in zip(references, answers, strict=True)
    ]
    return sum(scores) / len(scores)
