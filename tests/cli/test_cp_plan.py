"""Jobs, batches and names of a copy."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._local_files import is_temporary
from aioflux._values.meta import ObjectMeta
from aioflux.cli._cp.plan import (
    LARGE_BYTES,
    Batcher,
    CopyJob,
    Entry,
    NameClashes,
    base_name,
    differs,
    local_problem,
    object_entry,
)

SEGMENTS = st.sampled_from(["", ".", "..", "a", "b", "a-", "é", ".aioflux-x", "a\0"])
KEYS = st.lists(SEGMENTS, min_size=1, max_size=5).map("/".join)


@given(KEYS)
def test_a_key_that_passes_stays_below_the_directory(key: str) -> None:
    if local_problem(key):
        return
    path = os.path.normpath(f"/target/{key}")
    assert path.startswith("/target/")
    assert path.rstrip("/") == f"/target/{key}".rstrip("/"), "two keys must not be one path"


@pytest.mark.parametrize(
    "key", ["../a", "a/../b", "a/..", "/etc/passwd", "a//b", "./a", "a/.", ".aioflux-1", "", "a\0"]
)
def test_a_key_that_is_no_path_below_the_directory_is_rejected(key: str) -> None:
    assert local_problem(key)


def test_only_names_of_unfinished_writes_are_temporary() -> None:
    name = f".aioflux-{'0a' * 16}"
    assert all(
        map(is_temporary, [name, name.replace("-", "-lock-"), name.replace("-", "-partial-")])
    )
    assert not any(map(is_temporary, [".aioflux-mine", f"{name}0", f"x{name}", f"{name}\n", ""]))


@pytest.mark.parametrize("key", ["a", "a/b", "a/", "..a", "a..", ".hidden", "é/ü", "a b", "a\\b"])
def test_other_keys_are_paths(key: str) -> None:
    assert not local_problem(key)


@given(st.sets(st.text(alphabet="ab-/", min_size=1, max_size=6)))
def test_a_key_clashes_where_an_earlier_one_is_its_directory(keys: set[str]) -> None:
    ordered = sorted(keys, key=lambda key: key.encode())
    clashes = NameClashes()
    for index, key in enumerate(ordered):
        before = {each for each in ordered[:index] if not each.endswith("/")}
        in_the_way = {each for each in before if key.startswith(f"{each}/")}
        found = clashes.add(key)
        assert (found in in_the_way) if found else not _unclashed(in_the_way, ordered)


def test_a_clash_returns_the_earlier_key() -> None:
    clashes = NameClashes()
    assert [clashes.add(key) for key in ("a", "a-", "a/b", "b", "b/", "c/", "c/d")] == [
        "",
        "",
        "a",
        "",
        "b",
        "",
        "",
    ]


def _unclashed(in_the_way: set[str], ordered: list[str]) -> set[str]:
    """Of the keys in the way, those that are copied: a file that itself clashed is not there."""
    files = [each for each in ordered if not each.endswith("/")]
    return {each for each in in_the_way if not any(each.startswith(f"{other}/") for other in files)}


def job(size: int) -> CopyJob:
    return CopyJob("source", "target", "path", "key", size)


@given(st.lists(st.integers(-1, 3 * LARGE_BYTES)))
def test_batches_hold_every_job_once_within_their_bounds(sizes: list[int]) -> None:
    batcher, batches = Batcher(), []
    for size in sizes:
        batches += batcher.add(job(size))
    batches.append(batcher.flush())
    assert sorted(each.size for batch in batches for each in batch) == sorted(sizes)
    for batch in batches:
        if any(each.is_large for each in batch):
            assert len(batch) == 1
        assert len(batch) <= 128
        assert len(batch) == 1 or sum(each.size for each in batch) <= 2 * LARGE_BYTES


@given(st.lists(st.integers(-1, 3 * LARGE_BYTES)))
def test_ordered_batches_keep_the_order_of_the_jobs(sizes: list[int]) -> None:
    batcher, batches = Batcher(is_ordered=True), []
    for size in sizes:
        batches += batcher.add(job(size))
    batches.append(batcher.flush())
    assert [each.size for batch in batches for each in batch] == sizes


@pytest.mark.parametrize(("is_ordered", "sizes"), [(False, [[-1]]), (True, [[1], [-1]])])
def test_a_large_job_overtakes_small_ones_unless_they_are_ordered(is_ordered, sizes) -> None:
    batcher = Batcher(is_ordered)
    assert batcher.add(job(1)) == []
    batches = batcher.add(job(-1))
    assert [[each.size for each in batch] for batch in batches] == sizes


def test_a_batch_ends_when_its_objects_are_too_many() -> None:
    batcher = Batcher()
    batches = [batch for _ in range(257) for batch in batcher.add(job(1))]
    assert list(map(len, [*batches, batcher.flush()])) == [128, 128, 1]


def test_a_batch_ends_before_its_bytes_are_too_many() -> None:
    batcher, size = Batcher(), LARGE_BYTES
    assert [batcher.add(job(size)) for _ in range(3)] == [[], [], [[job(size)] * 2]]
    assert batcher.flush() == [job(size)]


@pytest.mark.parametrize(("text", "name"), [("a/b", "b"), ("a/b/", "b"), ("b", "b"), ("/", "")])
def test_base_names(text: str, name: str) -> None:
    assert base_name(text) == name


MS, SECOND = 10**6, 10**9
UPDATED = datetime(2026, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC)
AT = object_entry(ObjectMeta(key="k", uri="gs://b/k", size=3, updated=UPDATED)).mtime_ns


def stored(**fields: Any) -> Entry:
    """Return the entry of an object."""
    values = {"key": "k", "uri": "gs://b/k", "size": 3, "updated": UPDATED} | fields
    return object_entry(ObjectMeta(**values))


@pytest.mark.parametrize(
    ("mtime", "ctime", "expected"),
    [
        (AT - 1, AT - 1, False),
        (AT, AT + SECOND, False),  # downloaded
        (AT + 1, AT + 1, True),
        (AT - SECOND, AT + 1, True),  # replaced by an older file
        (AT // SECOND * SECOND, AT + 1, True),
    ],
)
def test_an_object_is_the_same_if_it_was_written_after_the_file(mtime, ctime, expected) -> None:
    assert differs(Entry("path", 3, mtime, ctime), stored()) is expected
    assert differs(Entry("path", 4, mtime, ctime), stored())


@pytest.mark.parametrize(
    ("mtime", "expected"),
    [(AT, False), (AT // SECOND * SECOND, False), (AT + MS, True), (AT - MS, True), (0, True)],
)
def test_a_file_is_the_same_if_it_has_the_time_of_the_object(mtime, expected) -> None:
    assert differs(stored(), Entry("path", 3, mtime, AT + 9 * SECOND)) is expected


def test_a_crc32c_on_both_sides_decides() -> None:
    later = UPDATED + timedelta(hours=1)
    assert not differs(stored(crc32c=1, updated=later), stored(crc32c=1))
    assert differs(stored(crc32c=1), stored(crc32c=2, updated=later))
    assert differs(stored(crc32c=1, updated=later), stored())
    assert not differs(stored(crc32c=1), stored(updated=later))
    assert differs(stored(updated=None), stored())
