"""The disk tier: what it holds survives its process, and what is not whole is not there."""

import errno
import logging
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.kvpool.disk.disk_objects import (
    PAGE_BYTES,
    changed,
    digest,
    meta_of,
    pages_of,
    poisoned,
)
from triptych.core.errors import PoolError
from triptych.kvpool.disk.block_file import ObjectMeta, Pages, object_bytes, page_runs
from triptych.kvpool.disk.store import DiskStore

ROOM = 1 << 20
SIZE = object_bytes(meta_of(0))
CHILD = Path(__file__).with_name("disk_process.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskStore]:
    with DiskStore(folder, ROOM, PAGE_BYTES) as made:
        yield made


def store(tier: DiskStore, *numbers: int) -> None:
    for number in numbers:
        assert tier.store(meta_of(number), [pages_of(meta_of(number))])


def file_of(tier: DiskStore, number: int) -> Path:
    return tier.directory / f"{meta_of(number).key.hex()}.kv"


def objects_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def require_back(tier: DiskStore, meta: ObjectMeta) -> None:
    into = poisoned(meta.pages)
    loaded = tier.load(meta.key, [into])
    assert loaded is not None
    assert (loaded.meta, loaded.nbytes) == (meta, meta.pages * PAGE_BYTES)
    assert np.array_equal(into, pages_of(meta))


def keys(*numbers: int) -> list[bytes]:
    return [meta_of(number).key for number in numbers]


# ------------------------------------------------------------------ store and load


def test_pages_come_back_into_any_pages_of_an_arena(tier: DiskStore) -> None:
    meta = meta_of(1, pages=300)
    tier.store(meta, [pages_of(meta)])
    arena = poisoned(1000)
    ids = np.r_[500:700, 3, 1, 2, 900:997].astype(np.int32)
    loaded = tier.load(meta.key, page_runs(arena, ids))
    assert loaded is not None
    assert loaded.reads == 1
    assert np.array_equal(arena[ids], pages_of(meta))
    others = np.delete(arena, ids, axis=0)
    assert (others == 0xA5).all()


def test_what_is_not_there_is_a_miss_and_touches_nothing(tier: DiskStore) -> None:
    into = poisoned(5)
    assert tier.load(digest("nobody"), [into]) is None
    assert (into == 0xA5).all()
    assert tier.stat().missed == 1
    assert tier.describe(digest("nobody")) is None
    assert not tier.drop(digest("nobody"))


def test_an_object_is_stored_once(tier: DiskStore) -> None:
    store(tier, 1)

    def untouched() -> Iterator[Pages]:
        raise AssertionError("its pages are not asked for")
        yield poisoned(1)

    assert not tier.store(meta_of(1), untouched())
    assert tier.stat().stored == 1
    assert tier.stat().nbytes == SIZE


def test_dropped_objects_are_gone(tier: DiskStore) -> None:
    store(tier, 1, 2)
    assert tier.drop(meta_of(1).key)
    assert tier.keys() == keys(2)
    assert objects_in(tier.directory) == [file_of(tier, 2)]
    assert tier.stat().nbytes == SIZE


def test_files_are_for_this_user_alone(tier: DiskStore) -> None:
    store(tier, 1)
    for path in (file_of(tier, 1), tier.directory / "triptych.lock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(tier.directory.stat().st_mode) == 0o700
    assert file_of(tier, 1).stat().st_size == SIZE


@pytest.mark.parametrize("pages", [[], [poisoned(4)], [poisoned(9)], [poisoned(5, 128)]])
def test_a_store_of_other_pages_leaves_nothing(tier: DiskStore, pages: list[Pages]) -> None:
    with pytest.raises(ValueError, match=r"pages to store|expected contiguous|room for"):
        tier.store(meta_of(1), pages)
    assert os.listdir(tier.directory) == ["triptych.lock"]
    assert tier.keys() == []
    store(tier, 1)
    require_back(tier, meta_of(1))


def test_a_source_that_fails_leaves_nothing(tier: DiskStore) -> None:
    def source() -> Iterator[Pages]:
        yield poisoned(2)
        raise KeyError("gone")

    with pytest.raises(KeyError):
        tier.store(meta_of(1), source())
    assert os.listdir(tier.directory) == ["triptych.lock"]
    assert (tier.stat().nbytes, tier.stat().failed) == (0, 0)


def test_pages_of_another_size_are_refused(tier: DiskStore) -> None:
    meta = meta_of(1, page_bytes=512)
    with pytest.raises(ValueError, match="expected 256"):
        tier.store(meta, [pages_of(meta)])


def test_buffers_that_do_not_fit_are_the_callers_mistake_and_no_damage(tier: DiskStore) -> None:
    store(tier, 1)
    with pytest.raises(ValueError, match="room for"):
        tier.load(meta_of(1).key, [poisoned(4)])
    require_back(tier, meta_of(1))


def test_many_threads_at_once(folder: Path) -> None:
    """Everybody stores, loads and drops the same few objects; half of them fit."""
    chosen = [meta_of(number, 40) for number in range(8)]
    capacity = 4 * object_bytes(chosen[0])
    wrong = list[bytes]()

    def work(tier: DiskStore, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            meta, into = chance.choice(chosen), poisoned(40)
            action = chance.random()
            if action < 0.45:
                tier.store(meta, [pages_of(meta)])
            elif action < 0.95:
                if tier.load(meta.key, [into]) and not np.array_equal(into, pages_of(meta)):
                    wrong.append(meta.key)
            else:
                tier.drop(meta.key)

    with DiskStore(folder, 4 * capacity, PAGE_BYTES) as tier, ThreadPoolExecutor(4) as workers:
        list(workers.map(work, [tier] * 4, range(4)))
        found = tier.stat()
        assert not wrong
        assert found.damaged == 0
        assert sorted(tier.keys()) == sorted(bytes.fromhex(p.stem) for p in objects_in(folder))
        assert found.nbytes == sum(path.stat().st_size for path in objects_in(folder))


# ------------------------------------------------------------------ capacity


def test_the_oldest_used_goes_first(folder: Path) -> None:
    with DiskStore(folder, 3 * SIZE, PAGE_BYTES) as tier:
        store(tier, 1, 2, 3)
        require_back(tier, meta_of(1))
        assert not tier.store(meta_of(2), [])
        store(tier, 4)
        assert tier.keys() == keys(1, 2, 4)
        assert len(objects_in(folder)) == 3
        assert (tier.stat().evicted, tier.stat().nbytes) == (1, 3 * SIZE)


def test_a_tier_that_is_about_to_end_is_waited_for(tier: DiskStore) -> None:
    store(tier, 1)
    ending = threading.Timer(0.1, tier.close)
    ending.start()
    with DiskStore(tier.directory, ROOM, PAGE_BYTES, wait_s=60.0) as other:
        assert other.keys() == keys(1)
    ending.join()


def test_a_disk_that_hangs_keeps_nobody_from_looking(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, unlink = threading.Event(), threading.Event(), os.unlink

    def hang(*arguments: Any, **more: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        unlink(*arguments, **more)

    with DiskStore(folder, SIZE, PAGE_BYTES) as tier, ThreadPoolExecutor(1) as worker:
        store(tier, 1)
        with monkeypatch.context() as patch:
            patch.setattr("os.unlink", hang)
            storing = worker.submit(store, tier, 2)
            assert begun.wait(60)
            assert not tier.touch(meta_of(1).key)
            assert tier.describe(meta_of(2).key) is None
            assert (tier.keys(), tier.stat().evicted) == ([], 1)
            go_on.set()
            storing.result(60)
        require_back(tier, meta_of(2))
        assert objects_in(folder) == [file_of(tier, 2)]


def test_of_a_chain_the_last_block_goes_first(folder: Path) -> None:
    first, second, third = meta_of(1), meta_of(2), meta_of(3)
    second = changed(second, parent=first.key)
    third = changed(third, parent=second.key)
    with DiskStore(folder, 4 * SIZE, PAGE_BYTES) as tier:
        for meta in (first, second, third):
            tier.store(meta, [pages_of(meta)])
        store(tier, 4)
        require_back(tier, first)
        require_back(tier, third)
        store(tier, 5)
        assert tier.keys() == [third.key, second.key, first.key, *keys(5)]
    with DiskStore(folder, 3 * SIZE, PAGE_BYTES) as tier:
        assert tier.keys() == [second.key, first.key, *keys(5)]
        assert tier.touch(second.key)
        assert tier.keys() == [*keys(5), second.key, first.key]
        assert not tier.touch(third.key)


def test_parents_in_a_circle_do_no_harm(tier: DiskStore) -> None:
    one, two = meta_of(1), meta_of(2)
    for meta in (changed(one, parent=two.key), changed(two, parent=one.key)):
        tier.store(meta, [pages_of(meta)])
    assert tier.touch(one.key)
    assert sorted(tier.keys()) == sorted(keys(1, 2))


def test_a_tenant_over_its_quota_evicts_its_own(folder: Path) -> None:
    size = object_bytes(meta_of(1, tenant="a"))
    with DiskStore(folder, 10 * size, PAGE_BYTES, tenant_bytes=2 * size) as tier:
        for number, tenant in enumerate("abaaab"):
            meta = meta_of(number, tenant=tenant)
            tier.store(meta, [pages_of(meta)])
        assert tier.keys() == keys(1, 3, 4, 5)
        assert tier.stat().evicted == 2
        large = meta_of(7, pages=50, tenant="b")
        with pytest.raises(PoolError, match="too small for it"):
            tier.store(large, [pages_of(large)])
    with DiskStore(folder, 10 * size, PAGE_BYTES, tenant_bytes=size) as tier:
        assert tier.keys() == keys(4, 5)


def test_what_is_larger_than_the_tier_is_refused_and_evicts_nothing(folder: Path) -> None:
    with DiskStore(folder, 2 * SIZE, PAGE_BYTES) as tier:
        store(tier, 1, 2)
        large = meta_of(3, pages=1000)
        with pytest.raises(PoolError, match=r"pool\.disk_bytes"):
            tier.store(large, [pages_of(large)])
        assert tier.keys() == keys(1, 2)


def test_what_a_store_writes_now_is_room_that_others_cannot_have(folder: Path) -> None:
    with DiskStore(folder, 2 * SIZE, PAGE_BYTES) as tier:
        begun, go_on = threading.Event(), threading.Event()

        def slow(meta: ObjectMeta) -> Iterator[Pages]:
            begun.set()
            assert go_on.wait(60)
            yield pages_of(meta)

        with ThreadPoolExecutor(1) as worker:
            first = worker.submit(tier.store, meta_of(1), slow(meta_of(1)))
            assert begun.wait(60)
            store(tier, 2, 3)
            assert tier.keys() == keys(3)
            go_on.set()
            assert first.result(60)
        assert tier.keys() == keys(3, 1)


def test_a_full_disk_is_a_clear_error_before_anything_is_written(folder: Path) -> None:
    large = changed(meta_of(2), pages=1 << 19, page_bytes=1 << 30)
    with DiskStore(folder, 1 << 60, large.page_bytes) as tier:

        def untouched() -> Iterator[Pages]:
            raise AssertionError("nothing is written")
            yield poisoned(1)

        with pytest.raises(PoolError) as raised:
            tier.store(large, untouched())
        for part in (str(folder), "562,949,", " are free (No space left", "pool.disk_bytes"):
            assert part in str(raised.value)
        assert (tier.stat().failed, tier.stat().nbytes) == (1, 0)
        assert os.listdir(folder) == ["triptych.lock"]


def child(folder: Path, mode: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.unit.kvpool.disk.disk_process", str(folder), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_disk_that_takes_no_more_is_a_clear_error_and_the_tier_goes_on(folder: Path) -> None:
    """A process whose files may not grow beyond 1 MiB, stores 5 MiB in between."""
    with child(folder, "starve") as process:
        said, _ = process.communicate(timeout=60)
    ready, first, refused, second, failed = said.splitlines()
    assert (ready, first, second, failed) == ("ready", "stored 0", "stored 2", "failed 1")
    assert refused.startswith("refused 1: the disk tier needs 5,")
    for part in (str(folder), os.strerror(errno.EFBIG), "pool.disk_bytes"):
        assert part in refused
    with DiskStore(folder, 1 << 30, PAGE_BYTES) as tier:
        assert tier.keys() == [meta_of(0).key, meta_of(2).key]
        require_back(tier, meta_of(0, 100))
        require_back(tier, meta_of(2, 200))


# ------------------------------------------------------------------ other processes


@pytest.mark.parametrize("seed", range(8))
def test_a_process_that_is_killed_leaves_whole_objects(folder: Path, seed: int) -> None:
    """It is killed while it writes; after a random number of words, then at once."""
    words, stored = random.Random(seed).randint(2, 70), 0
    with child(folder, "store") as process:
        assert process.stdout is not None
        for _ in range(words):
            stored += process.stdout.readline().startswith("stored")
        process.kill()
        stored += process.stdout.read().count("stored")
    with DiskStore(folder, 1 << 30, PAGE_BYTES) as tier:
        assert tier.stat().damaged == 0
        assert set(tier.keys()) >= set(keys(*range(stored)))
        assert len(tier.keys()) <= stored + 1
        assert {path.suffix for path in folder.iterdir()} <= {".kv", ".lock"}
        for number in range(stored + 1):
            if meta_of(number).key in tier.keys():  # noqa: SIM118 - a tier is no dictionary
                require_back(tier, meta_of(number, 20480))


def test_a_directory_belongs_to_one_tier_at_a_time(folder: Path) -> None:
    with (
        DiskStore(folder, ROOM, PAGE_BYTES),
        pytest.raises(PoolError, match="another pool"),
    ):
        DiskStore(folder, ROOM, PAGE_BYTES)
    DiskStore(folder, ROOM, PAGE_BYTES).close()


def test_a_restart_finds_everything_in_its_order_of_use(folder: Path) -> None:
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        store(tier, 1, 2, 3, 4)
        require_back(tier, meta_of(2))
        tier.drop(meta_of(3).key)
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        assert tier.keys() == keys(1, 4, 2)
        assert tier.stat().nbytes == 3 * SIZE
        for number in (1, 4, 2):
            assert tier.describe(meta_of(number).key) == meta_of(number)
            require_back(tier, meta_of(number))
    with DiskStore(folder, 2 * SIZE, PAGE_BYTES) as smaller:
        assert smaller.keys() == keys(4, 2)
        assert len(objects_in(folder)) == 2


def test_a_scan_reads_no_pages(folder: Path) -> None:
    """Damage in the pages is found by the load, where it is a miss."""
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        store(tier, 1, 2)
        flip(file_of(tier, 1), SIZE - 1)
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        assert sorted(tier.keys()) == sorted(keys(1, 2))
        assert tier.load(meta_of(1).key, [poisoned(5)]) is None
        assert tier.keys() == keys(2)
        assert objects_in(folder) == [file_of(tier, 2)]
        assert (tier.stat().damaged, tier.stat().missed, tier.stat().nbytes) == (1, 1, SIZE)


# ------------------------------------------------------------------ damage


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flip", "cut", "grow", "empty", "swap", "remove", "page size"])
def test_a_damaged_object_is_counted_and_removed(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        store(tier, 1, 2)
        damage(tier, how)
        with caplog.at_level(logging.WARNING):
            assert tier.load(meta_of(1).key, [poisoned(5)]) is None
        assert "is removed" in caplog.text
        assert not file_of(tier, 1).exists()
        assert tier.keys() == keys(2)
        assert tier.stat().damaged == 1
        store(tier, 1)
        require_back(tier, meta_of(1))
        damage(tier, how)
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        assert tier.keys() == keys(2)
        assert tier.stat().damaged == (how != "remove")
        require_back(tier, meta_of(2))


def damage(tier: DiskStore, how: str) -> None:
    path = file_of(tier, 1)
    if how == "flip":
        flip(path, 100)
    elif how == "cut":
        os.truncate(path, SIZE - 1)
    elif how == "grow":
        os.truncate(path, SIZE + 1)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "swap":
        path.write_bytes(file_of(tier, 2).read_bytes())
    elif how == "remove":
        path.unlink()
    else:
        other = path.parent.with_name("other")
        meta = changed(meta_of(1, page_bytes=512))
        with DiskStore(other, ROOM, 512) as stranger:
            stranger.store(meta, [pages_of(meta)])
            (source,) = objects_in(other)
            path.write_bytes(source.read_bytes())
            stranger.drop(meta.key)


def test_links_pipes_and_folders_under_an_objects_name_are_no_objects(
    folder: Path, tmp_path: Path
) -> None:
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        store(tier, 1, 2, 3, 4)
        outside = tmp_path / "outside.kv"
        file_of(tier, 1).rename(outside)
        file_of(tier, 1).symlink_to(outside)
        for number in (2, 3):
            file_of(tier, number).unlink()
        os.mkfifo(file_of(tier, 2))
        file_of(tier, 3).mkdir()
        before = outside.read_bytes()
        assert tier.load(meta_of(1).key, [poisoned(5)]) is None
        assert not file_of(tier, 1).is_symlink()
        file_of(tier, 1).symlink_to(outside)
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        assert tier.keys() == keys(4)
        assert outside.read_bytes() == before
        assert file_of(tier, 3).is_dir()
        assert not file_of(tier, 2).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_no_object(tier: DiskStore) -> None:
    store(tier, 1)
    os.chown(file_of(tier, 1), 12345, 12345)
    assert tier.load(meta_of(1).key, [poisoned(5)]) is None
    assert not file_of(tier, 1).exists()


def test_foreign_files_are_left_alone(folder: Path) -> None:
    names = ["notes.txt", "a.kv", "x.partial", f"{'A' * 64}.kv", f"{'0' * 64}.kv.bak", ".hidden"]
    folder.mkdir(mode=0o700)
    for name in names:
        (folder / name).write_bytes(b"mine")
    (folder / f"{'0' * 64}.{'1' * 16}.partial").write_bytes(b"torn")
    (folder / f"{'0' * 64}.kv").write_bytes(b"torn")
    with DiskStore(folder, ROOM, PAGE_BYTES) as tier:
        assert tier.keys() == []
        assert tier.stat().damaged == 1
        assert sorted(os.listdir(folder)) == sorted([*names, "triptych.lock"])


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_directory_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PoolError, match="changed by others"):
        DiskStore(folder, ROOM, PAGE_BYTES)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PoolError, match="cannot use"):
            DiskStore(path, ROOM, PAGE_BYTES)


def test_a_lock_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "triptych.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoolError, match="cannot lock"):
        DiskStore(folder, ROOM, PAGE_BYTES)
    assert not (tmp_path / "elsewhere").exists()


def test_a_process_without_descriptors_keeps_its_objects(
    tier: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, 1)

    def no_more(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_more)
        with pytest.raises(PoolError, match="cannot be read"):
            tier.load(meta_of(1).key, [poisoned(5)])
    require_back(tier, meta_of(1))


def test_a_closed_tier_lets_go_and_opens_nothing(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tier = DiskStore(folder, ROOM, PAGE_BYTES)
    store(tier, 1)
    tier.close()
    tier.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(PoolError):
        tier.store(meta_of(2), [pages_of(meta_of(2))])
    assert file_of(tier, 1).exists()
