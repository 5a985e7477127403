"""Datasets of `write_objects`: ordinary objects, which a manifest beside them lists."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import Listing, sync
from aioflux.data import IterableDataset, MapDataset, jsonl
from aioflux.errors import ChecksumError, NotFoundError
from aioflux.testing import GCSServer
from tests.data.written import COPIES, MANIFEST, data_key, run_aioflux, write_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUT = "gs://bucket/out"


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket", "other")) as server:
        yield server


@pytest.fixture
def out(server: GCSServer) -> Iterator[sync.Store]:
    with sync.open_store(OUT, endpoint_url=server.url) as store:
        yield store


@pytest.fixture(params=["gs://other/copy", "file"], ids=["gs", "file"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Uri of a copy."""
    return f"file://{tmp_path}/copy" if request.param == "file" else request.param


def rows_of(server: GCSServer, uri: str) -> list[dict[str, Any]]:
    options: Any = {"endpoint_url": server.url} if uri.startswith("gs:") else {}
    return list(IterableDataset.from_manifest(f"{uri}/{MANIFEST}", records=jsonl(), **options))


def open_target(server: GCSServer, uri: str) -> sync.Store:
    options: Any = {"endpoint_url": server.url} if uri.startswith("gs:") else {}
    return sync.open_store(uri, **options)


@pytest.mark.parametrize("tool", COPIES)
def test_a_copy_is_a_dataset_of_its_own(
    server: GCSServer, out: sync.Store, target: str, tool: str
) -> None:
    rows = write_dataset(out)
    out.put(data_key(1, 0, attempt=7), b'{"n": "of a failed attempt"}\n')
    out.put("foreign.txt", b"of another program")
    COPIES[tool](server, OUT, target)
    out.delete_many([meta.key for meta in out.list()])
    with open_target(server, target) as copy:
        assert len(copy.list_all()) == len(rows) + 3
    assert rows_of(server, target) == rows


@pytest.mark.parametrize("tool", COPIES)
def test_flipped_bytes_of_the_same_size_are_an_error(
    server: GCSServer, out: sync.Store, target: str, tool: str
) -> None:
    write_dataset(out)
    COPIES[tool](server, OUT, target)
    with open_target(server, target) as copy:
        copy.put(data_key(1, 2), b'{"n": 3}\n')
    with pytest.raises(ChecksumError, match=data_key(1, 2)):
        rows_of(server, target)


def test_a_copy_of_another_size_is_an_error(
    server: GCSServer, out: sync.Store, target: str
) -> None:
    write_dataset(out)
    COPIES["aioflux"](server, OUT, target)
    with open_target(server, target) as copy:
        copy.put(data_key(1, 2), b'{"n": 30}\n')
    with pytest.raises(NotFoundError, match="9 bytes in its metadata, but 10 in the response"):
        rows_of(server, target)


def test_a_service_with_checksums_needs_no_read_of_the_whole_object(
    server: GCSServer, out: sync.Store
) -> None:
    write_dataset(out)
    COPIES["aioflux"](server, OUT, "gs://other/copy")
    with sync.open_store("gs://other/copy", endpoint_url=server.url) as copy:
        uri = f"gs://other/copy/{MANIFEST}"
        meta = Listing.from_bytes(copy.get(MANIFEST), uri=uri)[2]
        assert copy.get_range(meta, start=1, end=4) == b'"n"'
        copy.put(meta.key, b'{"n": 3}\n')
        with pytest.raises(ChecksumError, match="replaced, or damaged by a copy"):
            copy.get_range(meta, start=1, end=4)


def test_a_copy_is_cached(server: GCSServer, out: sync.Store, tmp_path: Path) -> None:
    rows = write_dataset(out)
    COPIES["aioflux"](server, OUT, "gs://other/copy")
    dataset = IterableDataset.from_manifest(
        f"gs://other/copy/{MANIFEST}", records=jsonl(), cache=tmp_path, endpoint_url=server.url
    )
    assert list(dataset) == list(dataset) == rows
    assert dataset.stats.num_cache_hits == len(rows)


def test_in_its_own_place_a_generation_counts(server: GCSServer, out: sync.Store) -> None:
    rows = write_dataset(out)
    assert rows_of(server, OUT) == rows
    out.put(data_key(1, 2), b'{"n": 2}\n')
    with pytest.raises(NotFoundError, match=data_key(1, 2)):
        rows_of(server, OUT)


def test_a_copy_of_a_saved_listing_lists_the_same_objects(
    server: GCSServer, out: sync.Store
) -> None:
    out.put("a", b"1")
    out.save_manifest("list")
    COPIES["aioflux"](server, OUT, "gs://other/copy")
    dataset = MapDataset.from_manifest("gs://other/copy/list", endpoint_url=server.url)
    assert [sample.uri for sample in dataset] == [f"{OUT}/a"]


@pytest.mark.parametrize("kind", [MapDataset, IterableDataset])
def test_a_manifest_is_no_sample(
    server: GCSServer, out: sync.Store, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    write_dataset(out)
    out.put(f"more/{MANIFEST}-2", b"")
    with caplog.at_level(logging.WARNING, "aioflux"):
        dataset = kind(OUT, endpoint_url=server.url)
        samples = list(dataset)
    assert [sample.key for sample in samples] == [data_key(1, number) for number in range(4)]
    [message] = caplog.messages
    assert message.startswith(
        f"{OUT}/{MANIFEST} is the manifest of a dataset, and left out; from_m"
    )


def test_a_listing_of_a_prefix_is_saved_without_its_manifest(out: sync.Store) -> None:
    write_dataset(out)
    out.save_manifest("saved")
    assert [meta.key for meta in Listing.from_bytes(out.get("saved"))] == [
        data_key(1, number) for number in range(4)
    ]


def test_rm_leaves_nothing(server: GCSServer, out: sync.Store) -> None:
    write_dataset(out)
    server.put("bucket", "out/.aioflux-uploads/1", b"of a killed writer")
    server.put("bucket", "foreign", b"")
    run_aioflux(server, "rm", "-r", OUT)
    assert server.keys("bucket") == ["foreign"]


def test_ls_shows_everything_and_names_from_manifest_once(
    server: GCSServer, out: sync.Store, capfd: pytest.CaptureFixture[str]
) -> None:
    write_dataset(out, num_objects=2)
    out.put(f"more/{MANIFEST}", b"")
    server.put("bucket", "out/.aioflux-uploads/1", b"of a writer")
    keys = [MANIFEST, data_key(1, 0), data_key(1, 1), f"more/{MANIFEST}"]
    run_aioflux(server, "ls", "-r", OUT)
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [f"{OUT}/{key}" for key in keys]
    assert shown.err == (
        f"{OUT}/{MANIFEST} is the manifest of a dataset: from_manifest of aioflux.data reads the "
        "objects that it lists\n"
    )
    run_aioflux(server, "ls", "-r", "--all", OUT)
    every = [".aioflux-uploads/1", *keys]
    assert capfd.readouterr().out.splitlines() == [f"{OUT}/{key}" for key in every]
    run_aioflux(server, "ls", "--all", OUT)
    assert f"{OUT}/.aioflux-uploads/" in capfd.readouterr().out.splitlines()
