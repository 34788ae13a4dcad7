"""What is released is complete and says its version once."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.arch import generate_rpc
from tests.arch.test_folders import PARTS, ROOT, SOURCES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): pin for name, pin in pairs}


def test_the_changelog_and_the_metadata_have_one_version() -> None:
    heading = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)
    newest = heading.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest is not None
    assert newest[1] == PROJECT["project"]["version"] == version("triptych")


def test_the_lock_pins_every_dependency_inside_its_range() -> None:
    groups = PROJECT["dependency-groups"]
    wanted = [*PROJECT["project"]["dependencies"], *groups["dev"], *groups["lock"]]
    for lock, needs in (
        ("requirements.lock", wanted),
        ("requirements-browser.lock", groups["browser"]),
    ):
        pinned = pins(lock)
        for requirement in map(Requirement, needs):
            pin = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin), f"{requirement} is pinned to {pin}"


def test_the_licence_is_apache() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "Apache-2.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / path.relative_to(ROOT).parts[0])) for path in SOURCES}
    assert modules <= names
    tracked = subprocess.run(
        ["git", "ls-files", *PARTS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    inner = {path.partition("/")[2] for path in tracked}
    packaged = {path for path in inner if path.startswith("triptych/")}
    assert {"triptych/core/py.typed", "triptych/deployments/http/dashboard.html"} <= packaged
    assert packaged <= names
    python = {name for name in names if name.endswith(".py")}
    assert python == modules


def test_what_protoc_wrote_is_current(tmp_path: Path) -> None:
    fresh = generate_rpc.generate(tmp_path)
    assert len(fresh) == 3
    for path in fresh:
        kept = generate_rpc.SOURCES / path.relative_to(tmp_path)
        assert kept.read_text() == path.read_text(), f"{kept.name} is out of date: run 'make proto'"


def test_the_wheel_brings_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "triptych = triptych.cli.main:main" in archive.read(entry).decode()
