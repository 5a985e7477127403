"""Records: every one of an object, in order, or an error that names the object and the record."""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import tarfile
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflux
from aioflux.compat.s3_datapipes import IterableWrapper
from aioflux.data import jsonl, parquet, tar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.data.conftest import Bucket

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def records_of(records: Any, data: bytes) -> Iterator[Any]:
    meta = aioflux.ObjectMeta(key="a", uri="gs://bucket/train/a", size=len(data))
    return iter(records(io.BytesIO(data), meta))


def read(records: Any, data: bytes) -> list[Any]:
    return list(records_of(records, data))


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
    records = records_of(jsonl(), data)
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
    with pytest.raises(aioflux.RecordError, match="of gs://bucket/train/a: the gzip stream is d"):
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
def test_a_name_is_split_at_the_first_dot_of_its_last_part(
    name: str, split: tuple[str, str]
) -> None:
    stem, extension = split
    expected = [{"__key__": stem, extension: b"1"}] if stem else []
    assert read(tar(), tar_of([(name, b"1")])) == expected


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
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, len(data)
    archive = header.tobuf(tarfile.USTAR_FORMAT) + data.ljust(512, b"\0") + tar_of(PAIRS)
    with pytest.raises(aioflux.RecordError, match="a pax header of the archive is damaged"):
        read(tar(), archive)


# Streams

ALL = [jsonl(), tar(), parquet(), parquet(["a"], items="tables")]


@pytest.mark.parametrize("records", ALL, ids=lambda records: type(records).__name__)
def test_records_pickle(records: Any) -> None:
    assert pickle.loads(pickle.dumps(records)) == records


def test_records_arrive_in_a_stream(bucket: Bucket) -> None:
    """As every file of `load_files_by_s3`, whose buffer may have any size."""
    values = [{"text": "x" * 100, "number": number} for number in range(1000)]
    bucket.put("a", lines_of(values))
    for buffer_size in (1000, 64 * 1024):
        urls = IterableWrapper([f"{bucket.uri}/a"]).list_files_by_s3()
        [(url, file)] = urls.load_files_by_s3(buffer_size=buffer_size)
        assert list(jsonl()(file.file_obj, url.meta)) == values
