"""The profiler: every moment belongs to a part, and the engines notice nothing."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import DIFFKV, save_tiny_model
from triptych.core.config import AppConfig, ExperimentalConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import STAGES, Sampling
from triptych.kernels import observe_ops
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.profiling.profiler import Profiler, Step
from triptych.workers.profiling.report import ProfileReport, chrome_trace, report_of, trace_events
from triptych.workers.stage import Engine

LAYERS, ANSWER = 2, 20


def settings(model: Path, **selection: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "compressor": {"profile": "none", **DIFFKV},
            "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "decode": {"selection": {"budget_tokens": 0, "dense_layers": 0, **selection}},
        }
    )


def run(config: AppConfig, profiler: Profiler | None) -> tuple[list[list[int]], LocalServer]:
    with LocalServer(config) as server:
        sampling = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        asked = [server.request(range(at, 250), sampling) for at in (2, 90)]
        with server.instrumented(profiler.around) if profiler else nullcontext():
            return [answer.tokens for answer in server.complete(asked)], server


@pytest.fixture(scope="module")
def profiled(tiny_model: Path) -> tuple[Profiler, list[list[int]], int]:
    profiler = Profiler(100)
    tokens, server = run(settings(tiny_model, method="moments", keep_fraction=0.3), profiler)
    return profiler, tokens, server.weight_bytes


Profiled = tuple[Profiler, list[list[int]], int]


def test_it_changes_no_token(tiny_model: Path, profiled: Profiled) -> None:
    tokens, _ = run(settings(tiny_model, method="moments", keep_fraction=0.3), None)
    assert profiled[1] == tokens


def test_every_moment_of_a_step_belongs_to_one_part(profiled: Profiled) -> None:
    for step in profiled[0].steps:
        ends = [step.begin_s] + [end_s for *_, end_s in step.spans]
        assert [begin_s for _, _, begin_s, _ in step.spans] == ends[:-1]
        assert step.end_s == ends[-1]
        assert sum(end_s - begin_s for *_, begin_s, end_s in step.spans) == pytest.approx(
            step.took_s
        )


def test_a_prompt_that_is_read_in_parts_counts_once(tmp_path: Path) -> None:
    config = settings(save_tiny_model(tmp_path, layers=5))
    parts = replace(
        config,
        prefill=replace(config.prefill, max_num_batched_tokens=60),
        experimental=ExperimentalConfig(layers_at_once=1),
    )
    profiler = Profiler(100)
    run(parts, profiler)
    prefill = [step for step in profiler.steps if step.stage == "prefill" and step.cuts[1::3]]
    read = [
        layer for step in prefill for part, layer, *_ in step.spans if part == "prefill_attention"
    ]
    assert sorted(read) == sorted(2 * [0, 1, 2, 3, 4])
    assert sum(step.tokens for step in prefill) == 248 + 160
    for step in prefill:
        ends = [step.begin_s] + [end_s for *_, end_s in step.spans]
        assert [begin_s for _, _, begin_s, _ in step.spans] == ends[:-1]


def test_each_layer_of_a_decode_step_has_its_ops_and_its_bytes(profiled: Profiled) -> None:
    profiler, _, weight_bytes = profiled
    decode = [step for step in profiler.steps if step.stage == "decode" and step.tokens]
    assert {step.tokens for step in decode} <= {1, 2}
    for step in decode:
        for op in ("append_tokens", "decode_attention"):
            assert [layer for part, layer, *_ in step.spans if part == op] == [0, 1]
    report = report_of(profiler.steps, weight_bytes)
    assert len(report.layers) == LAYERS
    rows = [row for row in report.steps if row.stage == "decode" and row.tokens]
    assert sum(row.page_bytes for row in rows) == sum(row.nbytes for row in report.layers) > 0
    assert {row.weight_bytes for row in rows} == {weight_bytes}
    assert all(0 < row.pages_read <= row.pages for row in rows)
    assert any(row.pages_read < row.pages for row in rows)
    assert any(row.reused is not None and row.reused > 0.5 for row in rows)
    parts = {(row.stage, row.part) for row in report.parts}
    assert {("prefill", "prefill_attention"), ("compress", "move_tokens")} <= parts
    assert ("decode", "select_pages") in parts
    for stage in ("prefill", "compress", "decode"):
        shares = [row.share for row in report.parts if row.stage == stage]
        assert sum(shares) == pytest.approx(1.0)


def test_without_selection_everything_is_read(tiny_model: Path) -> None:
    profiler = Profiler(100)
    run(settings(tiny_model), profiler)
    rows = [row for row in report_of(profiler.steps, 0).steps if row.pages]
    assert rows
    assert all(row.pages_read == row.pages for row in rows)


def test_a_trace_has_an_event_for_every_span(profiled: Profiled) -> None:
    steps = profiled[0].steps
    trace = chrome_trace(trace_events(steps))
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert len(events) == len(STAGES) + len(steps) + sum(len(step.spans) for step in steps)
    for event in events[len(STAGES) :]:
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0


def test_reports_of_several_workers_are_laid_side_by_side(profiled: Profiled) -> None:
    steps = profiled[0].steps
    whole = report_of(steps, profiled[2])
    apart = [
        report_of([step for step in steps if step.stage == stage], profiled[2], origin_s=-1e9)
        for stage in STAGES
    ]
    joined = ProfileReport.joined(apart)
    assert joined.layers == whole.layers
    assert {(row.stage, row.part, row.seconds) for row in joined.parts} == {
        (row.stage, row.part, row.seconds) for row in whole.parts
    }
    begins = sorted(row.begin_s for row in joined.steps)
    assert begins == pytest.approx(sorted(row.begin_s for row in whole.steps), abs=1e-5)


def test_so_many_steps_are_kept_and_about_every_second_is_only_timed(tiny_model: Path) -> None:
    profiler = Profiler(6, every=2)
    run(settings(tiny_model), profiler)

    def decode(steps: list[Step]) -> list[Step]:
        return [step for step in steps if step.stage == "decode"]

    assert len(decode(profiler.steps)) == 6
    assert 1 <= len(decode(profiler.unprofiled)) <= 2 * ANSWER
    assert all(step.took_s > 0 for step in profiler.unprofiled)


def test_a_step_that_fails_leaves_the_engine_as_it_was(tiny_model: Path) -> None:
    engines = list[DecodeEngine]()

    def break_down(engine: Engine, work: object) -> None:
        def fail() -> None:
            raise ValueError("a fault in a step")

        if isinstance(engine, DecodeEngine):
            engines.append(engine)
            before = engine.runner, engine.draw
            with pytest.raises(ValueError, match="a fault"):
                Profiler(9).around(engine, fail)
            assert (engine.runner, engine.draw) == before
        assert callable(work)
        return work()

    with LocalServer(settings(tiny_model)) as server:
        sampling = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)
        with server.instrumented(break_down):
            (answer,) = server.complete([server.request(range(2, 60), sampling)])
    assert engines
    assert len(answer.tokens) == 3


def test_there_is_one_listener_at_a_time() -> None:
    with observe_ops(lambda *_: None), pytest.raises(ConfigError, match="one profile at a time"):
        observe_ops(lambda *_: None).__enter__()
