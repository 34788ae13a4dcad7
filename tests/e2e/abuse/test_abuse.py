"""Hostile requests are not answered 5xx, cut no other stream, and leave nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.abuse.attack import attack, settings
from tests.e2e.conftest import free_port

pytestmark = pytest.mark.e2e


def test_hostile_clients_harm_nobody(start: Callable[..., Any]) -> None:
    port = free_port()
    report = attack(start(**settings(port)), port, [0])
    assert report.faults == []
    assert len(report.outcomes) >= 60
    assert report.streams >= 2
