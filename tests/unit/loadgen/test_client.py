"""The streaming client against a real server on loopback."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli.fake_openai import FakeOpenAI, serving
from triptych.loadgen.client import open_client, send
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.sse import EventSplitter
from triptych.loadgen.workload.openai_requests import Workload

WORKLOAD = Workload(model="fake", prompt_tokens=8, output_tokens=6)


async def ask(fake: FakeOpenAI, workload: Workload = WORKLOAD) -> Sample:
    async with serving(fake) as url, open_client(url, 1) as client:
        return await send(client, workload.endpoint, workload.body(workload.turn(0)))


async def test_every_token_has_a_moment_and_counts_come_from_usage() -> None:
    sample = await ask(FakeOpenAI(first_token_s=0.05, token_s=0.01))
    assert sample.error is None
    assert (sample.prompt_tokens, sample.output_tokens) == (8, 6)
    assert sample.text == "xxxxxx"
    assert len(sample.chunks) == 6
    assert len(sample.token_gaps_s) == 5
    assert sample.ttft_s >= 0.05
    assert sample.tpot_s is not None
    assert sample.tpot_s >= 0.009
    assert sample.e2e_s == pytest.approx(sample.ttft_s + sum(sample.chunk_gaps_s))
    assert sample.e2e_s == pytest.approx(sample.ttft_s + sum(sample.token_gaps_s))


async def test_the_preamble_of_a_chat_is_no_token() -> None:
    workload = Workload(
        model="fake", prompt_tokens=8, output_tokens=4, endpoint="chat", form="text"
    )
    sample = await ask(FakeOpenAI(first_token_s=0.05), workload)
    assert len(sample.chunks) == 4
    assert sample.ttft_s >= 0.05


@pytest.mark.parametrize("continuous_usage", [False, True])
async def test_a_chunk_of_several_tokens_counts_as_several(continuous_usage: bool) -> None:
    fake = FakeOpenAI(tokens_per_chunk=3, token_s=0.01, continuous_usage=continuous_usage)
    workload = Workload(model="fake", prompt_tokens=8, output_tokens=9)
    sample = await ask(fake, workload)
    assert len(sample.chunks) == 3
    assert len(sample.chunk_gaps_s) == 2
    assert len(sample.token_gaps_s) == (6 if continuous_usage else 8)
    assert sum(sample.token_gaps_s) == pytest.approx(sum(sample.chunk_gaps_s))


async def test_an_error_event_a_cut_stream_and_a_status_are_failures() -> None:
    lost = await ask(FakeOpenAI(fail_request=0))
    cut = await ask(FakeOpenAI(break_request=0))
    refused = await ask(FakeOpenAI(status=429))
    assert lost.error is not None
    assert "lost" in lost.error
    assert cut.error == "the stream broke off before [DONE]"
    assert refused.error is not None
    assert refused.error.startswith("HTTP 429")


async def test_a_server_that_is_not_there_is_a_failure_not_an_exception() -> None:
    async with open_client("http://127.0.0.1:9", 1, timeout_s=5.0) as client:
        sample = await send(client, "completions", WORKLOAD.body(WORKLOAD.turn(0)))
    assert sample.error is not None
    assert "ConnectError" in sample.error


def test_the_url_may_end_in_v1() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert open_client(url, 1).base_url == httpx.URL("http://h:1")


@given(st.lists(st.integers(), min_size=1), st.data())
def test_events_come_out_whole_however_the_bytes_are_cut(
    values: list[int], data: st.DataObject
) -> None:
    stream = b"".join(b": note\r\n\r\ndata: %s\r\n\r\n" % json.dumps(v).encode() for v in values)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    splitter, found = EventSplitter(), list[int]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [json.loads(event) for event in splitter.feed(stream[start:end])]
    assert found == values
