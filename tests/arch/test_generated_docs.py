"""The parts of the documents that come from the code say what the code says today."""

import importlib.util
from types import ModuleType

import pytest

from tests.arch.test_folders import ROOT
from triptych.cli.config import all_settings
from triptych.core.config import AppConfig
from triptych.core.layout import FORMATS


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generate: ModuleType) -> None:
    for name in generate.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert generate.MARKED.search(text), f"{name} has no generated part"
        assert generate.filled(text) == text, f"{name} is out of date: run 'make docs'"


def test_every_piece_is_in_a_document(generate: ModuleType) -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in generate.DOCUMENTS]
    used = {found[2] for text in texts for found in generate.MARKED.finditer(text)}
    assert used == set(generate.PIECES)


def test_nothing_is_left_out(generate: ModuleType) -> None:
    told = generate.configuration()
    for setting in all_settings(AppConfig):
        assert setting.meaning in told.replace("\\|", "|")
    assert all(f"`{name}`" in generate.formats() for name in FORMATS)
    assert "DiffKV" in generate.papers()
    remedies = generate.remedies()
    for known in ("/dev/shm cannot be written", "ulimit -n", "run 'triptych model fetch"):
        assert known in remedies
    for code in ("context_length_exceeded", "rate_limit_exceeded", "overloaded", "timeout"):
        assert code in generate.error_tree()
    assert all(" |  |\n" not in line for line in remedies.splitlines())
