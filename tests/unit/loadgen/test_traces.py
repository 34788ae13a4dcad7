"""Recorded traffic: two forms are read, and a bad line is named."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.cli.measure.load_options import LoadOptions, levels_of_options
from triptych.core.errors import ConfigError
from triptych.loadgen.workload.traces import read_trace

HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def write(tmp_path: Path):
    def to(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_burstgpt_rows_become_requests_and_failures_are_left_out(write) -> None:
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n7,GPT-4,9,0,9,API log\n45,GPT-4,1087,230,1317,x\n"
    )
    sessions = read_trace(write("b.csv", HEAD + rows))
    found = [(s.start_s, s.turns[0].prompt_tokens, s.turns[0].output_tokens) for s in sessions]
    assert found == [(0.0, 472, 18), (40.0, 1087, 230)]
    faster = read_trace(write("b.csv", HEAD + rows), speed=10.0, limit=1)
    assert [session.start_s for session in faster] == [0.0]


def test_mooncake_blocks_with_equal_hashes_are_equal_tokens(write) -> None:
    lines = (
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '\n{"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [1, 3]}\n'
    )
    first, second = read_trace(write("m.jsonl", lines))
    assert second.start_s == 1.5
    assert [segment.tokens for segment in first.turns[0].segments] == [512, 88]
    assert first.turns[0].segments[0] == second.turns[0].segments[0]
    assert first.turns[0].segments[1] != second.turns[0].segments[1]


@pytest.mark.parametrize(
    ("name", "text", "where", "what"),
    [
        ("a.csv", HEAD + "1,m,5,5,10,x\n2,m,many,5,10,x\n", ":3", "'many'"),
        ("a.csv", HEAD + "1,m,5,-5,10,x\n", ":2", "'-5'"),
        ("a.csv", HEAD + "1,m,0,5,10,x\n", ":2", "one at least"),
        ("a.csv", HEAD + "1,m\n", ":2", "None"),
        ("a.csv", HEAD + "nan,m,5,5,10,x\n", ":2", "'nan'"),
        ("a.csv", HEAD + '1,"m,5,5,10,x\n', ":2", "unexpected end"),
        ("a.csv", "Time,Tokens\n1,2\n", ":1", "Timestamp"),
        ("a.csv", HEAD, "", "no request"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"ti', ":2", "JSON"),
        ("a.jsonl", "[1, 2]\n", ":1", "an object"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5}\n', ":1", "output_length"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            ":1",
            "expected 2",
        ),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [[]]}\n',
            ":1",
            "list of numbers",
        ),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5.5, "output_length": 1}\n', ":1", "whole"),
        ("a.txt", "x", "", ".csv or .jsonl"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(
    write, name: str, text: str, where: str, what: str
) -> None:
    path = write(name, text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert f"{path}{where}" in str(caught.value)
    assert what in str(caught.value)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")


@settings(max_examples=examples(40))
@given(text=st.text(max_size=200))
def test_no_text_makes_the_readers_fail_in_another_way(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("t")
    for name, head in (("a.csv", HEAD), ("a.jsonl", "")):
        path = folder / name
        path.write_bytes((head + text).encode("utf-8", "surrogatepass"))
        with suppress(ConfigError):
            assert read_trace(path)


def test_a_trace_keeps_its_times_unless_told_otherwise(write) -> None:
    path = write("b.csv", HEAD + "".join(f"{n},m,10,5,15,x\n" for n in range(20)))
    load = LoadOptions(trace=path, speed=2.0).resolve()
    (level,) = levels_of_options(load, "", "", None)
    assert (level.requests, str(level)) == (20, "trace")
    assert [s.start_s for s in load.sessions(20)] == [n / 2 for n in range(20)]
    again = load.sessions(20, scope=1)
    assert again[0].turns[0].segments != load.sessions(20)[0].turns[0].segments
    (closed,) = levels_of_options(load, "4", "", 8)
    assert (closed.requests, closed.concurrency) == (8, 4)
