"""The revision of a model covers every byte that decides what it computes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from tests.unit.workers.models.conftest import SaveModel
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.profile import Profile, Settings
from triptych.workers.models import load as loading
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import config_of, describe, weights_of
from triptych.workers.models.store import file_digests
from triptych.workers.models.store.file_digests import digest_of
from triptych.workers.models.store.safe_files import seal, sha256_of


@pytest.fixture
def model(llama: PreTrainedConfig, save_model: SaveModel) -> Path:
    return save_model(llama)


def set_config(path: Path, key: str, value: object) -> None:
    config = json.loads((path / "config.json").read_text())
    if key == "rope_theta":
        config["rope_parameters"] |= {key: value}
    else:
        config[key] = value
    (path / "config.json").write_text(json.dumps(config))


def change_a_byte(file: Path, position: int = -1) -> None:
    """Change one byte in place: name, inode and size stay."""
    with file.open("r+b") as stream:
        stream.seek(position if position >= 0 else file.stat().st_size + position)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))


def add_a_token(path: Path) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["lstrip"] = True
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


CHANGES: dict[str, Callable[[Path], object]] = {
    "rope_theta": lambda path: set_config(path, "rope_theta", 5e5),
    "rms_norm_eps": lambda path: set_config(path, "rms_norm_eps", 1e-3),
    "hidden_act": lambda path: set_config(path, "hidden_act", "gelu"),
    "a byte of a weight": lambda path: change_a_byte(path / "model.safetensors"),
    "the tokenizer": add_a_token,
}


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "with a manifest"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_gives_another_revision(
    change: Callable[[Path], object], is_sealed: bool, model: Path
) -> None:
    if is_sealed:  # the manifest stays as it was, as if copied along
        seal(model)
    before = describe(model).revision
    assert describe(model).revision == before
    change(model)
    assert describe(model).revision != before


def test_a_copy_has_the_same_revision(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert describe(tmp_path / "copy").revision == describe(model).revision


def test_a_digest_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = settled_file(tmp_path, monkeypatch)
    found = digest_of(file)
    assert found == sha256_of(file)
    monkeypatch.setattr(file_digests, "_hash", lambda *_: pytest.fail("hashed again"))
    assert digest_of(file) == found


def test_setting_mtime_back_does_not_hide_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = settled_file(tmp_path, monkeypatch)
    before, times = digest_of(file), file.stat()
    change_a_byte(file, 500)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_of(file) == sha256_of(file) != before


def test_a_file_that_has_just_changed_is_hashed_again(tmp_path: Path) -> None:
    """Two changes within one tick of the clock leave the same time stamps."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1000))
    digest_of(file)
    assert not list(file_digests.writable_cache_dir().glob("digests/*"))


def settled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is old enough for its digest to be kept."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1000))
    monkeypatch.setattr(file_digests, "SETTLED_S", -60.0)
    return file


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "cache"))


def test_progress_is_reported_when_hashing_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "weights", list[tuple[str, int, int]]()
    file.write_bytes(bytes(1000))
    digest_of(file, lambda *step: seen.append(step))
    monkeypatch.setattr(file_digests, "SHOW_AFTER_S", -1.0)
    digest_of(file, lambda *step: seen.append(step))
    assert seen == [("hash", 1000, 1000)]


def test_weights_that_change_while_they_are_loaded_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = loading.read_plain

    def change_after_reading(path: Path, *rest: object) -> object:
        found = read(path, *rest)  # pyright: ignore[reportArgumentType]
        change_a_byte(path / "model.safetensors")
        return found

    monkeypatch.setattr(loading, "read_plain", change_after_reading)
    with pytest.raises(ModelError, match="changed while"):
        loading.load(model, "float32")


def test_a_profile_belongs_to_the_config_too(model: Path, tmp_path: Path) -> None:
    facts, path = describe(model), tmp_path / "profile.json"
    Profile(
        model="tiny",
        weights=facts.weights,
        config=facts.config,
        geometry=facts.geometry,
        settings=Settings(),
    ).write(path)
    config = AppConfig.from_mapping({"compressor": {"profile": str(path)}})
    assert find_profile(config, facts)
    set_config(model, "rope_theta", 5e5)
    with pytest.raises(ConfigError, match=r"another config\.json of tiny.*triptych calibrate"):
        find_profile(config, describe(model))


def test_keys_of_a_config_that_change_nothing_do_not_count(model: Path) -> None:
    before, weights = config_of(model), weights_of(model)
    set_config(model, "transformers_version", "9.9")
    set_config(model, "use_cache", False)
    assert (config_of(model), weights_of(model)) == (before, weights)
    set_config(model, "rms_norm_eps", 1e-3)
    assert config_of(model) != before
