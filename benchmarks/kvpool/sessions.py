"""Sessions: saved TTFT, cost for other requests, and effect on the quality of answers.

    python benchmarks/kvpool/sessions.py --json benchmarks/results/sessions.json

The three engines run in this process with the settings of the server and the default model.

*Turns.* A conversation of five turns over text with a session: a first question, then shorter ones;
answers have a fixed length. Before a turn is answered, its first token alone is asked for, A B A B:
A may read from the cache what there would be without a session (whole blocks of the prompt before),
B all there is. A single token ends the request in the prefill, so asking changes nothing that is
kept.

*Others.* One long answer runs while short ones end beside it, A without a session and B with one:
the gaps between the tokens of the long one.

*Answers.* A second turn, teacher-forced over text, against the full 16-bit cache: KL and top-1
agreement without any cache, with cached prompts, and with the session.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, Request, Sampling, Tokens
from triptych.evals.data.texts import Document, documents
from triptych.evals.metrics.fidelity import compare, summarize
from triptych.evals.metrics.teacher_forcing import ForcedTokens, TeacherForcing
from triptych.loadgen.report.host import host_info
from triptych.workers.local import LocalServer
from triptych.workers.models.pretrained import read_tokenizer
from triptych.workers.models.store.model_store import resolve

FIRST, NEXT, ANSWER, TURNS = 256, 32, 128, 5
"""Tokens of the first question, of the next ones and of each answer; turns of a conversation."""
PATIENCE_S = 60.0

Row = dict[str, object]


@dataclass(frozen=True)
class Dialogue:
    """Who says what, in tokens of one document; answers are the model's own unless forced."""

    name: str
    questions: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, document: Document) -> "Dialogue":
        left, parts = list(document.context), list[list[tuple[int, ...]]]()
        for turn in range(TURNS):
            sizes = (NEXT if turn else FIRST, ANSWER)
            part = list[tuple[int, ...]]()
            for size in sizes:
                part.append(tuple(left[:size]))
                del left[:size]
            parts.append(part)
        return cls(
            document.name, tuple(part[0] for part in parts), tuple(part[1] for part in parts)
        )


def greedy(tokens: int = ANSWER, seed: int = 0) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=seed)


def asked(server: LocalServer, prompt: Sequence[int], name: str, session: str) -> Request:
    """A request that shares its prefix with those of the same name alone."""
    request = server.request(prompt, greedy())
    return replace(request, cache_salt=name, session=session)


def settle(server: LocalServer) -> None:
    """Wait until nothing but prefixes is held."""
    give_up_s = time.monotonic() + PATIENCE_S
    while (ledger := server.pool.stat()).request_pages != ledger.prefix_pages:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"pages are still held: {ledger}")
        time.sleep(0.005)


def tokens_of(events: Iterable[Tokens | Failed]) -> Iterable[Tokens]:
    for event in events:
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        yield event


# ------------------------------------------------------------------ turns


def turns(config: AppConfig, dialogues: Sequence[Dialogue], repeats: int) -> list[Row]:
    """Conversations with a session; before each turn is answered, its first token A B A B ..."""
    taken: dict[tuple[int, str], list[tuple[float, int]]] = {}
    with LocalServer(config) as server:
        for number, dialogue in enumerate(dialogues):
            name, prompt, known = f"conversation {number}", list[int](), 0
            for turn, question in enumerate(dialogue.questions):
                prompt += question
                settle(server)
                for _ in range(repeats if turn else 0):
                    for kind, most in (("without", known), ("with", None)):
                        request = asked(server, prompt, name, "")
                        first = replace(request, sampling=greedy(1), cached_at_most=most)
                        taken.setdefault((turn + 1, kind), []).append(time_first(server, first))
                known = len(prompt) // server.plan.block_tokens * server.plan.block_tokens
                generated = tokens_of(server.stream([asked(server, prompt, name, name)]))
                prompt += [token for event in generated for token in event.tokens]
        settle(server)
    return [
        {
            "turn": turn,
            "session": kind,
            "times": len(found),
            "cached_tokens": found[0][1],
            "fastest_ms": round(min(first_ms for first_ms, _ in found), 1),
            **spread([first_ms for first_ms, _ in found], "first_ms"),
        }
        for (turn, kind), found in taken.items()
    ]


def time_first(server: LocalServer, request: Request) -> tuple[float, int]:
    """Milliseconds to the only token of a request, and how many of its prompt were cached."""
    began_s = time.perf_counter()
    (event,) = tokens_of(server.stream([request]))
    return 1e3 * (time.perf_counter() - began_s), event.cached_tokens


def spread(values: Sequence[object], name: str) -> Row:
    numbers = sorted(float(str(value)) for value in values)
    low, median, high = (
        statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
    )
    return {name: round(median, 2), f"{name}_quartiles": (round(low, 2), round(high, 2))}


# ------------------------------------------------------------------ others


def others(config: AppConfig, dialogues: Sequence[Dialogue], rounds: int) -> list[Row]:
    """Gaps of a long answer while short ones end beside it."""
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    with LocalServer(config) as server:
        for number in range(rounds + 1):
            for kind, found in gaps.items():
                name = f"{kind} {number}"
                session = name if kind == "with" else ""
                taken = beside(server, dialogues[number % len(dialogues)], name, session)
                if number:
                    found += taken
    return [
        {
            "session": kind,
            "gaps": len(found),
            "mean_ms": round(statistics.fmean(found), 2),
            "p99_ms": round(sorted(found)[int(0.99 * (len(found) - 1))], 2),
            **spread(found, "median_ms"),
        }
        for kind, found in gaps.items()
    ]


def beside(server: LocalServer, dialogue: Dialogue, name: str, session: str) -> list[float]:
    """Milliseconds between tokens of a long answer from when four short ones begin to end."""
    long = replace(server.request(dialogue.questions[0], greedy(ANSWER + 48)), cache_salt=name)
    short = [
        replace(
            server.request(dialogue.answers[i][: 64 + i], greedy(ANSWER)),
            cache_salt=f"{name} {i}",
            session=f"{session} {i}" if session else "",
        )
        for i in range(4)
    ]
    at, ended = list[float](), False
    for event in tokens_of(server.stream([long, *short])):
        ended = ended or event.finish is not None
        if event.request == long.id and ended:
            at.append(time.perf_counter())
    settle(server)
    return [1e3 * (after - before) for before, after in pairwise(at)]


# ------------------------------------------------------------------ answers


def second_turn(
    config: AppConfig, dialogues: Sequence[Dialogue], session: bool
) -> list[torch.Tensor]:
    """Logits of each dialogue's second answer, forced; the first answer is forced as well."""
    outputs = [ForcedTokens(answer) for one in dialogues for answer in one.answers[:2]]
    teacher = TeacherForcing(outputs)
    with LocalServer(config, draw=teacher.sample) as server:
        for number, one in enumerate(dialogues):
            prompt = list[int]()
            for turn in range(2):
                prompt += one.questions[turn]
                request = server.request(prompt, greedy(seed=2 * number + turn))
                request = replace(
                    request, cache_salt=one.name + str(number), session="s" if session else ""
                )
                for _ in tokens_of(server.stream([request])):
                    pass
                settle(server)
                prompt += one.answers[turn]
    return [torch.stack(teacher.logits[2 * number + 1]) for number in range(len(dialogues))]


