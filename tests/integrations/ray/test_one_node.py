"""Datasets and writes on one node."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data

import aioflux
from aioflux.data import IterableDataset, jsonl, parquet, tar
from aioflux.errors import (
    AlreadyExistsError,
    NotFoundError,
    RecordError,
    StorageError,
)
from aioflux.integrations.ray import read_objects, write_objects
from aioflux.testing.gcs_server import Network
from tests.data.written import COPIES, blobs_below, run_aioflux, run_rclone
from tests.integrations.ray.cluster import local_node, quiet
from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux import sync
    from aioflux.testing import GCSServer

pytestmark = pytest.mark.more
_log = logging.getLogger(__name__)
NAME = "aioflux-manifest"
MANIFEST = f"out/{NAME}"


def data_keys(bucket: sync.Store) -> list[str]:
    """Keys of all objects below `out/` but the manifest."""
    return [key for key in bucket.list_all("out/").keys if key != MANIFEST]


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    with local_node():
        yield


@pytest.fixture
def objects(bucket: sync.Store) -> dict[str, bytes]:
    """Objects below `in/`, by their keys below it."""
    data = {f"{number:03d}.bin": bytes([number]) * 1000 for number in range(60)}
    bucket.put_many((f"in/{key}", each) for key, each in data.items())
    return data


@pytest.fixture
def lines(bucket: sync.Store) -> list[dict[str, object]]:
    """Records of the objects `lines/<n>.jsonl`."""
    rows = [{"number": number, "text": f"row {number}"} for number in range(100)]
    for start in range(0, 100, 10):
        text = "".join(json.dumps(row) + "\n" for row in rows[start : start + 10])
        bucket.put(f"lines/{start:02d}.jsonl", text.encode())
    return rows


def ordered(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(rows, key=lambda row: row["number"])


# --- reading ----------------------------------


def test_each_object_is_a_row(server: GCSServer, objects: dict[str, bytes]) -> None:
    dataset = read_objects("gs://bucket/in", parallelism=4, endpoint_url=server.url)
    assert dataset.count() == 60
    rows = dataset.take_all()
    assert {row["key"]: row["bytes"] for row in rows} == objects
    assert len(rows) == 60
    assert rows[0]["uri"] == f"gs://bucket/in/{rows[0]['key']}"
    assert rows[0]["size"] == 1000
    assert rows[0]["generation"]


def test_objects_are_listed_once(server: GCSServer, objects: dict[str, bytes]) -> None:
    before = server.stats.total.requests
    dataset = read_objects("gs://bucket/in", parallelism=6, endpoint_url=server.url)
    dataset.materialize()
    assert server.stats.total.requests - before == 1 + 60


def test_without_bytes_no_object_is_read(server: GCSServer, objects: dict[str, bytes]) -> None:
    before = server.stats.total.requests
    dataset = read_objects("gs://bucket/in", endpoint_url=server.url)
    assert len(dataset.select_columns(["key", "size"]).take_all()) == 60
    assert server.stats.total.requests - before == 1


def test_a_replaced_object_is_an_error(
    server: GCSServer, bucket: sync.Store, objects: dict[str, bytes]
) -> None:
    dataset = read_objects("gs://bucket/in", parallelism=1, endpoint_url=server.url)
    bucket.put("in/007.bin", b"replaced")
    with pytest.raises(NotFoundError, match="007") as raised:
        dataset.take_all()
    assert raised.value.uri == "gs://bucket/in/007.bin"


def test_ray_does_not_retry_errors_of_its_own_list(
    server: GCSServer, bucket: sync.Store, objects: dict[str, bytes], tmp_path: Path
) -> None:
    def fail(error: Exception, uri: str) -> None:
        with (tmp_path / "calls").open("a") as calls:
            calls.write("call\n")
        raise OSError("AWS Error SLOW_DOWN")

    dataset = read_objects("gs://bucket/in", on_error=fail, endpoint_url=server.url)
    bucket.delete("in/007.bin")
    with pytest.raises(OSError, match="SLOW_DOWN"):
        dataset.take_all()
    assert (tmp_path / "calls").read_text() == "call\n"


def test_objects_that_cannot_be_read_are_skipped(
    server: GCSServer, bucket: sync.Store, objects: dict[str, bytes]
) -> None:
    dataset = read_objects("gs://bucket/in", on_error="skip", endpoint_url=server.url)
    bucket.delete("in/007.bin")
    assert {row["key"] for row in dataset.take_all()} == objects.keys() - {"007.bin"}


def test_the_first_block_comes_before_the_last_object(
    server: GCSServer, bucket: sync.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_many((f"large/{number:02d}", bytes(3_000_000)) for number in range(40))
    monkeypatch.setattr(quiet(), "target_max_block_size", 9_000_000)
    transfer = aioflux.TransferOptions(max_in_flight=1)
    dataset = read_objects(
        "gs://bucket/large", parallelism=1, transfer=transfer, endpoint_url=server.url
    )
    server.network = Network(latency_seconds=0.1)
    before = server.stats.total.requests
    rows = iter(dataset.iter_rows())
    next(rows)
    assert server.stats.total.requests - before < 40
    assert sum(1 for _ in rows) == 39


def test_torch_batches_splits_and_maps_have_each_object_once(
    server: GCSServer, objects: dict[str, bytes]
) -> None:
    dataset = read_objects("gs://bucket/in", parallelism=4, endpoint_url=server.url)
    numbers = dataset.map_batches(lambda batch: {"n": [each[0] for each in batch["bytes"]]})
    batches = numbers.iter_torch_batches(batch_size=16)
    assert sorted(n for batch in batches for n in batch["n"].tolist()) == [*range(60)]
    halves = dataset.streaming_split(2)
    tasks = [count.remote(half) for half in halves]
    assert sorted(key for keys in ray.get(tasks) for key in keys) == sorted(objects)


@ray.remote(num_cpus=0)
def count(part: ray.data.DataIterator) -> list[str]:
    return [row["key"] for row in part.iter_rows()]


def test_records_are_rows(server: GCSServer, lines: list[dict[str, object]]) -> None:
    dataset = read_objects(
        "gs://bucket/lines",
        records=jsonl(),
        include_uri=True,
        parallelism=3,
        endpoint_url=server.url,
    )
    rows = ordered(dataset.take_all())
    assert rows[57].pop("uri") == "gs://bucket/lines/50.jsonl"
    assert [{key: row[key] for key in ("number", "text")} for row in rows] == lines


def test_of_parquet_only_the_columns_are_read(server: GCSServer, bucket: sync.Store) -> None:
    file = io.BytesIO()
    pq.write_table(
        pa.table({"a": [1, 2, 3], "b": ["x" * 50_000_000] * 3}), file, compression="none"
    )
    bucket.put("in/t.parquet", file.getvalue())
    before = server.stats.total.bytes_out
    dataset = read_objects("gs://bucket/in", records=parquet(), endpoint_url=server.url)
    assert dataset.select_columns(["a"]).take_all() == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert server.stats.total.bytes_out - before < 10_000_000
    assert dataset.count() == 3
    named = read_objects(
        "gs://bucket/in", records=parquet(), include_uri=True, endpoint_url=server.url
    )
    assert named.select_columns(["uri"]).take_all() == [{"uri": "gs://bucket/in/t.parquet"}] * 3
    assert named.select_columns(["a", "uri"]).take(1) == [
        {"a": 1, "uri": "gs://bucket/in/t.parquet"}
    ]


def test_a_damaged_record_is_an_error_or_skips_the_rest_of_its_object(
    server: GCSServer, bucket: sync.Store, lines: list[dict[str, object]]
) -> None:
    bucket.put("lines/50.jsonl", b'{"number": 50, "text": ""}\n{"number"')
    options = {"records": jsonl(), "endpoint_url": server.url}
    with pytest.raises(RecordError, match="record 1"):
        read_objects("gs://bucket/lines", **options).take_all()
    rows = read_objects("gs://bucket/lines", on_error="skip", **options).take_all()
    assert sorted(row["number"] for row in rows) == [*range(51), *range(60, 100)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["data"]}, "no column"),
        ({"columns": "key"}, r"such as \['key'\]"),
        ({"on_error": "ignore"}, "on_error"),
        ({"records": "jsonl"}, r"such as jsonl\(\)"),
        ({"parallelism": 0}, "parallelism must be"),
        ({"parallelism": 1.5}, "parallelism must be"),
        ({"max_in_flight_per_node": 0}, "max_in_flight_per_node must be"),
        ({"manifest": "000.bin"}, "gs://bucket/in/000.bin is not a listing"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_an_error(
    server: GCSServer, objects: dict[str, bytes], options, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read_objects("gs://bucket/in", endpoint_url=server.url, **options)


def test_no_object_is_an_error(server: GCSServer) -> None:
    with pytest.raises(NotFoundError, match="no object below gs://bucket/other"):
        read_objects("gs://bucket/other", endpoint_url=server.url)
    with pytest.raises(ValueError, match="in the memory of one process"):
        read_objects("memory://bucket")


# --- writing ----------------------------------


@pytest.mark.parametrize("name", ["parquet", "jsonl"])
def test_rows_are_read_back(
    server: GCSServer, bucket: sync.Store, lines: list[dict[str, object]], name: str
) -> None:
    dataset = ray.data.from_items(lines, override_num_blocks=5)
    manifest = write_objects(dataset, "gs://bucket/out", format=name, endpoint_url=server.url)
    assert manifest.uri == "gs://bucket/out/aioflux-manifest"
    assert MANIFEST in bucket.list_all("out/").keys
    number = rf"out/data-[0-9a-f]{{32}}-\d{{5}}-[0-9a-f]{{8}}-\d{{5}}\.{name}"
    assert all(re.fullmatch(number, key) for key in data_keys(bucket))
    records = {"parquet": parquet(), "jsonl": jsonl()}[name]
    back = read_objects("gs://bucket/out", records=records, endpoint_url=server.url)
    assert ordered(back.take_all()) == lines
    torch_dataset = IterableDataset.from_manifest(
        manifest.uri, records=records, endpoint_url=server.url
    )
    assert ordered(list(torch_dataset)) == lines


def test_a_task_writes_objects_of_about_the_given_size(
    server: GCSServer, bucket: sync.Store
) -> None:
    dataset = ray.data.from_items([{"number": n} for n in range(50)], override_num_blocks=5)
    once = dataset.repartition(1, shuffle=False).materialize()
    write_objects(once, "gs://bucket/out", max_object_bytes=1, endpoint_url=server.url)
    assert len(data_keys(bucket)) >= 1
    back = read_objects("gs://bucket/out", records=parquet(), endpoint_url=server.url)
    assert sorted(row["number"] for row in back.take_all()) == [*range(50)]


def test_tar_samples_are_read_back(server: GCSServer) -> None:
    rows = [{"__key__": f"a/{n}", "bin": bytes([n]), "txt": str(n), "json": [n]} for n in range(9)]
    write_objects(
        ray.data.from_items(rows, override_num_blocks=2),
        "gs://bucket/out",
        format="tar",
        endpoint_url=server.url,
    )
    back = read_objects("gs://bucket/out", records=tar(), endpoint_url=server.url).take_all()
    assert sorted(back, key=lambda row: row["__key__"]) == [
        row | {"txt": row["txt"].encode(), "json": json.dumps(row["json"]).encode()} for row in rows
    ]


@pytest.mark.parametrize("key", ["a.b", "__a__/b", "a/", "", None])
def test_a_sample_that_tar_would_not_read_back_is_an_error(server: GCSServer, key) -> None:
    rows = ray.data.from_items([{"__key__": key, "bin": b"1"}])
    with pytest.raises(ValueError, match=r"sample|__key__"):
        write_objects(rows, "gs://bucket/out", format="tar", endpoint_url=server.url)


def test_rows_of_objects_keep_their_keys(
    server: GCSServer, bucket: sync.Store, objects: dict[str, bytes]
) -> None:
    dataset = read_objects("gs://bucket/in", parallelism=3, endpoint_url=server.url)
    write_objects(dataset, "gs://bucket/out", format="objects", endpoint_url=server.url)
    assert {key.rpartition("/")[2] for key in data_keys(bucket)} == objects.keys()
    back = read_objects("gs://bucket/out", endpoint_url=server.url).take_all()
    assert {row["key"]: row["bytes"] for row in back} == objects


def test_two_rows_with_one_key_are_an_error(server: GCSServer, bucket: sync.Store) -> None:
    rows = [{"key": "a", "bytes": b"1"}, {"key": "a", "bytes": b"2"}]
    for num_blocks in (1, 2):
        dataset = ray.data.from_items(rows, override_num_blocks=num_blocks)
        with pytest.raises(StorageError, match="two rows"):
            write_objects(dataset, "gs://bucket/out", format="objects", endpoint_url=server.url)
    assert len(bucket.list_all("out/")) == 0


def test_other_columns_than_those_of_objects_are_an_error(server: GCSServer) -> None:
    rows = ray.data.from_items([{"key": "a", "bytes": "text"}])
    with pytest.raises(ValueError, match="needs key and bytes"):
        write_objects(rows, "gs://bucket/out", format="objects", endpoint_url=server.url)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "csv"},
        {"manifest": "a/b"},
        {"mode": "append"},
        {"manifest": "other"},
        {"max_object_bytes": 0},
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_write_is_an_error(server: GCSServer, options) -> None:
    with pytest.raises(ValueError, match="must be"):
        write_objects(ray.data.range(1), "gs://bucket/out", endpoint_url=server.url, **options)


def test_objects_that_were_deleted_during_the_write_are_an_error(
    server: GCSServer, bucket: sync.Store
) -> None:
    """`clean` with too small an age cannot make a dataset that lacks rows."""
    url = server.url

    def clean_at_last(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 99:
            with aioflux.sync.open_store("gs://bucket", endpoint_url=url) as store:
                wait_until(lambda: store.list_all("out/"))
                store.clean(older_than_seconds=0)
        return row

    dataset = ray.data.range(100, override_num_blocks=10).map(clean_at_last)
    with pytest.raises(StorageError, match="were objects deleted"):
        write_objects(dataset, "gs://bucket/out", endpoint_url=url)
    assert len(bucket.list_all("out/")) == 0


def test_an_error_of_a_task_leaves_nothing(server: GCSServer, bucket: sync.Store) -> None:
    def fail(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 99:
            raise ValueError("the last row")
        return row

    dataset = ray.data.range(100, override_num_blocks=10).map(fail)
    with pytest.raises(ray.exceptions.RayTaskError, match="the last row"):
        write_objects(dataset, "gs://bucket/out", endpoint_url=server.url)
    bucket.clean(older_than_seconds=0)
    assert len(bucket.list_all("out/")) == 0


def test_an_existing_manifest_is_kept_or_replaced(server: GCSServer, bucket: sync.Store) -> None:
    def write(number: int, mode: str) -> None:
        rows = ray.data.from_items([{"number": number}])
        write_objects(rows, "gs://bucket/out", mode=mode, endpoint_url=server.url)

    def rows() -> list[dict[str, int]]:
        dataset = read_objects("gs://bucket/out", records=parquet(), endpoint_url=server.url)
        return dataset.take_all()

    write(1, "create")
    with pytest.raises(AlreadyExistsError, match="choose another"):
        write(2, "create")
    assert rows() == [{"number": 1}]
    write(3, "overwrite")
    assert rows() == [{"number": 3}]
    assert len(bucket.clean(older_than_seconds=0).removed) == 1  # the objects of the first write
    assert rows() == [{"number": 3}]


def test_objects_without_their_manifest_are_no_dataset(
    server: GCSServer, bucket: sync.Store, objects: dict[str, bytes]
) -> None:
    """Such as those of a killed driver, which may have rows twice."""
    rows = ray.data.range(3)
    write_objects(rows, "gs://bucket/out", manifest=f"{NAME}-2", endpoint_url=server.url)
    with pytest.raises(NotFoundError, match="no manifest; the write has not ended"):
        read_objects("gs://bucket/out", records=parquet(), endpoint_url=server.url)
    back = read_objects(
        "gs://bucket/out", records=parquet(), manifest=f"{NAME}-2", endpoint_url=server.url
    )
    assert back.count() == 3


def delete_blobs(server: GCSServer, uri: str) -> None:
    with blobs_below(server, uri) as (_, blobs):
        for blob in blobs:
            blob.delete()


def list_with(tool: str, server: GCSServer, uri: str, capfd: pytest.CaptureFixture[str]) -> int:
    """Return the number of objects that a tool lists."""
    if tool == "rclone":
        return len(run_rclone(server, "lsf -R --files-only", uri).splitlines())
    if tool == "google-cloud-storage":
        with blobs_below(server, uri) as (_, blobs):
            return len(blobs)
    capfd.readouterr()
    run_aioflux(server, "ls", "-r", uri)
    return len(capfd.readouterr().out.splitlines())


DELETES = {
    "aioflux": lambda server, uri: run_aioflux(server, "rm", "-r", uri),
    "google-cloud-storage": delete_blobs,
    "rclone": lambda server, uri: run_rclone(server, "purge", uri),
}


@pytest.mark.parametrize("tool", COPIES)
def test_every_tool_lists_copies_and_deletes_a_whole_dataset(
    server: GCSServer,
    bucket: sync.Store,
    objects: dict[str, bytes],
    lines: list[dict[str, object]],
    tool: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Logs a row of a table, which `--log-cli-level=INFO` shows."""
    dataset = read_objects("gs://bucket/in", parallelism=3, endpoint_url=server.url)
    write_objects(dataset, "gs://bucket/out/raw", format="objects", endpoint_url=server.url)
    rows = ray.data.from_items(lines, override_num_blocks=3)
    write_objects(rows, "gs://bucket/out/rows", endpoint_url=server.url)
    num_objects = len(bucket.list_all("out/"))
    assert num_objects >= 60 + 3 + 2
    num_listed = list_with(tool, server, "gs://bucket/out", capfd)
    COPIES[tool](server, "gs://bucket/out", "gs://bucket/copy")
    COPIES[tool](server, "gs://bucket/out", f"file://{tmp_path}/copy")
    num_copied = len(bucket.list_all("copy/"))
    DELETES[tool](server, "gs://bucket/out")
    num_left = len(server.keys("bucket", "out/"))
    num_rows = {}
    for place in ("gs://bucket/copy", f"file://{tmp_path}/copy"):
        options: Any = {"endpoint_url": server.url} if place.startswith("gs:") else {}
        raw = read_objects(f"{place}/raw", **options).take_all()
        assert {row["key"]: row["bytes"] for row in raw} == objects
        back = read_objects(f"{place}/rows", records=parquet(), **options)
        assert ordered(back.take_all()) == lines
        num_rows[place[: place.index(":")]] = len(raw) + len(lines)
    _log.info(
        "| %s | %d written | %d listed | %d copied | rows in copies: %s | %d left by the delete |",
        *(tool, num_objects, num_listed, num_copied, num_rows, num_left),
    )
    assert (num_listed, num_copied, num_left) == (num_objects, num_objects, 0)


def test_no_row_is_an_empty_dataset(server: GCSServer) -> None:
    empty = ray.data.range(10).filter(lambda row: row["id"] > 10)
    write_objects(empty, "gs://bucket/out", endpoint_url=server.url)
    back = read_objects("gs://bucket/out", records=parquet(), endpoint_url=server.url)
    assert back.take_all() == []
    with pytest.raises(NotFoundError, match="the dataset is empty"):
        IterableDataset.from_manifest(
            "gs://bucket/out/aioflux-manifest", records=parquet(), endpoint_url=server.url
        )
