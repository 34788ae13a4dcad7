"""Workloads by name, and prompts that are the same for all servers of a round."""

from argparse import Namespace

import pytest

from benchmarks.peers.__main__ import workload_names
from benchmarks.peers.catalogue import servers_named
from benchmarks.peers.measure import wrong_lengths
from benchmarks.peers.servers import LEAST_AVAILABLE_BYTES, MOST_IDLE_CORES, is_quiet
from benchmarks.peers.workloads import (
    CLIENTS,
    SHARED_TOKENS,
    TURNS,
    parse_workload,
    random_names,
    sessions_of,
    warmup_of,
)
from triptych.core.errors import ConfigError
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.workload.turns import requests_of


def keys(name: str, scope: str) -> set[str]:
    sessions = sessions_of(parse_workload(name), scope, None)
    return {part.key for one in sessions for turn in one.turns for part in turn.segments}


def test_equal_rounds_have_equal_prompts_and_others_have_none_of_them() -> None:
    assert keys("512/64/4", "round1") == keys("512/64/4", "round1")
    assert not keys("512/64/4", "round1") & keys("512/64/4", "round2")
    assert not keys("conversations", "round1") & keys("conversations", "round2")


def test_a_warm_up_has_prompts_of_its_own() -> None:
    for name in ("512/64/4", "conversations"):
        warm = warmup_of(parse_workload(name))
        used = {part.key for one in warm for turn in one.turns for part in turn.segments}
        assert not used & keys(name, "round1")


def test_conversations_share_a_beginning_and_repeat_their_history() -> None:
    sessions = sessions_of(parse_workload("conversations"), "round1", None)
    assert [len(one.turns) for one in sessions] == [TURNS] * CLIENTS
    assert {one.turns[0].segments[0].tokens for one in sessions} == {SHARED_TOKENS}
    assert len({one.turns[0].segments[0].key for one in sessions}) == 1
    for one in sessions:
        for before, after in zip(one.turns, one.turns[1:], strict=False):
            assert after.segments[: len(before.segments)] == before.segments


def test_a_server_has_room_for_the_longest_request() -> None:
    for name in ("512/64/4", "conversations"):
        workload = parse_workload(name)
        turns = [turn for one in sessions_of(workload, "x", None) for turn in one.turns]
        longest = max(turn.prompt_tokens + turn.output_tokens for turn in turns)
        assert workload.needs(1).context_tokens == longest


def test_a_rate_gives_arrival_times() -> None:
    sessions = sessions_of(parse_workload("64/16/2ps"), "x", 200)
    assert sessions[-1].start_s == pytest.approx(100.0, rel=0.2)
    assert [one.start_s for one in sessions_of(parse_workload("64/16/2"), "x", 3)] == [0.0] * 3


def test_only_conversations_have_a_prefix_cache() -> None:
    assert parse_workload("conversations+busy").needs(1).prefix_cache
    assert not parse_workload("512/64/4+busy").needs(1).prefix_cache


def test_random_names_are_workloads_with_clients_and_rates() -> None:
    found = [parse_workload(name) for name in random_names(7)]
    assert [one.rate_per_s is None for one in found] == [True, False, True, False]
    assert random_names(7) != random_names(8)


def test_busy_is_part_of_the_name_and_said_once() -> None:
    asked = Namespace(workloads="512/64/1,512/64/4+busy", random_set=None, busy=True)
    assert workload_names(asked) == ["512/64/1+busy", "512/64/4+busy"]
    drawn = workload_names(Namespace(workloads="", random_set=3, busy=False))
    assert drawn == random_names(3)


def test_names_of_peers_and_topologies() -> None:
    found = [server.name for server in servers_named(["llama", "openvino"], ["colocated"])]
    assert found == ["llama-bf16", "llama-q4_1", "openvino", "triptych-colocated"]
    with pytest.raises(ConfigError, match="peer 'lama'"):
        servers_named(["lama"], [])
    with pytest.raises(ConfigError, match="topology 'both'"):
        servers_named([], ["both"])


@pytest.mark.parametrize("name", ["512/64", "512/64/x", "a/b/c", "512/64/1/2", "busy"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected such as"):
        parse_workload(name)


def test_answers_of_other_lengths_are_errors() -> None:
    sessions = sessions_of(parse_workload("512/64/1"), "x", 2)
    right = Sample(0.0, 1.0, prompt_tokens=512, output_tokens=64)
    short = Sample(0.0, 1.0, prompt_tokens=512, output_tokens=63)
    assert requests_of(sessions) == 2
    assert wrong_lengths([right, right], sessions) == {}
    assert wrong_lengths([right, short], sessions) == {"127 output tokens instead of 128": 1}


def test_a_server_stays_up_if_it_is_idle_and_memory_is_left() -> None:
    assert is_quiet(MOST_IDLE_CORES, LEAST_AVAILABLE_BYTES)
    assert not is_quiet(MOST_IDLE_CORES + 0.01, LEAST_AVAILABLE_BYTES)
    assert not is_quiet(MOST_IDLE_CORES, LEAST_AVAILABLE_BYTES - 1)