def greedy_second_turn(
    config: AppConfig, dialogues: Sequence[Dialogue], session: bool
) -> list[list[int]]:
    """The second answer as the model gives it, behind a first one that is forced."""
    outputs = [
        output
        for one in dialogues
        for output in (ForcedTokens(one.answers[0], keep_logits=False), ForcedTokens(()))
    ]
    teacher, generated = TeacherForcing(outputs), list[list[int]]()
    with LocalServer(config, draw=teacher.sample) as server:
        for number, one in enumerate(dialogues):
            prompt, last = list[int](), list[int]()
            for turn in range(2):
                prompt += one.questions[turn]
                request = server.request(prompt, greedy(64 if turn else ANSWER, 2 * number + turn))
                request = replace(
                    request, cache_salt=one.name + str(number), session="s" if session else ""
                )
                last = [t for e in tokens_of(server.stream([request])) for t in e.tokens]
                settle(server)
                prompt += one.answers[turn]
            generated.append(last)
    return generated


def answers(settings: dict[str, object], dialogues: Sequence[Dialogue]) -> list[Row]:
    """Each way to a second turn against the full cache."""

    def made(**more: object) -> AppConfig:
        return AppConfig.from_mapping({**settings, **more})

    none = {"pool": {"prefix_bytes": 0}}
    full = second_turn(
        made(compressor={"policy": "uniform:fp16"}, **none), dialogues, session=False
    )
    plain = greedy_second_turn(made(**none), dialogues, session=False)
    rows = list[Row]()
    for name, config, session in (
        ("no cache", made(**none), False),
        ("cached prompts", made(), False),
        ("session", made(), True),
    ):
        logits = second_turn(config, dialogues, session)
        steps = [
            [compare(a[1:], b[1:], one.answers[1][1:])]
            for a, b, one in zip(full, logits, dialogues, strict=True)
        ]
        generated = greedy_second_turn(config, dialogues, session)
        same = [_shared(a, b) for a, b in zip(plain, generated, strict=True)]
        found = summarize(steps)
        first = [
            compare(a[:1], b[:1], one.answers[1][:1])
            for a, b, one in zip(full, logits, dialogues, strict=True)
        ]
        rows.append(
            {
                "second turn": name,
                "documents": found.documents,
                "tokens": found.tokens,
                "kl": round(found.kl, 5),
                "kl_ci95": found.kl_ci95 and tuple(round(edge, 5) for edge in found.kl_ci95),
                "kl_p99": round(found.kl_p99, 4),
                "top1_agreement": round(found.top1_agreement, 4),
                "perplexity_ratio": round(found.perplexity_ratio, 4),
                "kl_first_token": statistics.fmean(float(one.kl[0]) for one in first),
                "top1_first_token": statistics.fmean(float(one.agree[0]) for one in first),
                "greedy_same_as_no_cache": sum(count == 64 for count in same),
                "greedy_tokens_before_first_difference": statistics.median(same),
            }
        )
    return rows


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="of the first token of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="of long answers beside short ones")
    parser.add_argument("--texts", type=int, default=8, help="dialogues that answers are judged by")
    parser.add_argument("--parts", default="turns,others,answers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host, parts = host_info(), options.parts.split(",")
    settings: dict[str, object] = {}
    config = AppConfig.from_mapping(settings)
    tokenizer = read_tokenizer(resolve(config.model.name))

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    size = FIRST + (TURNS - 1) * NEXT + TURNS * ANSWER
    count = max(options.conversations, options.texts)
    cut = documents(encode, "evaluation", context=size, continuation=1, count=count)
    dialogues = [Dialogue.of(document) for document in cut]
    result = dict[str, list[Row]]()
    if "turns" in parts:
        result["turns"] = turns(config, dialogues[: options.conversations], options.repeats)
    if "others" in parts:
        result["others"] = others(config, dialogues, options.rounds)
    if "answers" in parts:
        result["answers"] = answers(settings, dialogues[: options.texts])
    for name in parts:
        rows = result[name]
        console.print(make_table(tuple(rows[0]), [list(row.values()) for row in rows], name))
    if options.json:
        write_json({"host": host, "threads": torch.get_num_threads(), **result}, options.json)


if __name__ == "__main__":
    main()
