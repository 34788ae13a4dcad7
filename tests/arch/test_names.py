"""Files and names where an engineer of the field looks for them."""

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.arch.test_folders import PARTS, ROOT, SOURCES, name_of, sources_of
from tests.integration.faults.points import PARTS as LAYER_PARTS
from tests.integration.faults.points import PLACES, Place, function_of
from triptych.cli.config import all_settings
from triptych.core.config import AppConfig

MOST_MODULES = 14
ROLES = {"reference", "cpu", "gpu"}
"""Implementations of an ``Op`` of the kernels: each op has one file of each."""

BANNED = {
    *(
        "said",
        "giver",
        "former",
        "formers",
        "held_by",
        "crowd",
        "set_aside",
        "heir",
        "bury",
        "grave",
    ),
    *("Hello", "Lend", "Lent", "Life", "Ascent", "Newcomer", "newcomer", "Brain", "brain"),
    *("Journal", "journal", "Roster", "roster", "Coordinator", "coordinator", "Mailbox", "mailbox"),
    *("Fleet", "Tempo", "Pace", "Journey", "Inbound", "Onlooker", "Intake", "Stock", "PageMemory"),
    *("patience_s", "longest_tokens", "max_context_tokens", "max_batch_requests_of", "trace_url"),
}
"""Words of our own that the field has others for (docs/glossary.md)."""

MODULES = [path for path in SOURCES if path.name != "__init__.py" and "_pb2" not in path.name]
PACKAGES = sorted({path.parent for path in MODULES})
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
HISTORY = {"CHANGELOG.md", "docs/log.md"}
"""They name files as they were called then."""

FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|yaml|proto|sh|toml|html|png|svg))`")


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_package_has_few_modules(package: Path) -> None:
    modules = [path for path in MODULES if path.parent == package]
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("part", PARTS)
def test_a_file_name_occurs_once_in_a_part(part: str) -> None:
    names = Counter(path.stem for path in MODULES if path.relative_to(ROOT).parts[0] == part)
    roles = ROLES if part == "kernels" else set[str]()
    assert not {name for name, count in names.items() if count > 1} - roles


@pytest.mark.parametrize("part", PARTS)
def test_identifiers_are_words_of_the_field(part: str) -> None:
    for path in sources_of(part):
        names = set(re.findall(r"\b[^\W\d]\w*", path.read_text(encoding="utf-8")))
        if suspects := {name for name in names if name in BANNED or name.endswith("Shell")}:
            assert not suspects & identifiers(path), name_of(path)


def identifiers(path: Path) -> set[str]:
    """Names outside of comments and strings."""
    source = io.StringIO(path.read_text(encoding="utf-8")).readline
    tokens = tokenize.generate_tokens(source)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_documents_name_are_there(path: Path) -> None:
    if name_of(path) in HISTORY:
        return
    named = FILE.findall(path.read_text(encoding="utf-8"))
    homes = [ROOT, path.parent, *(ROOT / part / "triptych" for part in PARTS)]
    homes += [ROOT / part / "triptych" / part for part in PARTS]
    assert not [name for name in named if not any((home / name).exists() for home in homes)]


def test_the_configuration_lists_every_setting_and_no_other() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    told = set[str]()
    section = ""
    for line in text.splitlines():
        if heading := re.fullmatch(
            r"## `?([\w.]+|The application|An entry of `decode\.plugins)`?", line
        ):
            section = "" if heading[1] == "The application" else f"{heading[1]}."
        if row := re.match(r"\| `(\w+)` \|", line):
            told.add(section + row[1])
    known = {setting.key for setting in all_settings(AppConfig)}
    assert known == {name for name in told if not name.startswith("An entry")}


def test_every_word_of_the_glossary_is_used() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!---|word|\*\*word)([^|]+) \|", text, re.MULTILINE)
    assert len(rows) > 30
    sources = [*SOURCES, *(one for one in DOCUMENTS if one.name != "glossary.md")]
    everything = "\n".join(path.read_text(encoding="utf-8") for path in sources).lower()
    everything = re.sub(r"[\s_`*-]+", " ", everything)
    for row in rows:
        words = re.split(r", | / | \(", re.sub(r"[`*)]", "", row))
        plain = [re.sub(r"[\s_-]+", " ", word).strip().lower() for word in words]
        assert any(word in everything for word in plain), row


@pytest.mark.parametrize("places", [PLACES, LAYER_PARTS])
def test_fail_points_name_functions_that_there_are(places: dict[str, dict[str, Place]]) -> None:
    """Else a process of the fault tests ends at its start, minutes into ``make test``."""
    for role, done in places.items():
        for place in done.values():
            owner, name, _ = function_of(role, place)
            assert callable(getattr(owner, name))
