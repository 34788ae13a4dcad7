"""Plug-ins and policies of users that import what the release before called otherwise."""

import importlib
import logging
import sys

import pytest

from triptych.router import Line, ListedLine, ListedQueue, QueueView
from triptych.workers.decode.plugins import Facts, StepPlugin


def test_step_plugins_are_found_where_they_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triptych.workers.steps", raising=False)
    with caplog.at_level(logging.WARNING):
        old = importlib.import_module("triptych.workers.steps")
    assert (old.Facts, old.StepPlugin) == (Facts, StepPlugin)
    assert "is now triptych.workers.decode.plugins" in caplog.text


def test_batch_policies_find_the_queue_under_its_old_name() -> None:
    assert (Line, ListedLine) == (QueueView, ListedQueue)
