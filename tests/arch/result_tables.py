"""Tables of result files, for the generated parts of the documents."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from triptych.evals.claims.claims_results import ClaimsResults
from triptych.evals.claims.verdicts import verdicts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def frontier(name: str) -> str:
    """The frontier: each method's paper, bytes and fidelity, and its time to compress if measured.

    ``name``: a result file of ``triptych eval frontier``.
    """
    content = _result(name)
    answers = {row["method"]: row for row in content["answers"]}
    times = {row["method"]: row for row in content["times"]}
    by_bytes = sorted(content["rows"], key=lambda row: (row["context"], row["bytes_all_in_ratio"]))
    rows = [_frontier_row(row, answers, times) for row in by_bytes]
    head = ("method", "paper", "served", "context", "bytes", "KL", "95 %", "top-1", "perplexity")
    more = ("pass keys", "BLEU, ROUGE-1, ROUGE-L", "us per token to compress, batch 1, 4, 16")
    return table((*head, *more), rows)


def _frontier_row(row: dict[str, Any], answers: Any, times: Any) -> tuple[str, ...]:
    answer, time = answers.get(row["method"]), times.get(row["method"])
    interval = row["kl_ci95"]
    overlap = [] if answer is None else [answer["bleu"], answer["rouge_1"], answer["rouge_l"]]
    spent = [] if time is None else time["us_per_token"].values()
    return (
        f"`{row['method']}`",
        row["paper"] or "-",
        "yes" if row["served"] else "no",
        f"{row['context']:,}",
        f"{row['bytes_all_in_ratio']:.3f}",
        f"{row['kl']:.4f}",
        "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}",
        f"{row['top1_agreement']:.3f}",
        f"{row['perplexity_ratio']:.4f}",
        f"{row['passkeys'] * row['documents']:.0f} of {row['documents']}",
        ", ".join(f"{value:.3g}" for value in overlap) or "-",
        ", ".join(f"{value:.1f}" for value in spent) or "-",
    )


def adaptive_links(name: str) -> str:
    """Job times over those of the best fixed method by speed of the link, means over seeds."""
    rows = _result(name)["links"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for phase in sorted({row["phase"] for row in rows}):
        here = [row for row in rows if row["phase"] == phase]
        times = [_mean(row["to_best"] for row in here if row["method"] == one) for one in methods]
        ours = [row for row in here if row["method"] == "adaptive"]
        worst = max(row["to_best"] for row in ours)
        lines.append(
            (
                f"{here[0]['mbit_s']:,}",
                *(f"{one:.3f}" if one < 10 else f"{one:.0f}" for one in times),
                f"{worst:.3f}",
                f"{_mean(row['job_s'] for row in ours):.2f}",
                f"{_mean(row['kl'] for row in ours):.4f}",
            )
        )
    head = (*(f"`{one}`" if one != "adaptive" else "**adaptive**" for one in methods),)
    return table(("Mbit/s", *head, "worst seed", "its job s", "its KL"), lines)


def adaptive_memory(name: str) -> str:
    """Job times and KL while memory runs short, means over seeds."""
    rows = _result(name)["memory"]
    lines = []
    keys = dict.fromkeys((row["floors"], row["method"]) for row in rows)
    for floors, method in keys:
        here = [row for row in rows if (row["floors"], row["method"]) == (floors, method)]
        cells = [
            f"{_mean(row[column] for row in here if row['phase'] == phase):.{digits}f}"
            for column, digits in (("job_s", 2), ("kl", 4))
            for phase in range(3)
        ]
        label = "half with a limit of KL" if floors else "none"
        lines.append((f"`{method}`", label, *cells, str(max(row["below_floor"] for row in here))))
    head = ("method", "limits", *(f"job s, {one}" for one in ("before", "overload", "after")))
    return table(
        (*head, *(f"KL, {one}" for one in ("before", "overload", "after")), "below their limit"),
        lines,
    )


def adaptive_choices(name: str) -> str:
    """Methods that requests of a server got, by phase and floor, of ``tests/e2e/adaptive_load``."""
    found = _result(name)
    ladder = found["ladder"]
    head = ("phase", "floor", "method", "its KL", "why", "requests", "same alone", "longest s")
    return table(
        head,
        [
            (
                row["phase"],
                row["floor"],
                f"`{row['method']}`",
                f"{ladder[row['method']]['kl']:.4f}",
                row["reason"],
                str(row["requests"]),
                str(row["same_alone"]) if row["phase"] == "load" else "",
                f"{row['longest_s']:.1f}",
            )
            for row in found["choices"]
        ],
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def image_methods(name: str) -> str:
    """Answers about pictures by method, of ``benchmarks/serving/image_chats.py accuracy``."""
    rows = [
        (
            f"`{row['method']}`" if row["image_bytes"] else row["method"],
            f"{row['image_keep_share']:g}" if row["keeps_a_share"] else "-",
            f"{row['image_tokens']:.1f}",
            f"{row['image_bytes'] / 1e3:.1f}",
            f"{row['stored_bytes'] / 1e3:.0f}",
            f"{row['accuracy']:.3f}",
            f"{row['same_as_first']:.3f}",
            f"{row['bleu']:.1f}, {row['rouge_1']:.3f}, {row['rouge_l']:.3f}"
            if "bleu" in row
            else "-",
            f"{row['kl']:.4f}",
            ", ".join(f"{kind} {share:.2f}" for kind, share in row["by_kind"].items()),
        )
        for row in _result(name)["rows"]
    ]
    head = ("method", "share of image tokens", "image tokens held", "kB of an image")
    more = ("kB of a request", "right", "as the first method", "BLEU, ROUGE-1, ROUGE-L")
    last = ("KL", "right by kind")
    return table((*head, *more, *last), rows)


def compress_times(name: str) -> str:
    """Time of the compressor by method and batch.

    ``name``: a result file of ``triptych bench methods``.
    """
    times: dict[str, dict[int, Any]] = {}
    for one in _result(name)["times"]:
        times.setdefault(one["method"], {})[one["batch"]] = one
    batches = sorted({batch for row in times.values() for batch in row})
    rows = [
        (
            f"`{method}`",
            *(f"{row[batch]['compress_us']:.1f}" for batch in batches),
            f"{row[8]['compress_us'] / row[1]['compress_us']:.2f}",
            f"{row[1]['compress_us'] / row[1]['prefill_us']:.3f}",
        )
        for method, row in times.items()
    ]
    head = ("method", *(f"batch {batch}" for batch in batches), "8 over 8 singles", "of prefill")
    return table(head, rows)


def static_kernels(name: str) -> str:
    """Registers, loads and instructions of decode attention, by method and target.

    ``name``: a result file of ``triptych kernels check``.
    """
    rows = [
        (
            f"`{row['variant'].split()[0]}`",
            row["target"],
            f"{row['registers']}, {row['spill_bytes']}",
            f"{one['reads']}",
            ", ".join(f"{count} of {width} B" for width, count in one["loads"].items()),
            f"{one['instructions_per_token']:g}",
            ", ".join(f"{kind} {count}" for kind, count in one["kinds"].items()),
            f"{one['tb_per_s_if_all_slots_issue']:g}",
        )
        for row in _result(name)["rows"]
        if row["kernel"] == "attend_sections"
        for one in row["passes"]
        if one["instructions_per_token"]
    ]
    head = ("method", "target", "registers, bytes spilled", "pages", "loads of a pass and lane")
    more = ("instructions per token", "instructions of a pass", "TB/s if all slots issue")
    return table((*head, *more), list(dict.fromkeys(rows)))


def claims(name: str) -> str:
    """What the papers claim, and whether it holds in a result file of ``triptych eval claims``."""
    rows = [
        (
            f"`{one.part}`",
            one.paper,
            one.claim,
            {"yes": "holds", "no": "**does not hold**", "open": "open"}[one.holds],
            one.number,
            f"{one.mean:.3g}",
            "{:.3g} to {:.3g}".format(*one.ci95),
        )
        for one in verdicts(ClaimsResults.from_json(_result(name)))
    ]
    head = ("part", "paper", "claim", "here", "number, and where the claim holds", "mean", "95 %")
    return table(head, rows)


def pipelines(name: str) -> str:
    """Latencies of methods at each rate, pipelined and one request at a time."""
    head = ("method", "requests/s", "TTFT s, mean and p99", "one at a time", "TPOT ms")
    more = ("one at a time", "s per token", "one at a time", "s in prefill, compress, decode")
    loads = [one for one in _result(name)["loads"] if one["reclaims"]]
    return table((*head, *more), _pipeline_rows(loads))


def _pipeline_rows(loads: list[Any]) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, float], dict[bool, Any]] = {}
    for one in loads:
        found.setdefault((one["method"], one["rate_per_s"]), {})[one["is_pipelined"]] = one
    for (method, rate), pair in found.items():
        if set(pair) == {True, False}:
            both = pair[True], pair[False]
            yield (
                f"`{method}`",
                f"{rate:g}",
                *(f"{one['ttft_s']:.2f}, {one['ttft_p99_s']:.2f}" for one in both),
                *(f"{1e3 * one['tpot_s']:.0f}" for one in both),
                *(f"{one['norm_latency_s']:.3f}" for one in both),
                ", ".join(f"{seconds:.2f}" for seconds in both[0]["stage_s"].values()),
            )


def reclaim(name: str) -> str:
    """Memory that requests hold with and without zombie reclaim."""
    found: dict[tuple[str, float], dict[bool, Any]] = {}
    for one in _result(name)["loads"]:
        if one["is_pipelined"]:
            found.setdefault((one["method"], one["rate_per_s"]), {})[one["reclaims"]] = one
    rows = [
        (
            f"`{method}`",
            f"{rate:g}",
            *(f"{pair[on]['mean_held_bytes'] / 1e6:.1f}" for on in (True, False)),
            f"{pair[True]['mean_held_bytes'] / pair[False]['mean_held_bytes']:.2f}",
            *(f"{pair[on]['peak_held_bytes'] / 1e6:.1f}" for on in (True, False)),
        )
        for (method, rate), pair in found.items()
        if set(pair) == {True, False}
    ]
    head = ("method", "requests/s", "mean MB, on", "off", "on over off", "peak MB, on", "off")
    return table(head, rows)


def simulated_reclaim(name: str) -> str:
    """Batching and zombie reclaim, each on and off, in the simulator: means over seeds."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for row in _result(name)["rows"]:
        policy = row["label"].partition("+")[0]
        cell = found.setdefault((row["level"], policy), {})
        cell.setdefault(row["zombie_reclaim"], []).append(row)
    keys = {"mean_ttft_ms": 1e3, "mean_norm_latency_ms": 1e3, "mean_held_kv_bytes": 1e6}
    rows = [
        (
            level,
            f"`{policy}`",
            *(
                f"{sum(one[key] for one in cell[on]) / len(cell[on]) / unit:.3g}"
                for key, unit in keys.items()
                for on in ("on", "off")
            ),
        )
        for (level, policy), cell in found.items()
    ]
    head = ("load", "policy", "TTFT s, on", "off", "s per token, on", "off")
    return table((*head, "held MB, on", "off"), rows)


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
