"""Shares and tables, without a cluster."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pyarrow as pa
import pytest
import ray.cloudpickle
from hypothesis import given
from hypothesis import strategies as st
from ray.data.block import BlockAccessor

import aioflux
from aioflux import sync
from aioflux._values.checksums import crc32c
from aioflux._values.dataset_keys import WrittenKey
from aioflux.errors import RecordError
from aioflux.integrations.ray._encode import write_rows, write_shards
from aioflux.integrations.ray._read import ObjectDatasource, _ReadShare
from aioflux.integrations.ray._tables import (
    grouped,
    num_tasks,
    object_table,
    row_table,
    split_by_bytes,
)
from aioflux.integrations.ray._task_store import TaskStore, task_transfer
from aioflux.integrations.ray._write import accepted_objects

sizes = st.lists(st.integers(0, 1 << 40), max_size=60)

ATTEMPT = f"data-{'1a' * 16}-00000-0123abcd"
UNVERIFIED = aioflux.TransferOptions(verify=False)


@given(sizes, st.integers(1, 80))
def test_each_object_is_in_one_share(sizes: list[int], num_parts: int) -> None:
    parts = split_by_bytes(sizes, num_parts)
    assert [index for start, end in parts for index in range(start, end)] == [*range(len(sizes))]
    assert all(start < end for start, end in parts)
    assert len(parts) <= num_parts


def test_shares_have_about_the_same_number_of_bytes() -> None:
    assert split_by_bytes([1 << 20] * 64, 4) == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert split_by_bytes([1 << 20] * 8 + [64 << 20], 2) == [(0, 9)]
    assert split_by_bytes([64 << 20] + [1 << 20] * 8, 2) == [(0, 1), (1, 9)]


@given(st.lists(st.integers(0, 9 << 20), max_size=50))
def test_groups_have_all_items_in_order(sizes: list[int]) -> None:
    groups = list(grouped(sizes, lambda size: size))
    assert [size for group in groups for size in group] == sizes
    assert all(sum(group[:-1]) < 8 << 20 for group in groups)


def test_a_key_that_some_records_lack_is_null() -> None:
    table = row_table([("u", {"a": 1}), ("u", {"b": "x"})], None, include_uri=False)
    assert table.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": "x"}]


def test_records_other_than_dicts_are_items() -> None:
    assert row_table([("u", b"1")], None, include_uri=True).to_pylist() == [
        {"item": b"1", "uri": "u"}
    ]


def test_empty_records_are_rows() -> None:
    table = row_table([("u", {}), ("u", {})], None, include_uri=False)
    assert BlockAccessor.for_block(table).num_rows() == 2


def test_values_without_a_common_type_are_an_error_with_the_uri() -> None:
    with pytest.raises(RecordError, match=r"'a' has no common Arrow type") as raised:
        row_table([("gs://b/1", {"a": 1}), ("gs://b/2", {"a": "x"})], None, include_uri=False)
    assert raised.value.uri == "gs://b/1"


def test_objects_without_columns_are_counted() -> None:
    meta = aioflux.ObjectMeta(key="k", uri="gs://b/k", size=1)
    table = object_table([(meta, b"1")] * 3, [])
    assert BlockAccessor.for_block(table).num_rows() == 3


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("a/b", "a/b"),
        (f"a/{ATTEMPT}/b/c", "b/c"),
        (f"{ATTEMPT}/b", "b"),
        (f"{ATTEMPT}/{ATTEMPT}/b", f"{ATTEMPT}/b"),
        (f"my-{ATTEMPT}/b", f"my-{ATTEMPT}/b"),
        (f"{ATTEMPT}-00000.parquet", f"{ATTEMPT}-00000.parquet"),
    ],
)
def test_a_written_object_has_the_name_in_its_attempt(key: str, name: str) -> None:
    meta = aioflux.ObjectMeta(key=key, uri=f"gs://b/{key}", size=1)
    assert object_table([(meta, b"1")], ["key"]).to_pylist() == [{"key": name}]


def test_tasks_share_the_limits_of_a_node() -> None:
    transfer = aioflux.TransferOptions(max_in_flight=64, max_in_flight_bytes=1 << 28)
    assert task_transfer(transfer, 256, 2) == transfer
    shared = task_transfer(transfer, 256, 16)
    assert (shared.max_in_flight, shared.max_in_flight_bytes) == (16, 1 << 26)
    assert task_transfer(transfer, 256, 1000).max_in_flight == 1


def test_tasks_share_the_memory_of_a_node() -> None:
    mib = 1024 * 1024
    shared = task_transfer(aioflux.TransferOptions(), 256, 8)
    assert shared.max_in_flight_bytes == 128 * mib
    assert shared.max_buffered_bytes == 64 * mib
    shared = task_transfer(aioflux.TransferOptions(), 256, 64)
    assert shared.max_in_flight_bytes == shared.max_buffered_bytes == 16 * mib
    assert task_transfer(aioflux.TransferOptions(), 256, 256).max_buffered_bytes == 16 * mib


def test_objects_in_the_memory_of_the_driver_are_an_error() -> None:
    with (
        sync.open_store("memory://bucket") as store,
        pytest.raises(ValueError, match="memory://bucket, which is in the memory"),
    ):
        TaskStore.of(store, {})


def test_a_task_with_a_limit_reads_only_objects_that_are_needed() -> None:
    metas = [aioflux.ObjectMeta(key=str(n), uri=f"gs://b/{n}", size=1) for n in range(9)]
    for on_error, expected in (("raise", [2, 2, 2]), ("skip", [None] * 3)):
        reader = _ReadShare(TaskStore("gs://b", b""), None, on_error, include_uri=False)
        source = ObjectDatasource(aioflux.Listing(metas), reader, None, parallelism=3)
        tasks = source.get_read_tasks(3, per_task_row_limit=2)
        assert [task.metadata.num_rows for task in tasks] == expected
        assert [len(task.read_fn.share) for task in tasks] == [n or 3 for n in expected]


def test_a_row_without_a_file_is_an_error() -> None:
    """The sample would be missing in the archive."""
    rows = pa.table({"__key__": ["a", "b"], "bin": [b"1", None]})
    with sync.open_store("memory://bucket") as store, pytest.raises(ValueError, match="'b' has no"):
        list(write_shards(store, "shard", iter([rows]), "tar", 1))
    with sync.open_store("memory://bucket") as store:
        assert store.list_all().keys[:] == []


def test_a_python_object_in_json_is_an_error() -> None:
    rows = BlockAccessor.batch_to_block({"a": [object()]})
    with sync.open_store("memory://b") as store, pytest.raises(ValueError, match="a object cannot"):
        list(write_shards(store, "shard", iter([rows]), "jsonl", 1))


def test_credentials_are_not_sent() -> None:
    with (
        sync.open_store("gs://b", credentials=lambda: "secret") as store,
        pytest.raises(TypeError, match="credentials"),
    ):
        TaskStore.of(store, {"credentials": lambda: "secret"})


@pytest.mark.parametrize("dumps", [pickle.dumps, ray.cloudpickle.dumps])
def test_a_listing_is_pickled(dumps) -> None:
    listing = aioflux.Listing([aioflux.ObjectMeta(key="k", uri="gs://b/k", size=1)])
    assert pickle.loads(dumps(listing)) == listing


@pytest.mark.parametrize("version", ["2.59.1", "3.0.0"])
def test_another_release_of_ray_is_an_error_with_both_versions(version: str) -> None:
    code = f"""
