"""Rows of the frontier: one per method and context length, and the ends of the frontier."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from triptych.core.methods.composition import Method
from triptych.core.methods.table import METHODS
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.frontier.frontier_study import PreparedFrontier
from triptych.evals.frontier.probes import ProbeGroup
from triptych.evals.frontier.record_file import ProbeRecord, TimeRecord
from triptych.evals.methods.baselines import is_baseline
from triptych.evals.methods.method_names import DEFAULT, FULL, SERVED, SIMULATED
from triptych.evals.metrics.fidelity import Interval, Summary, bootstrap, summarize
from triptych.evals.metrics.text_overlap import bleu, rouge_1, rouge_l

KVPRESS = "kvpress:"
"""Before the names of presses, which ``benchmarks/methods/kvpress_frontier.py`` adds to the
records."""
PAPERS = {
    FULL: "",
    "mean_attention": "DiffKV's significance as a ranking",
    "soft_prune": "TinyServe",
    "simulated": "negative control",
}
"""Of what is not in the table of methods."""


@dataclass(frozen=True, kw_only=True)
class FrontierRow:
    """A method at one context length."""

    method: str
    paper: str
    served: bool
    """Whether a request can choose it; the others run in transformers with a mask."""
    context: int
    bytes_data_ratio: float
    bytes_all_in_ratio: float
    summary: Summary
    passkeys: float
    """Share of the pass keys that were answered, asked after the continuation."""
    passkeys_ci95: Interval | None

    def as_json(self) -> dict[str, object]:
        """Flat: ``summary`` comes with the other fields."""
        flat = {name: value for name, value in asdict(self).items() if name != "summary"}
        return flat | asdict(self.summary)


@dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """Greedy answers of a method next to those of the full cache.

    Source: FastCache, section 5.2 (BLEU, ROUGE-1 and ROUGE-L to the answers of the full cache)
    """

    method: str
    context: int
    answers: int
    tokens: int
    identical: float
    """Share of answers that are the same to the last token."""
    bleu: float
    rouge_1: float
    rouge_l: float


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """Time of the compressor for a method."""

    method: str
    context: int
    us_per_token: dict[int, float]
    """By the number of prompts in a batch."""
    prefill_us_per_token: float
    """Of a single prompt."""

    @property
    def share_of_prefill(self) -> float:
        """Of one prompt."""
        return self.us_per_token[1] / self.prefill_us_per_token

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "share_of_prefill": round(self.share_of_prefill, 4)}


def frontier_rows(prepared: PreparedFrontier, records: Sequence[ProbeRecord]) -> list[FrontierRow]:
    """Rows of the methods that have all probes of a context."""
    return [
        _row(name, group, found)
        for group in prepared.groups_of("texts")
        for name in _names(prepared, records)
        if (found := _of(records, name, group)) is not None
    ]


def overlap_rows(prepared: PreparedFrontier, records: Sequence[ProbeRecord]) -> list[OverlapRow]:
    """Rows of the methods that have all answers."""
    vocabulary = Vocabulary(prepared.path)
    return [
        _overlap(name, group, full, found, vocabulary)
        for group in prepared.groups_of("answers")
        if (full := _of(records, FULL, group)) is not None
        for name in _names(prepared, records)
        if (found := _of(records, name, group)) is not None
    ]


def time_rows(prepared: PreparedFrontier, records: Iterable[TimeRecord]) -> list[TimeRow]:
    """Rows of the methods that were timed with one prompt at least."""
    known = list(records)
    rows = list[TimeRow]()
    for name in _names(prepared, known):
        found = {one.batch: one for one in known if one.method == name}
        if 1 in found:
            times = {batch: found[batch].compress_us for batch in sorted(found)}
            rows.append(
                TimeRow(
                    method=name,
                    context=found[1].context,
                    us_per_token=times,
                    prefill_us_per_token=found[1].prefill_us,
                )
            )
    return rows


def frontier_of(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    """Rows of one context that no other row beats in both bytes and KL, by bytes."""
    found = list[FrontierRow]()
    for row in sorted(rows, key=lambda row: (row.bytes_all_in_ratio, row.summary.kl)):
        if not found or row.summary.kl < found[-1].summary.kl:
            found.append(row)
    return found


def is_served(name: str) -> bool:
    """Whether a method of a study runs in the engines of the server."""
    elsewhere = name == FULL or name.startswith((SIMULATED, KVPRESS))
    return not elsewhere and not is_baseline(name)


def paper_of(name: str) -> str:
    """The paper of a method, by its name in a study."""
    kind = name.removeprefix(SERVED).removeprefix(KVPRESS).partition("+")[0].partition("@")[0]
    if kind not in METHODS.builtin:  # such as ``uniform:k8v4``
        kind = kind.partition(":")[0]
    if kind in PAPERS:
        return PAPERS[kind]
    if kind != DEFAULT and kind not in METHODS.builtin:  # a press that has no rule here
        return ""
    method = METHODS.load("diffkv" if kind == DEFAULT else kind)
    return method.paper if isinstance(method, Method) else ""


def _names(
    prepared: PreparedFrontier, records: Iterable[ProbeRecord | TimeRecord]
) -> Iterable[str]:
    """Methods of the study, and others that its file has, such as those of kvpress."""
    of_study = [FULL, *(method.name for method in prepared.methods)]
    return dict.fromkeys([*of_study, *(one.method for one in records)])


def _of(records: Iterable[ProbeRecord], name: str, group: ProbeGroup) -> list[ProbeRecord] | None:
    """Records of a method in the order of the group's probes; None if some are missing."""
    found = {one.case: one for one in records if (one.method, one.group) == (name, group.name)}
    cases = [probe.case.name for probe in group.probes]
    return [found[case] for case in cases] if found.keys() >= set(cases) else None


def _row(name: str, group: ProbeGroup, records: list[ProbeRecord]) -> FrontierRow:
    full = sum(one.footprint.full_bytes for one in records)
    answered = [
        float(record.tokens == probe.expected)
        for record, probe in zip(records, group.probes, strict=True)
    ]
    return FrontierRow(
        method=name,
        paper=paper_of(name),
        served=is_served(name),
        context=group.context,
        bytes_data_ratio=sum(one.footprint.data_bytes for one in records) / full,
        bytes_all_in_ratio=sum(one.footprint.all_in_bytes for one in records) / full,
        summary=summarize([[one.steps] for one in records if one.steps is not None]),
        passkeys=sum(answered) / len(answered),
        passkeys_ci95=bootstrap(answered),
    )


def _overlap(
    name: str,
    group: ProbeGroup,
    full: list[ProbeRecord],
    ours: list[ProbeRecord],
    vocabulary: Vocabulary,
) -> OverlapRow:
    reference = [vocabulary.decode(one.tokens) for one in full]
    answers = [vocabulary.decode(one.tokens) for one in ours]
    same = sum(a.tokens == b.tokens for a, b in zip(full, ours, strict=True))
    return OverlapRow(
        method=name,
        context=group.context,
        answers=len(ours),
        tokens=group.probes[0].case.free_tokens,
        identical=same / len(ours),
        bleu=bleu(reference, answers),
        rouge_1=rouge_1(reference, answers),
        rouge_l=rouge_l(reference, answers),
    )
