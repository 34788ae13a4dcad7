"""Send greedy prompts three times, alone: nothing cached, a part cached, all of it cached.

    python -m tests.e2e.repeats --json benchmarks/results/repeats.json
    python -m tests.e2e.repeats --policies uniform:fp16 --topologies colocated --prompts 16
    python -m tests.e2e.repeats --json benchmarks/results/repeats.json --resume

The prompts are consecutive cuts of prose and code, of 40 to 3,000 tokens. The second time the first
half of the prompt is in the prefix cache, the third time every block that can be. The tokens must
be the same each time. Exit code 1 if any differ.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
from rich.progress import track

from tests.e2e.conftest import MODEL, Server, serve_run
from triptych.cli.list_options import names
from triptych.cli.output import console, make_table, write_json
from triptych.evals.data.texts import sources
from triptych.evals.data.vocabulary import Vocabulary
from triptych.loadgen.report.host import host_info
from triptych.workers.models.store.model_store import resolve

TOPOLOGIES, POLICIES = ("disaggregated", "colocated"), ("uniform:fp16", "auto")
SHORTEST, LONGEST = 40, 3000
TURNS = ("nothing", "a part", "all")
"""What is cached when a prompt is sent."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One greedy answer."""

    cached_tokens: int
    tokens: list[int]
    logprobs: list[float]
    """Of each token."""
    margins: list[float]
    """Log probability of the best token minus that of the second best."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """The three answers to one prompt."""

    topology: str
    policy: str
    prompt_tokens: int
    answers: list[Answer]

    @cached_property
    def first_difference(self) -> int | None:
        """Position of the first token that is not the same in all answers; None: there is none."""
        columns = zip(*(answer.tokens for answer in self.answers), strict=False)
        return next((at for at, column in enumerate(columns) if len(set(column)) > 1), None)

    @cached_property
    def margin(self) -> float | None:
        """The smallest margin of an answer at the first difference."""
        at = self.first_difference
        return None if at is None else min(answer.margins[at] for answer in self.answers)

    @cached_property
    def noise(self) -> float:
        """The largest difference of a token's log probability, before the first difference."""
        end = self.first_difference
        pairs = chain.from_iterable(
            zip(one.logprobs[:end], other.logprobs[:end], strict=False)
            for one, other in combinations(self.answers, 2)
        )
        return max((abs(one - other) for one, other in pairs), default=0.0)

    def as_row(self) -> dict[str, Any]:
        """For a result file: the answers themselves only if they differ."""
        row = {
            "topology": self.topology,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": [answer.cached_tokens for answer in self.answers],
            "first_difference": self.first_difference,
            "margin": self.margin,
            "noise": self.noise,
        }
        is_same = self.first_difference is None
        return row if is_same else row | {"answers": [asdict(one) for one in self.answers]}


def prompts(count: int) -> list[list[int]]:
    """Consecutive cuts of the evaluation texts, of evenly spaced lengths."""
    encode = Vocabulary(resolve(MODEL)).encode
    tokens = list(chain.from_iterable(encode(text) for _, text in sources("evaluation")))
    lengths = [SHORTEST + (LONGEST - SHORTEST) * i // max(1, count - 1) for i in range(count)]
    starts = [sum(lengths[:i]) for i in range(count)]
    return [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def ask(client: openai.OpenAI, prompt: Sequence[int], salt: str, max_tokens: int) -> Answer:
    """Prompts with other salts share nothing."""
    done = client.completions.create(
        model=MODEL,
        prompt=list(prompt),
        max_tokens=max_tokens,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
    )
    (choice,), usage = done.choices, done.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert choice.logprobs is not None
    ids: list[int] = (choice.model_extra or {})["token_ids"]
    best = [sorted(top.values(), reverse=True) for top in choice.logprobs.top_logprobs or []]
    return Answer(
        cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        tokens=ids,
        logprobs=[float(one) for one in choice.logprobs.token_logprobs or []],
        margins=[two[0] - two[1] if len(two) > 1 else 0.0 for two in best],
    )


def three_times(server: Server, prompt: Sequence[int], max_tokens: int) -> list[Answer]:
    """Answers with nothing, a part and all of the prompt cached; no other request runs."""
    answers = list[Answer]()
    with server.client(timeout=600) as client:
        for salt, is_primed in (("nothing", False), ("part", True), ("part", False)):
            if is_primed:
                ask(client, prompt[: len(prompt) // 2], f"{salt} {len(prompt)}", 2)
            answers.append(ask(client, prompt, f"{salt} {len(prompt)}", max_tokens))
    return answers


def run(
    topology: str, policy: str, cuts: Sequence[list[int]], max_tokens: int, dtype: str
) -> Iterator[Repeated]:
    """All prompts on one server."""
    settings = {
        "model": {"name": MODEL, "dtype": dtype},
        "topology": topology,
        "compressor": {"policy": policy},
    }
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        server = stack.enter_context(serve_run(Path(folder), settings))
        for prompt in track(cuts, f"{topology}, {policy}", console=console):
            yield Repeated(
                topology=topology,
                policy=policy,
                prompt_tokens=len(prompt),
                answers=three_times(server, prompt, max_tokens),
            )


def summary(rows: Sequence[Repeated]) -> dict[str, Any]:
    """Of the prompts of one server."""
    differ = [row for row in rows if row.first_difference is not None]
    cached = [sum(row.answers[turn].cached_tokens for row in rows) for turn in range(len(TURNS))]
    margins = [row.margin for row in differ if row.margin is not None]
    return {
        "prompts": len(rows),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "cached_tokens": dict(zip(TURNS, cached, strict=True)),
        "differ": len(differ),
        "largest_noise": max(row.noise for row in rows),
        "largest_margin_that_turned": max(margins, default=None),
    }


def _table(summaries: dict[str, dict[str, Any]]) -> Any:
    heads = ("server", "prompts", "tokens", "cached", "differ", "largest noise", "largest margin")
    return make_table(
        heads,
        [
            [
                name,
                one["prompts"],
                one["prompt_tokens"],
                str(list(one["cached_tokens"].values())),
                one["differ"],
                one["largest_noise"],
                one["largest_margin_that_turned"],
            ]
            for name, one in summaries.items()
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the servers that --json has")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json: the file that it goes on from")
    host, cuts = host_info(), prompts(options.prompts)
    known = json.loads(options.json.read_text()) if options.resume else {}
    summaries: dict[str, dict[str, Any]] = known.get("servers", {})
    answers: list[dict[str, Any]] = known.get("prompts", [])
    for policy, topology in product(names(options.policies), names(options.topologies)):
        if f"{topology}, {policy}" in summaries:
            continue
        rows = list(_told(run(topology, policy, cuts, options.tokens, options.dtype), _tell))
        summaries[f"{topology}, {policy}"] = summary(rows)
        answers += [row.as_row() for row in rows]
        if options.json:
            write_json({"host": host, "servers": summaries, "prompts": answers}, options.json)
    console.print(_table(summaries))
    return 1 if any(one["differ"] for one in summaries.values()) else 0


def _told(rows: Iterator[Repeated], tell: Callable[[Repeated], None]) -> Iterator[Repeated]:
    for row in rows:
        tell(row)
        yield row


def _tell(row: Repeated) -> None:
    cached, at = [answer.cached_tokens for answer in row.answers], row.first_difference
    fault = "" if at is None else f"differ at token {at}, margin {row.margin:.4f}"
    console.print(row.prompt_tokens, cached, f"noise {row.noise:.5f}", fault, soft_wrap=True)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
