"""Weights in 4 bits that processes share: written once, whole or not at all, and mapped."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.kernels import Int4Tiles, multiplies_words
from triptych.workers.models.fused.int4_block import Int4Block
from triptych.workers.models.fused.model import FusedModel
from triptych.workers.models.load import load
from triptych.workers.models.weights import linear, shared_tiles
from triptych.workers.models.weights.shared_tiles import (
    TileSource,
    read_tiles,
    tiles_key,
    with_shared_tiles,
    write_tiles,
)


def random_tiles(outputs: int, groups: int, *, is_gated: bool = False) -> Int4Tiles:
    levels = torch.randint(16, (32 * outputs, 32 * groups), dtype=torch.uint8)
    step, middle = torch.rand(2, 32 * outputs, groups)
    return Int4Tiles.pack(levels, step, middle, is_gated=is_gated)


def build(source: TileSource) -> dict[str, Int4Tiles | None]:
    return {
        "qkv": source.get("qkv", lambda: random_tiles(3, 2)),
        "gate": source.get("gate", lambda: random_tiles(2, 1, is_gated=True)),
        "dense": source.get("dense", lambda: None),
    }


def same(one: Int4Tiles | None, other: Int4Tiles | None) -> bool:
    if one is None or other is None:
        return one is other
    kinds = (one.groups, one.is_gated, one.shape) == (other.groups, other.is_gated, other.shape)
    return kinds and one.tiles.equal(other.tiles)


@settings(max_examples=20)
@given(
    sizes=st.dictionaries(
        st.text(max_size=8),
        st.none() | st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()),
        max_size=4,
    )
)
def test_what_was_written_is_mapped(
    sizes: dict[str, tuple[int, int, bool] | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiles = {
        name: random_tiles(size[0], size[1], is_gated=size[2]) if size else None
        for name, size in sizes.items()
    }
    path = tmp_path_factory.mktemp("tiles") / "a.tiles"
    write_tiles(path, tiles)
    found = read_tiles(path)
    assert found is not None
    assert found.keys() == tiles.keys()
    assert all(same(found[name], tiles[name]) for name in tiles)


def test_the_second_process_packs_nothing(tmp_path: Path) -> None:
    first = with_shared_tiles("key", build, tmp_path)
    sources = list[TileSource]()
    found = with_shared_tiles("key", lambda one: sources.append(one) or build(one), tmp_path)
    assert [source.packed for source in sources] == [{}]
    assert all(same(first[name], found[name]) for name in first)


def test_of_processes_that_start_together_one_packs(tmp_path: Path) -> None:
    together, packed = threading.Barrier(3), list[str]()

    def start() -> None:
        together.wait()
        with_shared_tiles(
            "key",
            lambda source: source.get("a", lambda: packed.append("a") or random_tiles(4, 4)),
            tmp_path,
        )

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert packed == ["a"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_written_anew(tmp_path: Path, share: float) -> None:
    with_shared_tiles("key", build, tmp_path)
    path = tmp_path / "key.tiles"
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    assert read_tiles(path) is None
    again = with_shared_tiles("key", build, tmp_path)
    assert path.stat().st_size == size
    found = read_tiles(path)
    assert found is not None
    assert all(same(found[name], again[name]) for name in again)


@pytest.mark.parametrize("text", [b"", b"no tiles\n", shared_tiles.MAGIC + b"[1, 2]\n"])
def test_another_file_is_not_read(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.tiles").write_bytes(text)
    assert read_tiles(tmp_path / "a.tiles") is None


def test_who_writes_to_its_tiles_changes_nobody_elses(tmp_path: Path) -> None:
    one, other = (with_shared_tiles("key", build, tmp_path)["qkv"] for _ in range(2))
    assert one is not None
    assert other is not None
    before = other.tiles.clone()
    one.tiles.fill_(7)
    assert other.tiles.equal(before)


def test_without_room_on_the_disk_a_process_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        found = with_shared_tiles("key", build, tmp_path)
    assert found["qkv"] is not None
    assert "No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_files_that_were_used_last_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("abc"):
        with_shared_tiles(name, build, tmp_path)
        os.utime(tmp_path / f"{name}.tiles", (number, number))
    (tmp_path / ".new-killed").touch()
    monkeypatch.setattr(shared_tiles, "MOST_FILES", 2)
    with_shared_tiles("d", build, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "c.tiles", "d.tiles"}
    monkeypatch.setattr(shared_tiles, "MOST_BYTES", 1)
    with_shared_tiles("e", build, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "e.tiles"}


def test_the_key_has_all_that_decides_the_bytes() -> None:
    given = [("a", "int4", torch.bfloat16), ("b", "int4", torch.bfloat16)]
    given += [("a", "int4_if_exact", torch.bfloat16), ("a", "int4", torch.float32)]
    assert len({tiles_key(*each) for each in given}) == len(given)


@pytest.mark.skipif(not multiplies_words(), reason="weights in 4 bits have no tiles here")
def test_a_model_is_read_with_the_tiles_of_the_process_before(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tiles, "writable_cache_dir", lambda: tmp_path)

    def blocks() -> list[Int4Block]:
        network = load(tiny_model, "bfloat16", quantization="int4").network
        assert isinstance(network, FusedModel)
        found = network.program_blocks or ()
        assert found
        return [block for block in found if isinstance(block, Int4Block)]

    first = blocks()
    assert len(list(tmp_path.glob("tiles/*.tiles"))) == 1
    monkeypatch.setattr(linear, "fit_grid", None)
    second = blocks()
    for one, other in zip(first, second, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            assert same(getattr(one, name), getattr(other, name))
