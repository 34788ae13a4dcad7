"""The command, called as a user calls it."""

import sys
from collections.abc import Callable

import pytest

from triptych.cli import main as command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, output and notes of one call."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["triptych", *arguments])
        with pytest.raises(SystemExit) as stop:
            command.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call
