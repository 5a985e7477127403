"""Records of Parquet: every row, only the ranges that are needed, or an error that names it."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.data import IterableDataset, parquet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.data.conftest import Bucket

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def read(records: Any, data: bytes) -> list[Any]:
    meta = aioflux.ObjectMeta(key="a", uri="gs://bucket/train/a", size=len(data))
    return list(records(io.BytesIO(data), meta))


def stream(bucket: Bucket, columns: list[str]) -> Iterator[Any]:
    """Iterate over the rows of an object that is not read whole."""
    options = aioflux.TransferOptions(range_size_bytes=1000, verify_ranges=False)
    return iter(IterableDataset(bucket.uri, records=parquet(columns), transfer=options))


def received(bucket: Bucket) -> int:
    """Bytes of bodies that the server has sent."""
    return bucket.server.stats.operation("objects.get").bytes_out


def parquet_of(num_rows: int, *, rows_per_group: int, wide_bytes: int = 10) -> bytes:
    buffer = io.BytesIO()
    table = pa.table(
        {
            "number": list(range(num_rows)),
            "wide": [bytes([n % 251]) * wide_bytes for n in range(num_rows)],
        }
    )
    options = {"compression": "none", "use_dictionary": False}
    pq.write_table(table, buffer, row_group_size=rows_per_group, **options)
    return buffer.getvalue()


def test_parquet_gives_each_row() -> None:
    rows = read(parquet(), parquet_of(2500, rows_per_group=2000))
    assert [row["number"] for row in rows] == list(range(2500))
    assert rows[2]["wide"] == b"\2" * 10


def test_parquet_gives_only_the_wanted_columns() -> None:
    assert read(parquet(["number"]), parquet_of(2, rows_per_group=1)) == [
        {"number": 0},
        {"number": 1},
    ]


def test_parquet_gives_row_groups_as_tables() -> None:
    tables = read(parquet(items="tables"), parquet_of(5, rows_per_group=2))
    assert [table.num_rows for table in tables] == [2, 2, 1]


def test_a_missing_column_is_an_error() -> None:
    with pytest.raises(ValueError, match="train/a has no column txt, only number, wide"):
        read(parquet(["txt"]), parquet_of(2, rows_per_group=1))


def test_parquet_rejects_one_string_for_columns() -> None:
    with pytest.raises(TypeError, match="not the string 'text'"):
        parquet("text")


def test_parquet_rejects_unknown_items() -> None:
    with pytest.raises(ValueError, match='items must be "rows" or "tables"'):
        parquet(items="groups")


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_parquet_file_that_is_cut_off_is_an_error(keep: int) -> None:
    with pytest.raises(aioflux.RecordError, match="of gs://bucket/train/a: not a complete Parq"):
        read(parquet(), parquet_of(10, rows_per_group=5)[:keep])


def test_only_the_ranges_of_the_wanted_columns_are_read(bucket: Bucket) -> None:
    data = parquet_of(2000, rows_per_group=500, wide_bytes=2000)
    bucket.put("a", data)
    assert [row["number"] for row in stream(bucket, ["number"])] == list(range(2000))
    assert received(bucket) < len(data) / 10


def test_an_iteration_of_rows_that_ends_early_reads_no_more(bucket: Bucket) -> None:
    data = parquet_of(2000, rows_per_group=100, wide_bytes=1000)
    bucket.put("a", data)
    rows = stream(bucket, ["number", "wide"])
    assert next(rows)["number"] == 0
    rows.close()
    # Two row groups of twenty, which plain http reads twice, and the footer.
    assert received(bucket) < len(data) / 3


def test_an_object_that_was_replaced_is_an_error(bucket: Bucket) -> None:
    bucket.put("a", parquet_of(500, rows_per_group=200))
    rows = stream(bucket, ["number"])
    bucket.put("a", parquet_of(500, rows_per_group=200))
    with pytest.raises(aioflux.NotFoundError, match="gs://bucket/train/a"):
        list(rows)


@pytest.mark.parametrize("columns", [None, ["number"]])
def test_a_flipped_bit_of_a_page_is_an_error(columns: list[str] | None) -> None:
    buffer = io.BytesIO()
    table = pa.table({"number": list(range(100_000))})
    pq.write_table(
        table, buffer, compression="none", use_dictionary=False, write_page_checksum=True
    )
    data = buffer.getvalue()
    chunk = pq.ParquetFile(buffer).metadata.row_group(0).column(0)
    assert chunk.total_compressed_size > 700_000  # and the header of the page has less than 1,000
    for position in range(1000, 700_000, 17_777):
        flipped = bytearray(data)
        flipped[chunk.data_page_offset + position] ^= 1
        with pytest.raises(aioflux.RecordError, match="gs://bucket/train/a"):
            read(parquet(columns), bytes(flipped))


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'aioflux-storage\[parquet\]'"):
        parquet()
