"""Caches are found and written under any user id, with or without a home directory."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.core.config import cache_dirs
from triptych.core.config.cache_dirs import (
    cache_dir,
    can_write,
    library_environment,
    writable_cache_dir,
)
from triptych.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRIPTYCH_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache_dirs.tempfile, "gettempdir", lambda: str(tmp_path))
    cache_dirs._writable.cache_clear()
    yield
    cache_dirs._writable.cache_clear()


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def fallback(tmp_path: Path) -> Path:
    return tmp_path / f"triptych-cache-{os.getuid()}"


def test_the_variable_and_the_home_are_used_if_they_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_dir() == writable_cache_dir() == tmp_path / "home" / ".cache" / "triptych"
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_dir() == writable_cache_dir() == tmp_path / "mine"


def test_without_a_home_caches_go_below_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert cache_dir() == writable_cache_dir() == fallback(tmp_path)
        assert cache_dir() == writable_cache_dir() == fallback(tmp_path)
    assert len(caplog.messages) == 1
    assert "there is no home directory: set TRIPTYCH_CACHE_DIR" in caplog.messages[0]


def test_a_read_only_cache_is_read_and_another_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    named = tmp_path / "file" / "cache"
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(named))
    with caplog.at_level(logging.WARNING):
        assert (cache_dir(), writable_cache_dir()) == (named, fallback(tmp_path))
    assert f"{named} cannot be written: set TRIPTYCH_CACHE_DIR" in caplog.text


def test_a_directory_that_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    fallback(tmp_path).mkdir()
    fallback(tmp_path).chmod(0o777)
    with pytest.raises(ConfigError, match=r"remove it, or set TRIPTYCH_CACHE_DIR"):
        writable_cache_dir()


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_user: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(cache_dirs.pwd, "getpwuid", no_entry)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", *LIBRARY_VARIABLES):
        monkeypatch.delenv(name, raising=False)


LIBRARY_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "TRITON_CACHE_DIR")


def test_libraries_write_where_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown_user: None
) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    found = library_environment()
    assert found["HOME"] == str(fallback(tmp_path))
    assert found["TRITON_CACHE_DIR"] == str(fallback(tmp_path) / "triton")
    assert found["USER"] == f"uid-{os.getuid()}"
    token = Path(found["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert library_environment() == found
    assert token.read_text() == Path(library_environment()["RAY_AUTH_TOKEN_PATH"]).read_text()


def test_a_home_that_cannot_be_written_stays_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown_user: None
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/mine")
    assert library_environment().keys() == {"TRITON_CACHE_DIR", "USER"}


def test_a_usual_home_needs_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert library_environment() == {}


def test_what_can_be_written(tmp_path: Path) -> None:
    assert can_write(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not can_write(tmp_path / "file" / "c")
