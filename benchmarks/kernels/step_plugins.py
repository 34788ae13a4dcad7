# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers' tokenizers have no types.
"""Savings, cost and quality of the built-in plug-ins of the decode step.

    python benchmarks/kernels/step_plugins.py --json benchmarks/results/step_plugins.json

``entropy_stop``: answers to some questions, greedy, once without it; where it would have ended them
follows from the entropies. ``soft_prune`` and ``layer_exit``: texts of the evaluation split,
teacher-forced, next to the same without them. The share of a step is that of time in the plug-in,
in the same step.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import torch
from torch import Tensor

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import PluginOverride, Sampling, Send
from triptych.evals.data.texts import documents
from triptych.evals.metrics.fidelity import compare, summarize
from triptych.evals.metrics.teacher_forcing import ForcedTokens, TeacherForcing
from triptych.loadgen.report.host import host_info
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.plugins.entropy import entropy
from triptych.workers.local import LocalServer
from triptych.workers.loop import Work
from triptych.workers.models.early_exit import ExitTracker
from triptych.workers.models.pretrained import read_tokenizer
from triptych.workers.models.store.model_store import resolve
from triptych.workers.sampling.sampler import Drawn, SamplerRow, sample
from triptych.workers.stage import Engine

QUESTIONS = (
    "What is the capital of France?",
    "List the planets of the solar system.",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "Count from one to twenty in words.",
    "Give me a recipe for pancakes.",
    "What is 17 times 23? Show your work.",
    "Write a Python function that reverses a list.",
    "Who wrote Hamlet, and what is it about?",
    "Name three differences between cats and dogs.",
    "Translate 'good morning' into Spanish, French and German.",
    "Why is the sky blue?",
)
THRESHOLDS, PATIENCE = (0.05, 0.1, 0.3, 0.5), (8, 16, 32)
NGRAM = 8
DEPTHS, EXIT_THRESHOLDS = (0.5, 0.7, 0.9), (0.0, 0.1, 0.5, 2.0)


@dataclass(frozen=True)
class Stopped:
    """One setting of ``entropy_stop``."""

    threshold: float
    patience_tokens: int
    answers_ended: int
    tokens_saved: float
    """Share of all tokens."""
    of_them_repeats: float
    """Share of those whose last 8 tokens occurred in the answer before."""


@dataclass(frozen=True)
class Pruned:
    """One setting of ``soft_prune``."""

    threshold: float
    kl: float
    """From the same without it, mean over tokens."""
    top1_agreement: float
    tokens_held: float
    """At the end, as a share of those without it."""


@dataclass(frozen=True)
class Left:
    """One setting of ``layer_exit``."""

    threshold: float
    depth: float
    tokens_left: float
    """Share of tokens that skipped the layers behind ``depth``."""
    kl: float
    top1_agreement: float
    step: float
    """Median time of a step, as a share of that without it."""


def is_repeat(tokens: Sequence[int], at: int) -> bool:
    """Whether the tokens up to one stood together in the answer before."""
    last = tuple(tokens[at - NGRAM + 1 : at + 1])
    return any(tuple(tokens[i : i + NGRAM]) == last for i in range(at - NGRAM + 1))


def stopped(answers: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Iterable[Stopped]:
    """What each setting would have made of answers, given the entropy of each token."""
    total = sum(len(tokens) for tokens, _ in answers)
    for threshold in THRESHOLDS:
        for patience in PATIENCE:
            cut, ended = list[bool](), 0
            for tokens, entropies in answers:
                streak = 0
                for index, one in enumerate(entropies[1:], 1):
                    streak = streak + 1 if one < threshold else 0
                    if streak >= patience:
                        rest = range(index + 1, len(tokens))
                        cut += [is_repeat(tokens, at) for at in rest]
                        ended += bool(rest)
                        break
            share = mean(cut) if cut else 0.0
            saved = round(len(cut) / total, 3)
            yield Stopped(threshold, patience, ended, saved, round(share, 3))


def ask(config: AppConfig, tokens: int) -> list[tuple[Sequence[int], Sequence[float]]]:
    """Answers to the questions, and the entropy of each of their tokens."""
    path = resolve(config.model.name)
    tokenizer = read_tokenizer(path)
    heard = dict[int, list[float]]()

    def draw(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
        for row, nats in zip(rows, entropy(logits).tolist(), strict=True):
            heard.setdefault(row.sampling.seed, []).append(nats)
        return sample(logits, rows)

    with LocalServer(config, path, draw) as server:
        requests = []
        for number, question in enumerate(QUESTIONS):
            turns = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=False
            )
            sampling = Sampling(temperature=0.0, max_tokens=tokens, seed=number)
            requests.append(server.request(prompt, sampling))
        answers = server.complete(requests)
    return [(answer.tokens, heard[number]) for number, answer in enumerate(answers)]


def share_of_step(config: AppConfig, requests: int, tokens: int) -> float:
    """Median share of a step's time that ``entropy_stop`` takes with its neutral threshold."""
    shares, spent = list[float](), [0.0]
    look = DecodeEngine._run_plugins  # pyright: ignore[reportPrivateUsage]

    def timed(engine: DecodeEngine, *given: object) -> object:
        begun = time.perf_counter()
        try:
            return look(engine, *given)  # pyright: ignore[reportArgumentType]
        finally:
            spent[0] = time.perf_counter() - begun

    def around(engine: Engine, work: Work) -> Iterable[Send] | None:
        spent[0], begun = 0.0, time.perf_counter()
        done = work()
        if spent[0]:
            shares.append(spent[0] / (time.perf_counter() - begun))
        return done

    decode = replace(config.decode, plugins=("entropy_stop",))
    with (
        patch.object(DecodeEngine, "_run_plugins", timed),
        LocalServer(replace(config, decode=decode)) as server,
    ):
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        with server.instrumented(around):
            server.complete([server.request(range(5, 100), sampling) for _ in range(requests)])
    return round(median(shares[5:]), 4)


