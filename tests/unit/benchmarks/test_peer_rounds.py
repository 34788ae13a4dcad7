"""Order of the turns, the rule for disturbed ones, and what is measured again."""

from dataclasses import replace

from benchmarks.peers.rounds import Measured, Plan, Turn, used

PLAN = Plan(workloads=("short", "long"), servers=("ours", "theirs"), rounds=2)


def measured(
    turn: Turn, other_cores: float = 0.0, errors: dict[str, int] | None = None
) -> Measured:
    return Measured(
        workload=turn.workload,
        round=turn.round,
        server=turn.server,
        attempt=turn.attempt,
        figures={"other_cores": other_cores},
        errors=errors or {},
    )


def all_turns(plan: Plan, *disturbed: Turn) -> list[Turn]:
    """Turns in their order, if these are disturbed."""
    rows = list[Measured]()
    while turn := plan.next_turn(rows):
        rows.append(measured(turn, other_cores=1.0 if turn in disturbed else 0.0))
    return [row.turn for row in rows]


def test_servers_alternate() -> None:
    servers = [turn.server for turn in all_turns(PLAN)]
    assert servers == ["ours", "theirs"] * 4


def test_a_workload_is_finished_before_the_next() -> None:
    assert [(turn.workload, turn.round) for turn in all_turns(PLAN)[::2]] == [
        ("short", 1),
        ("short", 2),
        ("long", 1),
        ("long", 2),
    ]


def test_a_disturbed_turn_is_repeated_at_the_end_of_its_round() -> None:
    turns = all_turns(PLAN, Turn("short", 1, "ours"))
    assert turns[:4] == [
        Turn("short", 1, "ours"),
        Turn("short", 1, "theirs"),
        Turn("short", 1, "ours", attempt=2),
        Turn("short", 2, "ours"),
    ]


def test_repeats_are_bounded() -> None:
    ours = [Turn("short", 1, "ours", attempt) for attempt in range(1, 10)]
    turns = all_turns(PLAN, *ours)
    assert [turn for turn in turns if turn in ours] == ours[: PLAN.most_attempts]


def test_a_turn_counts_up_to_the_limit() -> None:
    turn, limit = Turn("short", 1, "ours"), PLAN.most_other_cores
    assert PLAN.counts(measured(turn, other_cores=limit))
    assert not PLAN.counts(measured(turn, other_cores=limit + 0.01))


def test_a_turn_with_errors_does_not_count() -> None:
    failed = measured(Turn("short", 1, "ours"), errors={"HTTP 500": 1})
    assert not PLAN.counts(failed)
    assert not PLAN.is_disturbed(failed)


def test_turns_that_are_there_are_not_measured_again() -> None:
    turns = all_turns(PLAN)
    rows = [measured(turn) for turn in turns[:3]]
    assert PLAN.next_turn(rows) == turns[3]
    assert PLAN.next_turn([measured(turn) for turn in turns]) is None


def test_more_rounds_continue_after_those_that_are_there() -> None:
    plan = Plan(workloads=("short",), servers=("ours",), rounds=1)
    rows = [measured(turn) for turn in all_turns(plan)]
    longer = Plan(workloads=("short",), servers=("ours",), rounds=2)
    assert longer.next_turn(rows) == Turn("short", 2, "ours")


def test_a_server_is_skipped_for_one_workload() -> None:
    plan = replace(PLAN, skipped=[("short", "ours")])
    turns = [(turn.workload, turn.server) for turn in all_turns(plan)]
    assert turns == [("short", "theirs")] * 2 + [("long", "ours"), ("long", "theirs")] * 2
    assert plan.settled([], "short") == plan.rounds


def test_settled_counts_turns_and_not_attempts() -> None:
    ours = Turn("short", 1, "ours")
    rows = [measured(ours, other_cores=1.0)]
    assert PLAN.settled(rows, "short") == 0
    rows.append(measured(Turn("short", 1, "ours", 2)))
    assert PLAN.settled(rows, "short") == 1


def test_the_attempt_that_counts_is_used() -> None:
    good = measured(Turn("short", 1, "ours", 2))
    rows = [measured(Turn("short", 1, "ours"), other_cores=1.0), good]
    assert used(PLAN, rows) == {("short", 1, "ours"): good}
