"""Methods on a tiny random model: the engines agree with transformers, and damage shows."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from triptych.core.config import AppConfig
from triptych.core.errors import ModelError
from triptych.evals.data.cases import Case
from triptych.evals.data.texts import documents
from triptych.evals.methods.full_cache import FullCache
from triptych.evals.methods.method_names import parse_method
from triptych.evals.metrics.fidelity import compare
from triptych.evals.studies.runner import evaluate, text_group

BASE = AppConfig.from_mapping(
    {
        "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64},
        "prefill": {"max_num_batched_tokens": 48},
        "compressor": {"recent_window_tokens": 20},
    }
)


def cases() -> list[Case]:
    found = documents(
        lambda text: [b + 2 for b in text.encode() if b < 250],
        "evaluation",
        context=150,
        continuation=41,
        count=3,
    )
    return [
        Case(name=one.name, prompt=one.context, forced=one.continuation, free_tokens=4, scored=True)
        for one in found
    ]


def kl(path: Path, name: str) -> float:
    """Mean KL of a method, from the text's second token on."""
    asked = cases()
    full = FullCache(path).run(asked)
    ours = parse_method(name, path, BASE, "float32").run(asked)
    means = list[float]()
    for case, a, b in zip(asked, full, ours, strict=True):
        assert a.logits is not None
        assert b.logits is not None
        means.append(float(compare(a.logits, b.logits, case.forced[1:]).kl.mean()))
    return sum(means) / len(means)


def test_the_full_cache_is_one_pass_of_the_model(tiny_model: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for case, outcome in zip(cases(), FullCache(tiny_model).run(cases()), strict=True):
        text = torch.tensor([[*case.prompt, *case.forced, *outcome.tokens]])
        with torch.inference_mode():
            logits = model(text).logits[0]
        first = len(case.prompt)
        expected = logits[first : first + 40]
        torch.testing.assert_close(outcome.logits, expected, atol=1e-4, rtol=1e-4)
        assert outcome.tokens == tuple(logits[first + 40 : -1].argmax(-1).tolist())


def test_sixteen_bit_pages_say_what_the_full_cache_says(tiny_model: Path) -> None:
    full = FullCache(tiny_model).run(cases())
    ours = parse_method("uniform:fp16", tiny_model, BASE, "float32").run(cases())
    for a, b in zip(full, ours, strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=2e-2, rtol=0)
        assert b.footprint.data_bytes == b.footprint.full_bytes < b.footprint.all_in_bytes
    assert kl(tiny_model, "uniform:fp16") < 1e-5


def test_a_simulated_format_costs_what_its_pages_cost(tiny_model: Path) -> None:
    """Both with the same window: a policy's name stands for its own defaults otherwise."""
    served = kl(tiny_model, "uniform:k4v4+recent_window_tokens=20")
    simulated = kl(tiny_model, "simulated:k4v4")
    assert served / 2 < simulated < served * 2


def test_damage_shows(tiny_model: Path) -> None:
    """A harness that cannot tell one bit from eight measures nothing."""
    good = kl(tiny_model, "simulated:k8v8")
    assert good < 1e-3
    assert kl(tiny_model, "simulated:k1v1") > 100 * good


def test_only_the_prompt_decides_the_footprint(tiny_model: Path) -> None:
    method = parse_method("uniform:k8v4", tiny_model, BASE, "float32")
    prompt = cases()[0].prompt
    asked = [
        Case(name="one", prompt=prompt, free_tokens=2),
        Case(name="two", prompt=prompt, forced=(5,) * 30, free_tokens=30),
    ]
    first, second = method.run(asked)
    assert first.footprint == second.footprint
    assert (len(first.tokens), len(second.tokens)) == (2, 30)


def test_a_case_that_the_pool_cannot_hold_is_an_error_that_names_it(tiny_model: Path) -> None:
    config = {"pool": {"kv_cache_memory_bytes": 200_000, "extent_pages": 8}}
    method = parse_method("default", tiny_model, AppConfig.from_mapping(config), "float32")
    with pytest.raises(ModelError, match="too long"):
        method.run([Case(name="too long", prompt=(5,) * 400, free_tokens=50)])


def test_records_keep_the_order_of_cases_and_methods(tiny_model: Path) -> None:
    found = documents(
        lambda text: [b + 2 for b in text.encode() if b < 250],
        "evaluation",
        context=60,
        continuation=9,
        count=10,
    )
    group = text_group(found)
    done = dict[str, int]()

    def advance(name: str, count: int) -> None:
        done[name] = done.get(name, 0) + count

    methods = [
        parse_method(name, tiny_model, BASE, "float32")
        for name in ("uniform:k8v8", "simulated:k2v2")
    ]
    records = evaluate(FullCache(tiny_model), methods, [group], advance)
    assert list(records) == ["full", "uniform:k8v8", "simulated:k2v2"]
    assert done == dict.fromkeys(records, 10)
    for by_group in records.values():
        assert [one.case for one in by_group["text@60"]] == [one.name for one in found]
        assert all(one.steps is not None and len(one.steps.kl) == 8 for one in by_group["text@60"])