import sys, types
for name in ("ray", "ray.data"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["ray"].__version__ = "{version}"
import aioflux.integrations.ray
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(rf"ImportError: .* needs Ray Data 2.60 .* is Ray {version}", ran.stderr)


def listing(**sizes: int) -> aioflux.Listing:
    """Return a listing of objects whose keys end with the names."""
    metas = []
    for name, size in sizes.items():
        key = f"{ATTEMPT[:-1]}{name[0]}/{name[1:]}"
        metas.append(aioflux.ObjectMeta(key=key, uri=f"gs://b/{key}", size=size))
    return aioflux.Listing(metas)


def test_objects_of_attempts_that_are_not_accepted_are_left_out() -> None:
    found = listing(ax=1, bx=2, cy=3, cz=4)
    attempts = [listing(cz=4, cy=3), listing(), listing(bx=2)]
    accepted, others = accepted_objects(found, attempts)
    assert accepted == listing(bx=2, cy=3, cz=4)
    assert others == [0]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (listing(ax=1), "1 objects are missing .*c/y; were objects deleted"),
        (listing(ax=1, cy=2), "1 objects are missing or have another size"),
    ],
    ids=["missing", "size"],
)
def test_objects_that_are_not_found_are_an_error(found: aioflux.Listing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accepted_objects(found, [listing(ax=1), listing(cy=3)])


def test_two_objects_with_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two rows have the key 'x'"):
        accepted_objects(listing(ax=1, bx=1), [listing(ax=1), listing(bx=1)])


def test_written_objects_are_known_with_the_checksum_of_the_writer() -> None:
    rows = pa.table({"key": ["a/b", "c"], "bytes": [b"1", b"22"]})
    with sync.open_store("memory://checksums", transfer=UNVERIFIED) as store:
        metas = [
            *write_rows(store, f"{ATTEMPT}/", [rows]),
            *write_shards(store, ATTEMPT, iter([rows]), "parquet", 1),
        ]
        assert [meta.crc32c for meta in metas] == [crc32c(store.get(meta.key)) for meta in metas]
        assert all(WrittenKey.parse(meta.key) for meta in metas)


def test_bytes_in_json_are_base64() -> None:
    rows = pa.table({"a": [b"\xff\x00"]})
    with sync.open_store("memory://base64") as store:
        [meta] = write_shards(store, "shard", iter([rows]), "jsonl", 1)
        assert store.get(meta.key) == b'{"a":"/wA="}\n'


def test_tasks_read_a_block_each_and_use_all_processors() -> None:
    assert num_tasks(20_000 * 100 * 1024, 20_000, 2) == 25
    assert num_tasks(1000, 1000, 64) == 128
    assert num_tasks(0, 0, 2) == 4
