"""Documents that point at things which are there."""

import re
from pathlib import Path

import pytest

from tests.arch.test_folders import ROOT

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
