"""Files of learned networks that a server uses, and those that it refuses before it starts."""

import json
from pathlib import Path

import pytest

from tests.learned import networks_beside, save_networks
from tests.tiny import save_tiny_model
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.methods.learned_files import LearnedFile
from triptych.workers.compress.learned import known_networks
from triptych.workers.compress.learned.artefact import load_merger
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.models.facts import describe


def found(model: Path, names: list[str]) -> tuple[LearnedFile, ...]:
    config = AppConfig.from_mapping({"compressor": {"learned": names}})
    return find_networks(config, describe(model))


def test_each_kind_is_found_and_a_packaged_one_serves_where_none_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = networks_beside(tiny_model)
    named = found(tiny_model, files)
    assert {(one.kind, one.modality): one.chunk_tokens for one in named} == {
        ("merger", "text"): 3,
        ("merger", "image"): 4,
        ("paper_merger", "text"): 3,
        ("scorer", "text"): 0,
    }
    monkeypatch.setattr(known_networks, "PACKAGED", tmp_path)
    assert found(tiny_model, ["auto"]) == ()
    for file in files:
        name = f"{describe(tiny_model).weights}.{Path(file).name}"
        (tmp_path / name).write_bytes(Path(file).read_bytes())
    scorer = next(one for one in files if "scorer" in one)
    both = found(tiny_model, ["auto", scorer])
    assert {one.tensors for one in both} == {one.tensors for one in named}
    assert [one.path for one in both if one.kind == "scorer"] == [scorer]


def test_files_that_are_absent_torn_twice_there_or_of_another_model_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    merger = next(one for one in networks_beside(tiny_model) if ".text.merger." in one)
    with pytest.raises(ConfigError, match=r"compressor\.learned='/none': there is no such file"):
        found(tiny_model, ["/none"])
    with pytest.raises(ConfigError, match="are both a merger of modality 'text'; name one"):
        found(tiny_model, [merger, merger])
    data = bytearray(Path(merger).read_bytes())
    data[-3] ^= 1
    (tmp_path / "torn").write_bytes(data)
    with pytest.raises(ModelError, match="it is torn"):
        found(tiny_model, [str(tmp_path / "torn")])
    (tmp_path / "short").write_bytes(data[:-8])
    with pytest.raises(ModelError, match="download it again"):
        found(tiny_model, [str(tmp_path / "short")])
    other = save_tiny_model(tmp_path / "other", layers=1)
    with pytest.raises(ConfigError, match="trained for tiny"):
        found(other, [merger])


def test_a_file_that_was_replaced_since_the_start_is_not_used(
    tiny_model: Path, tmp_path: Path
) -> None:
    merger, paper = (
        next(one for one in networks_beside(tiny_model) if f".text.{kind}." in one)
        for kind in ("merger", "paper_merger")
    )
    copy = tmp_path / "network"
    copy.write_bytes(Path(merger).read_bytes())
    (file,) = found(tiny_model, [str(copy)])
    assert load_merger(file).chunk_tokens == 3
    copy.write_bytes(Path(paper).read_bytes())
    with pytest.raises(ModelError, match="changed since the application started"):
        load_merger(file)


def test_networks_of_a_model_whose_file_has_another_config_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    save_networks(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    with pytest.raises(ConfigError, match="run 'triptych train' for it"):
        found(model, networks_beside(model)[:1])