@dataclass(frozen=True)
class Forced:
    """What teacher-forced texts gave."""

    logits: list[Tensor]
    """Of each text."""
    held: int
    """Tokens that all head rows hold at the end."""
    step_s: float
    """Median time of a decode step."""


def forced(
    config: AppConfig, wish: PluginOverride | None, count: int, context: int, answer: int
) -> Forced:
    """The same texts with a plug-in, or without any."""
    path = resolve(config.model.name)
    tokenizer = read_tokenizer(path)
    texts = documents(
        tokenizer.encode, "evaluation", context=context, continuation=answer, count=count
    )
    teacher = TeacherForcing([ForcedTokens(text.continuation) for text in texts])
    engines, steps = dict[int, DecodeEngine](), list[float]()

    def around(engine: Engine, work: Work) -> Iterable[Send] | None:
        begun = time.perf_counter()
        done = work()
        if isinstance(engine, DecodeEngine):
            engines[id(engine)] = engine
            steps.append(time.perf_counter() - begun)
        return done

    plugins = () if wish is None else (wish.plugin,)
    decode = replace(config.decode, plugins=plugins)
    with LocalServer(replace(config, decode=decode), path, teacher.sample) as server:
        requests = [
            replace(
                server.request(
                    text.context, Sampling(max_tokens=answer, ignore_eos=True, seed=number)
                ),
                plugin_overrides=() if wish is None else (wish,),
            )
            for number, text in enumerate(texts)
        ]
        with server.instrumented(around):
            server.complete(requests)
        (engine,) = engines.values()
        # What a request that has left had in its rows is there until its slot is used again.
        held = sum(int(table.tokens.sum()) for table in engine.tables)
    logits = [torch.stack(teacher.logits[number]) for number in range(count)]
    return Forced(logits, held, median(steps))


def apart(plain: Forced, found: Forced) -> tuple[float, float]:
    """KL and top-1 agreement, means over tokens."""
    steps = [
        compare(one[1:], other[1:], one[1:].argmax(dim=1).tolist())
        for one, other in zip(plain.logits, found.logits, strict=True)
    ]
    results = summarize([[step] for step in steps])
    return round(results.kl, 5), round(results.top1_agreement, 4)


def pruned(
    config: AppConfig, thresholds: Sequence[float], count: int, context: int, answer: int
) -> Iterable[Pruned]:
    """Each threshold next to no pruning."""
    plain = forced(config, None, count, context, answer)
    for threshold in thresholds:
        wish = PluginOverride(plugin="soft_prune", options={"threshold": threshold})
        found = forced(config, wish, count, context, answer)
        yield Pruned(threshold, *apart(plain, found), round(found.held / plain.held, 4))


def left(config: AppConfig, count: int, context: int, answer: int) -> Iterable[Left]:
    """Each depth and threshold next to all layers."""
    plain = forced(config, None, count, context, answer)
    active_tokens, seen = ExitTracker.active_tokens, [0, 0]

    def counted(tracker: ExitTracker, layers: int, hidden: Tensor) -> Tensor | None:
        active = active_tokens(tracker, layers, hidden)
        if layers == int(tracker.exits.layers[0]):
            gone = 0 if active is None else len(hidden) - len(active)
            seen[0], seen[1] = seen[0] + gone, seen[1] + len(hidden)
        return active

    for depth, threshold in product(DEPTHS, EXIT_THRESHOLDS):
        seen[:] = [0, 0]
        wish = PluginOverride(plugin="layer_exit", options={"threshold": threshold, "depth": depth})
        with patch.object(ExitTracker, "active_tokens", counted):
            found = forced(config, wish, count, context, answer)
        share = seen[0] / max(1, seen[1])
        times = round(found.step_s / plain.step_s, 3)
        yield Left(threshold, depth, round(share, 4), *apart(plain, found), times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="entropy_stop,step_share,soft_prune,layer_exit")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prune", default="0,0.05,0.2,0.5,1")
    parser.add_argument("--json", type=Path, help="what it has of other parts stays")
    options = parser.parse_args(arguments)
    results = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    config = AppConfig.from_mapping(
        {"pool": {"kv_cache_memory_bytes": 512 << 20, "prefix_bytes": 0}}
    )
    for part in options.parts.split(","):
        setting = {"tokens": options.tokens, "host": host_info()}
        if part == "entropy_stop":
            answers = ask(config, options.tokens)
            setting |= {"answers": len(answers), "of_tokens": sum(len(one) for one, _ in answers)}
            rows = [asdict(row) for row in stopped(answers)]
        elif part == "step_share":
            rows = [
                {"requests": count, "share": share_of_step(config, count, 40)} for count in (1, 8)
            ]
        else:
            setting |= {"texts": options.texts, "context": options.context}
            sizes = options.texts, options.context, options.tokens
            thresholds = [float(one) for one in options.prune.split(",")]
            is_pruned = part == "soft_prune"
            found = pruned(config, thresholds, *sizes) if is_pruned else left(config, *sizes)
            rows = [asdict(row) for row in found]
        console.print(make_table(list(rows[0]), [list(row.values()) for row in rows], part))
        results[part] = setting | {"rows": rows}
    if options.json:
        write_json(results, options.json)


if __name__ == "__main__":
    main()
