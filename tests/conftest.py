"""Fixtures and settings that every test shares."""

# ruff: noqa: E402 - the environment is set before anything reads it

import os
from collections.abc import Iterator
from pathlib import Path

for _name, _value in {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave the cores to other tests' processes
    "RAY_AUTH_MODE": "disabled",  # a local cluster of a test writes no token into the home
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.effort import EXPLORE

ROOT = Path(__file__).parents[1]


# A busy machine is no bug: no test passes or fails by a timing. And the same code passes or fails
# each time; who looks for more runs `make explore`, which draws other examples at every run.
_usual = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(EXPLORE, _usual)
settings.register_profile("triptych", _usual, derandomize=True, max_examples=25)
settings.load_profile("triptych")


def pytest_configure() -> None:
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(min(2, os.cpu_count() or 1) if alone else 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests of limits recorded under ``figure``."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(str(value))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder says what kind of test it is; tests for a GPU are skipped without one."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        folder = item.path.relative_to(ROOT).parts[:2]
        if folder in {("tests", "integration"), ("tests", "e2e")}:
            item.add_marker(folder[1])
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill ``torch.empty`` with NaN, so that a kernel that leaves a value unwritten is found."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
