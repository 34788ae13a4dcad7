"""Methods under load: what is measured, raw pages that are kept, and runs that go on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.learned import networks_beside
from tests.tiny import DIFFKV
from tests.unit.workers.settled import booked_in_the_end
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import Sampling, Tokens
from triptych.evals.frontier.record_file import RecordFile
from triptych.evals.pipelines.kept_raw_pages import KeptRawPages
from triptych.evals.pipelines.pipeline_load import Pipeline, run_pipeline
from triptych.evals.pipelines.pipeline_study import (
    BATCHES,
    PipelineStudy,
    loads_of,
    prepare_pipelines,
    run_pipelines,
    times_by_method,
)
from triptych.kvpool import LocalPool
from triptych.workers.local import LocalServer

PROMPTS = [list(range(2 + n, 102 + n)) for n in range(5)]
ANSWER = 40


def config(policy: str, model: Path) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 32 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "compressor": {**DIFFKV, "policy": policy, "learned": networks_beside(model)},
            "experimental": {"layers_at_once": 0},
        }
    )


def held_while_it_decodes(server: LocalServer, asked: list[int]) -> tuple[int, list[int]]:
    """Pages of the only request while it decodes, and its tokens."""
    sampling = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    held, tokens = 0, list[int]()
    for event in server.stream([server.request(asked, sampling)]):
        assert isinstance(event, Tokens)
        tokens += event.tokens
        if 2 < len(tokens) < ANSWER:
            held = server.pool.stat().request_pages or held
    return held, tokens


@pytest.mark.parametrize("policy", ["diffkv", "uniform:fp16", "snapkv", "learned:merge"])
def test_kept_raw_pages_change_memory_and_nothing_else(tiny_model: Path, policy: str) -> None:
    settings, answers = config(policy, tiny_model), list[list[int]]()
    while_decoding = list[int]()
    for kind in (LocalPool, KeptRawPages):
        with LocalServer(settings, tiny_model, make_pool=kind) as server:
            held, tokens = 0, list[int]()
            while not held:  # on a busy machine it may have ended before anybody looks
                held, tokens = held_while_it_decodes(server, PROMPTS[0])
            answers.append(tokens)
            while_decoding.append(held)
            assert booked_in_the_end(server) == {}
            assert server.pool.stat().request_pages == 0, "nothing is held after the end"
            assert server.pool.check() == []
            raw = server.plan.raw.pages(len(PROMPTS[0])) * server.plan.geometry.head_rows
    assert answers[0] == answers[1]
    kept = 0 if policy == "uniform:fp16" else raw
    grown = server.plan.raw.pages(ANSWER) * server.plan.geometry.head_rows
    assert abs(while_decoding[1] - while_decoding[0] - kept) <= grown < raw / 2


def test_a_run_measures_every_stage_and_keeps_the_arrivals_of_its_rate(tiny_model: Path) -> None:
    settings, fast = config("diffkv", tiny_model), Pipeline(rate_per_s=50.0)
    one = run_pipeline("diffkv", settings, tiny_model, PROMPTS, ANSWER, fast)
    assert (one.requests, one.output_tokens, one.prompt_tokens) == (5, ANSWER, 100)
    assert 0 < one.ttft_s <= one.ttft_p99_s < one.duration_s
    assert one.norm_latency_s * ANSWER == pytest.approx(one.ttft_s + one.tpot_s * (ANSWER - 1))
    assert all(seconds > 0 for seconds in one.stage_s.values())
    assert sum(one.stage_s.values()) < one.duration_s
    assert 0 < one.mean_held_bytes <= one.peak_held_bytes < 32 << 20
    assert one.compression_ratio > 1
    slow = replace(fast, is_pipelined=False)
    other = run_pipeline("diffkv", settings, tiny_model, PROMPTS, ANSWER, slow)
    assert not other.is_pipelined
    assert other.ttft_s > one.ttft_s, "the last one waits for all others to end"
    assert other.peak_held_bytes < one.peak_held_bytes


def study(model: Path, methods: Sequence[str], **more: Any) -> PipelineStudy:
    base = config("diffkv", model)
    given: dict[str, Any] = {
        "rates_per_s": (40.0,),
        "requests": 3,
        "prompt_tokens": 60,
        "output_tokens": 4,
    }
    return PipelineStudy(methods=tuple(methods), base=base, **given | more)


def test_a_study_goes_on_where_it_was_stopped(tiny_model: Path, tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "records.jsonl")
    first = prepare_pipelines(study(tiny_model, ["uniform:k8v4"]))
    run_pipelines(first, file, lambda _: None)
    before = file.path.read_bytes()
    run_pipelines(first, file, lambda _: None)
    assert file.path.read_bytes() == before
    both = prepare_pipelines(study(tiny_model, ["uniform:k8v4", "learned:merge"]))
    run_pipelines(both, file, lambda _: None)
    assert file.path.read_bytes().startswith(before)
    loads = list(loads_of(file))
    assert [one.method for one in loads] == ["uniform:k8v4"] * 3 + ["learned:merge"] * 3
    assert [(one.is_pipelined, one.reclaims) for one in loads[:3]] == [
        (True, True),
        (False, True),
        (True, False),
    ]
    times = times_by_method(file.times())
    assert list(times) == ["uniform:k8v4", "learned:merge"]
    for rows in times.values():
        assert tuple(rows) == BATCHES
        assert all(row.compress_us > 0 for row in rows.values())
    other = prepare_pipelines(study(tiny_model, ["h2o"], output_tokens=5))
    with pytest.raises(ConfigError, match="of another study"):
        run_pipelines(other, file, lambda _: None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"parts": ("time",)}, "parts"),
        ({"rates_per_s": ()}, "rates"),
        ({"rates_per_s": (0.0,)}, "rates"),
        ({"requests": 1}, "requests=1"),
        ({"output_tokens": 1}, "output_tokens=1"),
    ],
)
def test_a_study_of_nothing_is_refused(
    tiny_model: Path, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        study(tiny_model, ["diffkv"], **settings)


def test_a_method_that_no_engine_runs_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="'full': runs in no engine"):
        prepare_pipelines(study(tiny_model, ["full"]))
