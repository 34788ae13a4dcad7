"""Conditions of a measurement."""

from datetime import datetime

import pytest

from triptych.loadgen.report.host import command_line, host_info

PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/opt/bin/triptych", "profile"], "triptych profile"),
        (["-m", "tests.integration.faults", "--seeds", "20"], None),
        (
            ["benchmarks/budget.py", "--json", "/srv/out.json"],
            "benchmarks/budget.py --json out.json",
        ),
        (["/bin/triptych", "bench", "--api-key", "s"], "triptych bench --api-key ..."),
        (["/bin/triptych", "bench", "--api-key=s"], "triptych bench --api-key=..."),
    ],
)
def test_a_command_is_shown_without_secrets_and_directories(
    words: list[str], shown: str | None
) -> None:
    whole = command_line([PYTHON, *words])
    assert whole.removeprefix("python3 ") == (shown or " ".join(words))


def test_conditions_have_command_commit_date_and_machine() -> None:
    told = host_info()
    assert {"command", "commit", "date", "cpu", "cores", "load_1min", "versions"} <= told.keys()
    assert datetime.fromisoformat(str(told["date"])).tzinfo
