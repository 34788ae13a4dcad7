"""An object's file: what was written is read back, and nothing else is taken for it."""

import os
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.kvpool.disk.disk_objects import (
    PAGE_BYTES,
    changed,
    meta_of,
    pages_of,
    poisoned,
)
from triptych.kvpool.disk import block_file
from triptych.kvpool.disk.block_file import (
    Damaged,
    ObjectMeta,
    Rows,
    object_bytes,
    page_runs,
    read_header,
    read_pages,
    write_object,
)

PAGES = 5


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "object", os.O_CREAT | os.O_RDWR, 0o600)
    yield number
    os.close(number)


def fill(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def content_of(meta: ObjectMeta, descriptor: int) -> bytes:
    os.ftruncate(descriptor, 0)
    write_object(descriptor, meta, [pages_of(meta)])
    return os.pread(descriptor, object_bytes(meta) + 1, 0)


def read(descriptor: int, page_bytes: int = PAGE_BYTES, pages: int = PAGES) -> np.ndarray:
    header, into = read_header(descriptor, page_bytes), poisoned(pages, page_bytes)
    read_pages(descriptor, header, [into])
    return into


def cut_up(rows: np.ndarray, sizes: list[int]) -> list[Rows]:
    """The rows in buffers of these sizes and one with the rest; every other as bare bytes."""
    ends = [min(end, len(rows)) for end in np.cumsum([0, *sizes, len(rows)]).tolist()]
    views = [rows[a:b] for a, b in pairwise(ends)]
    return [v if i % 2 else v.reshape(-1).data for i, v in enumerate(views)]


sizes = st.lists(st.integers(0, 700), max_size=12)


@given(
    pages=st.integers(1, 5000), page_bytes=st.sampled_from([1, 256, 3584]), out=sizes, back=sizes
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_come_back_whatever_buffers_they_pass_through(
    descriptor: int, pages: int, page_bytes: int, out: list[int], back: list[int]
) -> None:
    meta = meta_of(pages, pages, page_bytes)
    source, target = pages_of(meta), poisoned(pages, page_bytes)
    os.ftruncate(descriptor, 0)
    write_object(descriptor, meta, iter(cut_up(source, out)))
    assert os.fstat(descriptor).st_size == object_bytes(meta)
    header = read_header(descriptor, page_bytes)
    assert header.meta == meta
    reads = read_pages(descriptor, header, cut_up(target, back))
    assert np.array_equal(target, source)
    assert reads <= 1 + meta.parts


def test_consecutive_pages_are_read_in_few_large_reads(descriptor: int) -> None:
    meta = meta_of(1, 9000, 3584)
    write_object(descriptor, meta, [pages_of(meta)])
    into = poisoned(9000, 3584)
    assert read_pages(descriptor, read_header(descriptor, 3584), [into]) == 4
    assert np.array_equal(into, pages_of(meta))


def test_pages_all_over_an_arena_are_read_in_as_few_reads_as_the_kernel_lets(
    descriptor: int,
) -> None:
    meta, arena = meta_of(1, 3000, 3584), poisoned(6000, 3584)
    write_object(descriptor, meta, [pages_of(meta)])
    runs = page_runs(arena, np.arange(0, 6000, 2, dtype=np.int32))
    assert len(runs) == 3000
    assert read_pages(descriptor, read_header(descriptor, 3584), runs) == 4
    assert np.array_equal(arena[::2], pages_of(meta))
    assert (arena[1::2] == 0xA5).all()


def test_reads_and_writes_that_stop_short_go_on(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may do less than it was asked to."""

    def stingy(call: Any) -> Any:
        def some(descriptor: int, views: list[memoryview], at: int) -> int:
            return call(descriptor, [views[0][: max(1, views[0].nbytes // 3)]], at)

        return some

    monkeypatch.setattr(os, "pwritev", stingy(os.pwritev))
    monkeypatch.setattr(os, "preadv", stingy(os.preadv))
    meta = meta_of(1, 40)
    write_object(descriptor, meta, cut_up(pages_of(meta), [3, 7]))
    assert np.array_equal(read(descriptor, pages=40), pages_of(meta))


@given(st.lists(st.integers(0, 19), max_size=30))
def test_runs_of_pages_are_the_pages_in_their_order(ids: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, (20, 16), np.uint8)
    runs = page_runs(data, np.array(ids, np.int32))
    assert b"".join(runs) == data[ids].tobytes()
    assert len(runs) == sum(1 for a, b in zip([-2, *ids], ids, strict=False) if b != a + 1)


@pytest.mark.parametrize("ids", [[-1], [20], [3, 2**31 - 1]])
def test_runs_of_pages_that_are_not_there_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        page_runs(poisoned(20), np.array(ids, np.int32))


# ------------------------------------------------------------------ damage


def test_every_byte_matters(descriptor: int) -> None:
    """Each byte of the file is flipped once, one bit of it, another one from byte to byte."""
    whole = content_of(meta_of(1), descriptor)
    for at in range(len(whole)):
        flipped = bytes([whole[at] ^ 1 << at % 8])
        os.pwrite(descriptor, flipped, at)
        with pytest.raises(Damaged):
            read(descriptor)
        os.pwrite(descriptor, whole[at : at + 1], at)
    assert np.array_equal(read(descriptor), pages_of(meta_of(1)))


def test_every_truncation_is_noticed(descriptor: int) -> None:
    whole = content_of(meta_of(1), descriptor)
    for size in reversed(range(len(whole))):
        os.ftruncate(descriptor, size)
        with pytest.raises(Damaged):
            read_header(descriptor, PAGE_BYTES)


@given(st.data())
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_noticed(descriptor: int, data: st.DataObject) -> None:
    """Bytes overwritten, cut out, put in, moved, or zeroed as by a torn write."""
    whole = content_of(meta_of(2, 20), descriptor)
    at = data.draw(st.one_of(st.integers(0, 400), st.integers(0, len(whole))))
    size = data.draw(st.integers(0, 3000))
    other = data.draw(st.sampled_from([b"", bytes(size), whole[:size], os.urandom(size)]))
    gone = data.draw(st.sampled_from([0, size, len(other)]))
    damaged = whole[:at] + other + whole[at + gone :]
    fill(descriptor, damaged)
    if damaged == whole:
        assert np.array_equal(read(descriptor, pages=20), pages_of(meta_of(2, 20)))
    else:
        with pytest.raises(Damaged):
            read(descriptor, pages=20)


@given(st.binary(max_size=6000))
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_no_object_is_never_read_as_one(descriptor: int, content: bytes) -> None:
    fill(descriptor, content)
    with pytest.raises(Damaged):
        read_header(descriptor, PAGE_BYTES)


# ------------------------------------------------------------------ headers with a right checksum


def packed(body: object) -> bytes:
    return cast("bytes", msgpack.packb(body))  # pyright: ignore[reportUnknownMemberType]


def forged(body: object, **fixed: int) -> bytes:
    """A file whose checksums are right and whose content is not."""
    meta, pages = packed(body), bytes(PAGES * PAGE_BYTES)
    said = {"version": 1, "header": 4096, "meta": len(meta), "file": 4096 + len(pages)} | fixed
    head = struct.pack("<8sI", b"TRIPTYDO", said["version"])
    tail = struct.pack("<IIQ", said["header"], said["meta"], said["file"]) + meta
    tail = (tail + struct.pack("<I", zlib.crc32(pages))).ljust(4096 - 16, b"\0")[: 4096 - 16]
    crc = zlib.crc32(tail, zlib.crc32(bytes(4), zlib.crc32(head)))
    return head + struct.pack("<I", crc) + tail + pages


def body_of(**fields: object) -> dict[str, object]:
    meta = meta_of(1)
    names = list(ObjectMeta.__dataclass_fields__)
    return {name: getattr(meta, name) for name in names} | fields


def test_the_forgery_itself_is_sound(descriptor: int) -> None:
    fill(descriptor, forged(body_of()))
    assert not read(descriptor).any()


@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"short"},
        {"key": "text" * 8},
        {"parent": bytes(33)},
        {"namespace": None},
        {"tokens": b"abc"},
        {"tenant": b"me"},
        {"pages": -1},
        {"pages": 5.0},
        {"pages": 0},
        {"pages": 2**63},
        {"pages": 6},
        {"page_bytes": 0},
        {"page_bytes": 128},
        {"page_bytes": 2**63},
        {"seconds": "0"},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"surprise": 1},
        {"seconds": msgpack.ExtType(5, b"code")},
        {"seconds": {"__class__": "os.system"}},
    ],
    ids=repr,
)
def test_every_field_is_checked(descriptor: int, fields: dict[str, object]) -> None:
    fill(descriptor, forged(body_of(**fields)))
    with pytest.raises(Damaged):
        read_header(descriptor, PAGE_BYTES)


BODIES: list[object] = [None, 1, [], {}, {1: 2}, "text", [[[1]]], {"key": bytes(32)}]


@pytest.mark.parametrize("body", BODIES, ids=repr)
def test_metadata_of_another_shape_is_damage(descriptor: int, body: object) -> None:
    fill(descriptor, forged(body))
    with pytest.raises(Damaged):
        read_header(descriptor, PAGE_BYTES)


@pytest.mark.parametrize(
    "fixed",
    [
        {"version": 2},
        {"header": 0},
        {"header": 8192},
        {"header": 2**32 - 4096},
        {"meta": 0},
        {"meta": 2**32 - 1},
        {"meta": 4000},
        {"file": 0},
        {"file": 2**63},
    ],
    ids=repr,
)
def test_every_size_is_checked(descriptor: int, fixed: dict[str, int]) -> None:
    fill(descriptor, forged(body_of(), **fixed))
    with pytest.raises(Damaged):
        read_header(descriptor, PAGE_BYTES)


@pytest.mark.parametrize("left", range(4))
def test_checksums_that_do_not_fit_into_the_header_are_damage(descriptor: int, left: int) -> None:
    """The metadata leave fewer than the four bytes of a checksum."""
    sizes = {len(packed(body_of(tenant="x" * n))): n for n in range(3000, 4096)}
    name = "x" * sizes[4096 - 32 - left]
    fill(descriptor, forged(body_of(tenant=name)))
    with pytest.raises(Damaged, match="not as large"):
        read_header(descriptor, PAGE_BYTES)


def test_a_header_of_any_size_is_not_read_into_memory(descriptor: int) -> None:
    """The file is as large as it says, and sparse; the header would be 1 GiB."""
    size = 1 << 30
    fill(descriptor, forged(body_of(), header=size, file=size + PAGES * PAGE_BYTES))
    os.ftruncate(descriptor, size + PAGES * PAGE_BYTES)
    with pytest.raises(Damaged, match="of them header"):
        read_header(descriptor, PAGE_BYTES)


# ------------------------------------------------------------------ callers' mistakes


@pytest.mark.parametrize("count", [0, 1, 4, 6, 10])
def test_other_numbers_of_pages_than_announced_are_refused(descriptor: int, count: int) -> None:
    with pytest.raises(ValueError, match="pages to store than the 5"):
        write_object(descriptor, meta_of(1), [poisoned(1)] * count)


@pytest.mark.parametrize(
    "into",
    [
        [],
        [poisoned(4)],
        [poisoned(6)],
        [poisoned(5, 128)],
        [poisoned(10)[::2]],
        [poisoned(5).astype(np.int8)],
        [bytes(5 * PAGE_BYTES)],
        [memoryview(bytes(5 * PAGE_BYTES))],
    ],
    ids=range(8),
)
def test_buffers_that_do_not_fit_are_refused(descriptor: int, into: list[Any]) -> None:
    content_of(meta_of(1), descriptor)
    into = [memoryview(item) if isinstance(item, bytes) else item for item in into]
    with pytest.raises(ValueError, match=r"room for|expected contiguous"):
        read_pages(descriptor, read_header(descriptor, PAGE_BYTES), into)


def test_a_header_that_could_not_be_read_is_not_written() -> None:
    tokens = bytes(block_file.MAX_HEADER_BYTES)
    with pytest.raises(ValueError, match="header of"):
        object_bytes(changed(meta_of(1), tokens=tokens))
