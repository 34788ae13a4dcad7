"""Shared memory: whole or not at all, private to the user, and gone when its owner is."""

import ctypes
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from triptych.core.errors import PoolError, StaleHandle
from triptych.kvpool.pool.arena import Arena, remove_orphans, shared_memory_dir

SHAPE = (8, 256)
libc = ctypes.CDLL(None)
libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

OWNER = """
import sys
from pathlib import Path
from triptych.kvpool.pool.arena import Arena
arena = Arena.create(8, 256, Path(sys.argv[1]))
print(arena.id, flush=True)
sys.stdin.read()
"""


def test_two_mappings_show_the_same_bytes(tmp_path: Path) -> None:
    mine = Arena.create(*SHAPE, tmp_path)
    theirs = Arena.open(mine.id, SHAPE, tmp_path)
    mine.data[3] = np.arange(256)
    assert np.array_equal(theirs.data[3], np.arange(256))
    assert theirs.data.shape == SHAPE
    assert not theirs.data[4].any()
    for arena in (theirs, mine):
        arena.close()


def test_the_whole_file_is_reserved_for_this_user_alone(tmp_path: Path) -> None:
    arena = Arena.create(4096, 256, tmp_path)
    status = (tmp_path / arena.id).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= 4096 * 256
    assert str(os.getuid()) in arena.id
    arena.close()


def test_more_than_the_device_holds_is_a_clear_error_and_leaves_nothing() -> None:
    directory = shared_memory_dir()
    space = os.statvfs(directory)
    pages = space.f_blocks * space.f_frsize // 4096 + 1
    before = set(directory.iterdir())
    with pytest.raises(PoolError, match=r"lower pool\.kv_cache_memory_bytes") as raised:
        Arena.create(pages, 4096, directory)
    assert f"{pages * 4096 + 4096:,}" in str(raised.value)
    assert not {p for p in set(directory.iterdir()) - before if p.name.startswith("triptych-")}


def test_a_device_that_fills_up_meanwhile_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PoolError, match=r"pool\.kv_cache_memory_bytes.*No space left"):
        Arena.create(*SHAPE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_owners_arena_is_removed_and_a_living_owners_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        name = owner.stdout.readline().strip()
        watching = Arena.open(name, SHAPE, tmp_path)
        assert remove_orphans(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert remove_orphans(tmp_path) == [name]
    watching.data[0] = 1  # whoever has it mapped keeps the memory
    with pytest.raises(StaleHandle, match="gone"):
        Arena.open(name, SHAPE, tmp_path)
    watching.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    name = f"triptych-{os.getuid()}-0123456789abcdef"
    (tmp_path / f"{name}.txt").touch()
    (tmp_path / "triptych-99999-0123456789abcdef").touch()
    (tmp_path / "victim").touch()
    (tmp_path / name).symlink_to(tmp_path / "victim")
    assert remove_orphans(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("name", ["", "..", "../etc/passwd", "triptych-0-0123456789ABCDEF", "a/b"])
def test_only_names_of_arenas_are_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(PoolError, match="not the name of an arena"):
        Arena.open(name, SHAPE, tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not an arena"),
        (b"x" * 6144, "is not an arena"),
        (b"TRIPTYCH\x09" + b"\0" * 6135, "has version 9"),
        (b"TRIPTYCH\x01" + b"\0" * 6135, "has 0 pages"),
    ],
)
def test_a_file_that_is_no_arena_is_not_mapped(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    name = f"triptych-{os.getuid()}-0123456789abcdef"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PoolError, match=complaint):
        Arena.open(name, SHAPE, tmp_path)


def test_a_shorter_file_than_its_header_says_is_not_mapped(tmp_path: Path) -> None:
    arena = Arena.create(*SHAPE, tmp_path)
    os.truncate(tmp_path / arena.id, 5000)
    with pytest.raises(PoolError, match="in 5000 bytes"):
        Arena.open(arena.id, SHAPE, tmp_path)
    arena.close()


def test_closing_under_an_array_leaves_the_array_readable(tmp_path: Path) -> None:
    arena = Arena.create(*SHAPE, tmp_path)
    row = arena.data[2]
    row[:] = 5
    arena.close()
    arena.unlink()
    assert row.sum() == 5 * 256
    with pytest.raises(PoolError, match="closed"):
        _ = arena.data
    assert list(tmp_path.iterdir()) == []


def test_pages_that_are_needed_come_from_the_disk_together(tmp_path: Path) -> None:
    pages = 4 * mmap.PAGESIZE // 256
    arena = Arena.create(64 * pages, 256, tmp_path)
    path = tmp_path / arena.id
    arena.data[:] = np.arange(64 * pages, dtype=np.uint8)[:, None]
    forget(path)
    if resident(path).any():
        pytest.skip(f"{tmp_path} is in memory")
    wanted = np.array([40 * pages, 3 * pages, 3 * pages + 1, 40 * pages - 1], np.int32)
    arena.will_need(wanted)
    arena.will_need(wanted[:0])
    expected = {1 + int(page) * 256 // mmap.PAGESIZE for page in wanted}
    until = time.monotonic() + 10
    while not expected <= (read := {*np.flatnonzero(resident(path)).tolist()}):
        assert time.monotonic() < until
    assert read == expected
    assert np.array_equal(arena.data[wanted, 0], wanted.astype(np.uint8))
    arena.unlink()
    arena.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_arena_in_memory_has_no_disk_to_ask(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()
    monkeypatch.setattr("triptych.kvpool.pool.arena._madvise", lambda *given: asked.append(given))
    arena = Arena.create(*SHAPE) if is_shared else Arena.private(*SHAPE)
    arena.will_need(np.array([2], np.int32))
    assert not arena.is_on_disk
    assert not asked
    arena.unlink()
    arena.close()


def test_a_directory_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PoolError, match=rf"no arena can be made in {tmp_path}/file: "):
        Arena.create(*SHAPE, tmp_path / "file")


def forget(path: Path) -> None:
    """Have a file written and out of memory; what a process has mapped would stay there."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        mapping = mmap.mmap(file.fileno(), 0)
        for address in mapped_at(path):
            libc.madvise(address, len(mapping), mmap.MADV_DONTNEED)
        mapping.close()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mapped_at(path: Path) -> list[int]:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [int(line.split("-")[0], 16) for line in lines if line.endswith(str(path))]


def resident(path: Path) -> NDArray[np.bool_]:
    """Which pages of the machine, of a file, are in memory."""
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as mapping:
        found = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
        shown = np.frombuffer(mapping, np.uint8)
        address, size = ctypes.c_void_p(shown.ctypes.data), ctypes.c_size_t(len(mapping))
        failed = libc.mincore(address, size, ctypes.c_void_p(found.ctypes.data))
        del shown
    assert failed == 0
    return (found & 1).astype(np.bool_)
