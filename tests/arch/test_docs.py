"""Documents that point at things which are there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.arch.test_folders import ROOT
from tests.clients.readme import LIVE, PRINTS, SERVERS, SKIPPED, blocks, commands
from triptych.cli.main import app

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert not [link for link in links if not (path.parent / link).exists()]


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    used = {name for line in lines if line.startswith("    make ") for name in line.split()[1:]}
    assert {"serve", "check", "test"} <= used <= targets


def commands_of_ours(path: Path) -> Iterator[list[str]]:
    """The arguments of ``triptych`` in a document's code blocks."""
    for block in blocks(path.read_text(encoding="utf-8")):
        for line in commands(block) if block.language in {"shell", "bash", "sh"} else ():
            words = shlex.split(re.split(r" [|>&]", line)[0])
            if words and words[0].rpartition("/")[2] == "triptych":
                yield words[1:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_are_ones_that_there_are(path: Path) -> None:
    """Names, options and values; ``make readme`` runs those of the README."""
    root: Any = get_command(app)
    for words in commands_of_ours(path):
        command = root
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        assert command is not root, words
        with command.make_context("triptych", words):
            pass


def test_what_make_readme_treats_apart_is_in_the_readme() -> None:
    told = [
        command
        for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"))
        for command in commands(block)
    ]
    assert {*SKIPPED, *LIVE} <= set(told)
    assert all(any(command.startswith(server) for command in told) for server in SERVERS)
    assert {*PRINTS} <= {command.partition(" ")[0] for command in told}


def test_the_readme_can_be_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_continuous_integration_runs_what_the_readme_says() -> None:
    assert "make check test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "    make check test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_decisions_have_a_number_of_their_own_and_the_four_headings() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    numbers = [int(path.name[:4]) for path in decisions]
    assert len(set(numbers)) == len(numbers)  # one that is still being written may leave a gap
    for path in decisions:
        headings = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "Source"]
