"""Blobs in memory and in files: one contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server._blobs import Blobs, MemoryBlobs, group_leaves

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [0, 1, 100_000, 300_000, 3_000_000]


@pytest.fixture(params=["memory", "files"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param == "memory" else file_store(tmp_path)


def file_store(root: Path) -> Blobs:
    """Return the blobs of a server that keeps them in files."""
    return GCSServer(root=root).state.blobs


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("size", SIZES)
def test_a_view_is_a_slice(blobs, size):
    """view and views give the bytes of any range."""
    data = content(size)
    blob = blobs.put([data[: size // 3], data[size // 3 :]])
    assert blob.size == size
    for start, end in [(0, size), (0, size // 2), (size // 3, size), (size // 2, size // 2)]:
        assert bytes(blob.view(start, end)) == data[start:end]
        assert b"".join(blob.views(start, end)) == data[start:end]


def test_a_view_outlives_its_blob(blobs):
    """Bytes on their way to a client stay whole when their object goes."""
    views = [(blob := blobs.put([content(size)])).view(0, size) for size in SIZES if size]
    blob.discard()
    assert bytes(views[-1]) == content(SIZES[-1])


@pytest.fixture(scope="module")
def file_blobs(tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return file_store(tmp_path_factory.mktemp("blobs"))


@settings(max_examples=40)
@given(st.lists(st.sampled_from(SIZES[:4]), max_size=6), st.data())
def test_concat_joins_and_leaves_its_sources_alone(
    file_blobs: Blobs, sizes: list[int], data: st.DataObject
) -> None:
    """Any range of a joined blob is that of the bytes joined, whatever becomes of the sources."""
    whole = b"".join(map(content, sizes)) * 2
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    for blobs in (MemoryBlobs(), file_blobs):
        sources = [blobs.put([content(size)]) for size in sizes]
        joined = blobs.concat(sources)
        twice = blobs.concat([joined, joined])
        for blob in [*sources, joined]:
            blob.discard()
        assert twice.size == len(whole)
        assert bytes(twice.view(start, end)) == whole[start:end]
        assert b"".join(twice.views(start, end)) == whole[start:end]
        twice.discard()


class Leaf:
    def __init__(self, size: int) -> None:
        self.size = size


@settings(max_examples=50)
@given(st.lists(st.integers(1, 600_000)))
def test_groups_keep_order_and_are_few(sizes: list[int]) -> None:
    """Small neighbours share a group of at most 256 KiB; no two groups in a row could be one."""
    groups = group_leaves([Leaf(size) for size in sizes])
    assert [leaf.size for leaves in groups for leaf in leaves] == sizes
    totals = [sum(leaf.size for leaf in leaves) for leaves in groups]
    assert all(
        total <= 256 * 1024 or len(leaves) == 1
        for total, leaves in zip(totals, groups, strict=True)
    )
    firsts = [leaves[0].size for leaves in groups[1:]]
    assert all(total + first > 256 * 1024 for total, first in zip(totals[:-1], firsts, strict=True))


def test_a_failed_write_leaves_no_file(tmp_path):
    """A file whose body breaks off is deleted."""
    blobs = file_store(tmp_path)
    with pytest.raises(TypeError):
        blobs.put([b"data", None])
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []
