"""The parts of the documents that come from the code say what the code says today."""

from tests.arch import generate_docs
from tests.arch.test_folders import ROOT
from triptych.cli.config import all_settings
from triptych.core.config import AppConfig
from triptych.core.layout import FORMATS


def test_generated_parts_are_current() -> None:
    for name in generate_docs.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert generate_docs.MARKED.search(text), f"{name} has no generated part"
        assert generate_docs.filled(text) == text, f"{name} is out of date: run 'make docs'"


def test_every_piece_is_in_a_document() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in generate_docs.DOCUMENTS]
    used = {found[2] for text in texts for found in generate_docs.MARKED.finditer(text)}
    assert used == set(generate_docs.PIECES)


def test_every_command_has_a_section() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    told = [tuple(found[3].split()) for found in generate_docs.MARKED.finditer(text)]
    assert sorted(told) == sorted([(), *generate_docs.all_commands()])


def test_nothing_is_left_out() -> None:
    told = generate_docs.configuration()
    for setting in all_settings(AppConfig):
        assert setting.meaning in told.replace("\\|", "|")
    assert all(f"`{name}`" in generate_docs.formats() for name in FORMATS)
    assert "DiffKV" in generate_docs.papers()
    remedies = generate_docs.remedies()
    for known in ("/dev/shm cannot be written", "ulimit -n", "run 'triptych model fetch"):
        assert known in remedies
    for code in ("context_length_exceeded", "rate_limit_exceeded", "overloaded", "timeout"):
        assert code in generate_docs.error_tree()
    assert all(" |  |\n" not in line for line in remedies.splitlines())
