"""Closed and open loops, calibration and the whole measurement, on loopback."""

import os
from itertools import pairwise

import pytest

from tests.unit.cli.fake_openai import FakeOpenAI, serving
from triptych.core.errors import BenchmarkError
from triptych.loadgen.client import open_client
from triptych.loadgen.measure import Level, ServeBenchmark, measure, served_model
from triptych.loadgen.report.processes import named, tree_of, watch
from triptych.loadgen.report.stats import Slo
from triptych.loadgen.run import calibrate, closed_loop, open_loop
from triptych.loadgen.workload.openai_requests import Workload
from triptych.loadgen.workload.turns import Segment, Session, Turn

WORKLOAD = Workload(model="fake", prompt_tokens=16, output_tokens=4)


async def test_a_closed_loop_keeps_exactly_so_many_under_way() -> None:
    fake, done = FakeOpenAI(token_s=0.005), []
    async with serving(fake) as url, open_client(url, 4) as client:
        run = await closed_loop(client, WORKLOAD, WORKLOAD.sessions(12), 4, done.append)
    assert len(run.samples) == len(done) == 12
    assert fake.most_running == 4
    assert run.duration_s >= max(sample.e2e_s for sample in run.samples)


async def test_an_open_loop_does_not_wait_for_answers_and_counts_from_the_due_moment() -> None:
    fake = FakeOpenAI(first_token_s=0.3)
    async with serving(fake) as url, open_client(url, 16) as client:
        sessions = WORKLOAD.sessions(8, rate_per_s=200.0)
        run = await open_loop(client, WORKLOAD, sessions, lambda _: None)
    assert fake.most_running > 4
    starts = sorted(sample.started_s for sample in run.samples)
    due = [session.start_s for session in sessions]
    assert [start - starts[0] for start in starts] == pytest.approx(due)


async def test_a_session_pauses_and_sends_each_turn_after_the_one_before() -> None:
    turns = tuple(Turn((Segment(f"s{n}", 8),), 2, pause_s=0.05 * n) for n in range(3))
    fake = FakeOpenAI(first_token_s=0.01)
    async with serving(fake) as url, open_client(url, 4) as client:
        for run in (
            await open_loop(client, WORKLOAD, [Session(turns, 0.02)], lambda _: None),
            await closed_loop(client, WORKLOAD, [Session(turns)], 4, lambda _: None),
        ):
            for number, (one, other) in enumerate(pairwise(run.samples), 1):
                assert other.started_s == pytest.approx(one.ended_s + 0.05 * number)
    assert fake.most_running == 1


async def test_a_session_ends_with_a_turn_that_failed() -> None:
    turns = (Turn((Segment("a", 8),), 2),) * 3
    fake = FakeOpenAI(fail_request=1)
    async with serving(fake) as url, open_client(url, 4) as client:
        run = await closed_loop(client, WORKLOAD, [Session(turns)], 1, lambda _: None)
    assert [sample.error is None for sample in run.samples] == [True, False]


async def test_token_ids_are_sent_where_the_server_takes_them() -> None:
    async with serving(FakeOpenAI(template_tokens=5)) as url, open_client(url, 1) as client:
        assert await calibrate(client, WORKLOAD) == WORKLOAD


@pytest.mark.parametrize("template_tokens", [0, 5])
async def test_words_are_counted_until_the_server_counts_what_was_asked(
    template_tokens: int,
) -> None:
    fake = FakeOpenAI(takes_token_ids=False, template_tokens=template_tokens)
    async with serving(fake) as url, open_client(url, 1) as client:
        found = await calibrate(client, WORKLOAD)
    assert (found.form, found.extra_words) == ("text", -template_tokens)


async def test_a_server_that_refuses_everything_is_an_error_with_its_answer() -> None:
    async with serving(FakeOpenAI(status=500)) as url, open_client(url, 1) as client:
        with pytest.raises(BenchmarkError, match="HTTP 500"):
            await calibrate(client, WORKLOAD)


async def test_no_prompt_is_sent_twice_in_a_measurement() -> None:
    fake = FakeOpenAI(fail_request=6)
    async with serving(fake) as url:
        benchmark = ServeBenchmark(
            url=url,
            workload=WORKLOAD,
            levels=(Level(requests=4, concurrency=2), Level(requests=4, rate_per_s=500.0)),
            slo=Slo(ttft_ms=60_000.0),
            server=tree_of(os.getpid()),
        )
        results = await measure(benchmark, lambda _: lambda _: None)
        assert await served_model(url, None) == "fake"
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(prompts) == len(set(prompts)) == 1 + 2 + 4 + 4
    closed, opened = (row.figures | {"errors": row.errors} for row in results.rows)
    assert (closed["completed"], closed["failed"]) == (3, 1)
    assert closed["total_output_tokens"] == 12
    assert list(closed["errors"].values()) == [1]
    assert (opened["completed"], opened["failed"]) == (4, 0)
    assert opened["request_goodput"] == opened["request_throughput"]
    assert closed["peak_rss_bytes"] > 1 << 20


async def test_watching_sees_the_memory_and_time_of_a_process_tree() -> None:
    async with watch(tree_of(os.getpid())) as usage:
        block = b"\1" * (32 << 20)
        sum(range(2_000_000))
    assert len(block) == 32 << 20
    assert usage.peak_rss_bytes > 32 << 20
    assert usage.peak_pss_bytes > 0
    assert usage.cpu_s > 0
    assert sum(usage.cpu_s_by_kind().values()) == pytest.approx(usage.cpu_s, abs=0.02)


def test_a_name_never_finds_the_client_itself() -> None:
    assert os.getpid() not in {process.pid for process in named("python")()}
