"""Records: every one of an object, in order, or an error that names the object and the record."""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import tarfile
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflux
from aioflux.data import Sample
from aioflux.data._object_stream import open_stream
from aioflux.data._records.formats import (
    jsonl,
    parquet,
    records_of_sample,
    stream_records,
    tar,
)
from aioflux.data._records.tar import parse_pax, split_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.data.conftest import Bucket

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

KIB = 1024


def sample_of(data: bytes) -> Sample:
    meta = aioflux.ObjectMeta(key="a", uri="gs://bucket/train/a", size=len(data))
    return Sample("a", data, meta)


def read(records: Any, data: bytes) -> list[Any]:
    return list(records_of_sample(records, sample_of(data)))


@pytest.fixture
def store(bucket: Bucket) -> Iterator[aioflux.sync.Store]:
    with aioflux.sync.open_store(bucket.uri) as opened:
        yield opened


def received(bucket: Bucket) -> int:
    """Bytes of bodies that the server has sent."""
    return bucket.server.stats.operation("objects.get").bytes_out


# JSON Lines


def lines_of(values: list[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_jsonl_gives_each_line() -> None:
    values = [{"text": "one"}, [1, 2], "three", None]
    assert read(jsonl(), lines_of(values)) == values


@pytest.mark.parametrize("data", [b"", b"\n\n"], ids=["nothing", "empty-lines"])
def test_jsonl_of_nothing_is_nothing(data: bytes) -> None:
    assert read(jsonl(), data) == []


def test_jsonl_needs_no_newline_at_the_end_and_leaves_out_empty_lines() -> None:
    assert read(jsonl(), b'1\n\n \r\n2\r\n"3"') == [1, 2, "3"]


def test_jsonl_decodes_by_the_given_function() -> None:
    assert math.isnan(read(jsonl(decode=json.loads), b"NaN\n")[0])


def test_a_torn_line_is_named() -> None:
    data = lines_of([{"a": 1}, {"a": 2}, {"a": 3}])[:-4]
    records = records_of_sample(jsonl(), sample_of(data))
    assert list(islice(records, 2)) == [{"a": 1}, {"a": 2}]
    with pytest.raises(
        aioflux.RecordError,
        match="could not read record 2, counted from 0, of gs://bucket/train/a: DecodeError",
    ):
        next(records)


def test_a_line_that_is_too_long_is_an_error_before_it_is_in_memory() -> None:
    with pytest.raises(aioflux.RecordError, match=r"record 1, .*longer than max_record_bytes=5"):
        read(jsonl(max_record_bytes=5), b"1234\n12345\n")


@pytest.mark.parametrize("max_record_bytes", [0, -1])
def test_jsonl_rejects_a_bound_of_zero(max_record_bytes: int) -> None:
    with pytest.raises(ValueError, match="max_record_bytes must be above 0"):
        jsonl(max_record_bytes=max_record_bytes)


def test_gzip_is_detected_and_decompressed() -> None:
    values = list(range(1000))
    assert read(jsonl(), gzip.compress(lines_of(values))) == values


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_gzip_is_named(share: float) -> None:
    data = gzip.compress(lines_of([{"n": n * n} for n in range(1000)]))
    with pytest.raises(aioflux.RecordError, match="of gs://bucket/train/a: its gzip stream is t"):
        read(jsonl(), data[: int(len(data) * share)])


def test_a_damaged_gzip_is_named() -> None:
    data = bytearray(gzip.compress(lines_of(list(range(1000)))))
    data[-5] ^= 1
    with pytest.raises(aioflux.RecordError, match="of gs://bucket/train/a"):
        read(jsonl(), bytes(data))


# tar


def tar_of(files: list[tuple[str, bytes]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_with(change: Any) -> bytes:
    """An archive of `a.txt` and then one more, which `change` makes something else."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        first, second = tarfile.TarInfo("a.txt"), tarfile.TarInfo("b.txt")
        first.size = 3
        change(second)
        archive.addfile(first, io.BytesIO(b"one"))
        archive.addfile(second)
    return buffer.getvalue()


PAIRS = [("x/0.jpg", b"picture 0"), ("x/0.cls", b"0"), ("x/1.jpg", b"p1"), ("x/1.cls", b"1")]


def test_tar_groups_by_the_name_without_extension() -> None:
    assert read(tar(), tar_of(PAIRS)) == [
        {"__key__": "x/0", "jpg": b"picture 0", "cls": b"0"},
        {"__key__": "x/1", "jpg": b"p1", "cls": b"1"},
    ]


@pytest.mark.parametrize(
    "kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["u", "gnu", "pax"]
)
def test_long_and_foreign_names_are_whole(kind: int) -> None:
    name = "d" * 90 + "/" + ("ü" if kind != tarfile.USTAR_FORMAT else "u") * 45
    files = [(f"{name}.jpg", b"1"), (f"{name}.json", b"2"), ("next.jpg", b"3")]
    assert read(tar(), tar_of(files, format=kind)) == [
        {"__key__": name, "jpg": b"1", "json": b"2"},
        {"__key__": "next", "jpg": b"3"},
    ]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.jpg", ("a", "jpg")),
        ("./a.seg.PNG", ("./a", "seg.png")),
        ("v1.2/a", ("v1.2/a", "")),
        (".hidden", ("", "hidden")),
    ],
)
def test_a_name_is_split_at_the_first_dot_of_its_last_part(name: str, split: object) -> None:
    assert split_name(name) == split


def test_files_that_belong_to_no_sample_are_left_out() -> None:
    files = [("__meta__/x.json", b"1"), (".DS_Store", b"2"), ("d/._a.jpg", b"3"), ("a.jpg", b"4")]
    assert read(tar(), tar_of(files)) == [{"__key__": "a", "jpg": b"4"}]


def test_directories_are_ignored() -> None:
    data = tar_with(lambda info: setattr(info, "type", tarfile.DIRTYPE))
    assert read(tar(), data) == [{"__key__": "a", "txt": b"one"}]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
def test_a_link_is_an_error(kind: bytes) -> None:
    """Its data would be missing from its sample."""
    with pytest.raises(aioflux.RecordError, match=r"'b\.txt' is neither a file nor a directory"):
        read(tar(), tar_with(lambda info: setattr(info, "type", kind)))


def test_consecutive_archives_are_all_read() -> None:
    assert len(read(tar(), tar_of(PAIRS[:2]) + tar_of(PAIRS[2:]))) == 2


def test_a_compressed_archive_is_read() -> None:
    assert len(read(tar(), gzip.compress(tar_of(PAIRS)))) == 2


def test_two_files_with_one_extension_are_an_error() -> None:
    with pytest.raises(aioflux.RecordError, match=r"two files for 'jpg', the second 'a\.JPG'"):
        read(tar(), tar_of([("a.jpg", b"1"), ("a.JPG", b"2")]))


@given(st.integers(0, 512 * 8 - 1))
@settings(max_examples=60, deadline=None)
def test_an_archive_that_is_cut_off_anywhere_is_an_error(size: int) -> None:
    """Also between two files, where `tarfile` sees the end of the archive. 512 * 8 is its end."""
    data = tar_of(PAIRS)[: 512 * 9]
    assert len(read(tar(), data)) == 2
    with pytest.raises(aioflux.RecordError, match=r"of gs://bucket/train/a: .*cut off"):
        read(tar(), data[:size])


@given(st.integers(0, 512 * 8 - 1))
@settings(max_examples=60, deadline=None)
def test_a_damaged_byte_of_a_header_is_an_error(at: int) -> None:
    data = bytearray(tar_of(PAIRS))
    data[at] ^= 0x15
    if at // 512 % 2:  # in the bytes of a file, of which a tar archive holds no checksum
        assert len(read(tar(), bytes(data))) == 2
    else:
        with pytest.raises(aioflux.RecordError):
            read(tar(), bytes(data))


def test_a_wrong_size_takes_no_memory() -> None:
    info = tarfile.TarInfo("a.jpg")
    info.size = 1 << 40
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(aioflux.RecordError, match=r"cut off in 'a\.jpg', 1099511627773 bytes"):
        read(tar(), header + b"abc")


@pytest.mark.parametrize("data", [b"12 path=a\n", b"8 path=a\n", b"8 path\n", b"x path=a\n", b"9"])
def test_a_damaged_pax_header_is_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"field|substring|subsection|invalid literal"):
        parse_pax(data)


# Streams

ALL = [jsonl(), tar(), parquet(), parquet(["a"], items="tables")]


@pytest.mark.parametrize("records", ALL, ids=lambda records: type(records).__name__)
def test_records_pickle(records: Any) -> None:
    assert pickle.loads(pickle.dumps(records)) == records


def test_records_may_be_a_function_of_the_whole_sample() -> None:
    def words(sample: Sample) -> Iterator[bytes]:
        return iter(sample.data.split())

    assert read(words, b"x y") == [b"x", b"y"]


@pytest.mark.parametrize("prefetch_bytes", [0, 1, 1000, 64 * KIB, 1 << 30])
def test_records_stream_in_with_any_window(
    bucket: Bucket, store: aioflux.sync.Store, prefetch_bytes: int
) -> None:
    values = list(range(2000))[:: 20 if prefetch_bytes == 1 else 1]
    bucket.put("a", lines_of(values))
    records = stream_records(store, store.head("a"), jsonl(), prefetch_bytes=prefetch_bytes)
    assert list(records) == values


def test_a_stream_in_order_costs_its_bytes_and_few_requests(
    bucket: Bucket, store: aioflux.sync.Store
) -> None:
    values = [{"text": "x" * 100, "number": number} for number in range(10_000)]
    data = lines_of(values)
    bucket.put("a", data)
    meta = store.head("a")
    bucket.server.stats.reset()
    assert list(stream_records(store, meta, jsonl(), prefetch_bytes=512 * KIB)) == values
    seen = bucket.server.stats.operation("objects.get")
    assert seen.bytes_out == len(data)
    assert seen.requests == math.ceil(len(data) / (256 * KIB))


def test_no_more_than_the_window_is_prefetched(bucket: Bucket, store: aioflux.sync.Store) -> None:
    data = lines_of(["x" * 100] * 20_000)
    bucket.put("a", data)
    records = stream_records(store, store.head("a"), jsonl(), prefetch_bytes=128 * KIB)
    next(records)
    records.close()
    assert received(bucket) <= 3 * 128 * KIB < len(data)


@pytest.mark.parametrize(
    ("records", "data"), [(jsonl(), b"1\n2\n"), (tar(), tar_of(PAIRS))], ids=["jsonl", "tar"]
)
def test_an_object_that_was_replaced_is_an_error(
    bucket: Bucket, store: aioflux.sync.Store, records: Any, data: bytes
) -> None:
    bucket.put("a", data)
    meta = store.head("a")
    bucket.put("a", data)
    with pytest.raises(aioflux.NotFoundError, match="gs://bucket/train/a"):
        list(stream_records(store, meta, records, prefetch_bytes=1 << 20))


def test_a_stream_reads_seeks_and_tells_as_a_file_does(
    bucket: Bucket, store: aioflux.sync.Store
) -> None:
    data = bytes(range(256)) * 40
    bucket.put("a", data)
    with open_stream(store, store.head("a"), prefetch_bytes=1000) as stream:
        assert stream.read(10) == data[:10]
        assert stream.tell() == 10
        assert stream.seek(-5, io.SEEK_END) == len(data) - 5
        assert stream.read() == data[-5:]
        assert stream.read(1) == b""
        stream.seek(100)
        assert stream.read(100) == data[100:200]
        assert stream.meta.key == "a"
        with pytest.raises(ValueError, match="cannot seek to byte -1 of gs://bucket/train/a"):
            stream.raw.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)


def test_a_stream_rejects_a_negative_window(bucket: Bucket, store: aioflux.sync.Store) -> None:
    bucket.put("a", b"data")
    with pytest.raises(ValueError, match="prefetch_bytes must not be negative, as -1 is"):
        open_stream(store, store.head("a"), prefetch_bytes=-1)


def test_an_empty_object_is_an_empty_stream(bucket: Bucket, store: aioflux.sync.Store) -> None:
    bucket.put("a", b"")
    with open_stream(store, store.head("a"), prefetch_bytes=1000) as stream:
        assert stream.read() == b""


def test_ranges_arrive_while_records_are_taken(bucket: Bucket, store: aioflux.sync.Store) -> None:
    """Double buffering: a range is asked for before the one in front of it is used up."""
    bucket.put("a", lines_of(["x" * 100] * 20_000))
    records = stream_records(store, store.head("a"), jsonl(), prefetch_bytes=400_000)
    bucket.server.stats.reset()
    next(records)
    until = time.monotonic() + 100
    while bucket.server.stats.operation("objects.get").requests < 2:  # it has left, and may arrive
        assert time.monotonic() < until
        time.sleep(0.001)
    # Eleven in all; a third is under way where the first one was taken over already.
    assert bucket.server.stats.operation("objects.get").requests <= 3
    records.close()


def test_a_prefetch_requests_the_next_ranges(bucket: Bucket, store: aioflux.sync.Store) -> None:
    bucket.put("a", bytes(4000))
    with open_stream(store, store.head("a"), prefetch_bytes=4000) as stream:
        bucket.server.stats.reset()
        stream.prefetch()
        assert stream.read() == bytes(4000)
        assert bucket.server.stats.operation("objects.get").requests == 2
