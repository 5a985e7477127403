"""What the pipes promise: what was listed, whole, each once, ahead of its consumer, or an error."""

from __future__ import annotations

import io
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from aioflux import (
    AlreadyExistsError,
    NotFoundError,
    RetryPolicy,
    S3Access,
    Timeouts,
    TransferOptions,
    TransientError,
    sync,
)
from aioflux.compat import s3_datapipes
from aioflux.compat.s3_datapipes import (
    IterableWrapper,
    LineReader,
    ListedUrl,
    S3FileLister,
    S3FileLoader,
    S3FileSaver,
    StreamWrapper,
)
from aioflux.compat.s3_datapipes._lines import split_lines
from aioflux.compat.s3_datapipes._options import in_region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.compat.s3_datapipes.conftest import Bucket

QUICK = RetryPolicy(max_attempts=2, initial_seconds=0.01)


def contents(pipe: Any) -> dict[str, bytes]:
    return {url: file.read() for url, file in pipe}


def failure(seen: list[Any], items: Any) -> NotFoundError:
    """Return the error that ends the items; its traceback would keep their workers."""
    try:
        seen.extend(items)
    except NotFoundError as exc:
        return exc.with_traceback(None)
    raise AssertionError("there was no error")


def reach(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, "nothing was fetched ahead"
        time.sleep(0.005)


def test_the_names_are_those_of_torchdata() -> None:
    assert IterableWrapper([]).list_files_by_s3().load_files_by_s3().readlines()
    assert set(s3_datapipes.__all__) >= {"S3FileLister", "S3FileLoader", "LineReader"}
    assert isinstance(IterableWrapper([]).list_files_by_s3(length=3), S3FileLister)
    assert isinstance(IterableWrapper([]).load_files_by_s3(buffer_size=1 << 20), S3FileLoader)
    assert isinstance(IterableWrapper([]).readlines(), LineReader)
    assert isinstance(IterableWrapper([]).save_files_by_s3(), S3FileSaver)


# --- listing ------------------------------------------------------------------------------------


def test_a_prefix_is_a_beginning_and_no_directory(bucket: Bucket) -> None:
    bucket.fill(2, "train-a/")
    bucket.fill(1, "train/")
    bucket.put("test/1", b"x")
    bucket.put("train/", b"")  # a directory marker
    urls = list(S3FileLister(IterableWrapper(["gs://bucket/tr", "gs://bucket/test/1"])))
    assert urls == [
        "gs://bucket/train-a/000",
        "gs://bucket/train-a/001",
        "gs://bucket/train/000",
        "gs://bucket/test/1",
    ]
    assert len(list(IterableWrapper(["gs://bucket"]).list_files_by_s3())) == 4


def test_a_url_carries_what_was_listed_through_processes(bucket: Bucket) -> None:
    bucket.fill(1)
    [url] = IterableWrapper(["gs://bucket/"]).list_files_by_s3()
    assert isinstance(url, ListedUrl)
    again = pickle.loads(pickle.dumps(url))
    assert again == url == "gs://bucket/train/000"
    assert again.meta == url.meta
    assert url.meta.key == "train/000"


def test_a_prefix_without_objects_is_logged(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="aioflux"):
        assert list(IterableWrapper(["gs://bucket/nothing"]).list_files_by_s3()) == []
    assert "gs://bucket/nothing" in caplog.text


def test_a_length_is_returned_only_if_it_is_known() -> None:
    assert len(IterableWrapper([]).list_files_by_s3(length=3)) == 3
    with pytest.raises(TypeError, match="doesn't have valid length"):
        len(IterableWrapper([]).list_files_by_s3())
    assert len(IterableWrapper(["a", "b"]).load_files_by_s3()) == 2


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "named"])
@pytest.mark.parametrize("buffer_size", [None, 5_000], ids=["whole", "streams"])
@pytest.mark.parametrize("is_parallel", [None, True, False])
def test_every_way_to_load_gives_the_same_bytes(
    bucket: Bucket, is_listed: bool, buffer_size: int | None, is_parallel: bool | None
) -> None:
    expected = bucket.fill(3, size=3_000) | bucket.fill(3, "large/", size=20_000)
    urls: Any = IterableWrapper(sorted(expected))
    if is_listed:
        urls = urls.list_files_by_s3()
    pipe = urls.load_files_by_s3(buffer_size=buffer_size, multi_part_download=is_parallel)
    seen = [(url, file) for url, file in pipe]
    assert all(isinstance(file, StreamWrapper) for _, file in seen)
    assert [url for url, _ in seen] == sorted(expected)
    assert {url: file.read() for url, file in seen} == expected
    for _, file in seen:
        file.seek(1)
        assert file.read(2) in {b"ra", b"ar"}
        file.close()


def test_objects_of_several_stores_come_in_the_order_of_their_urls(
    bucket: Bucket, tmp_path: Path
) -> None:
    expected: dict[str, bytes] = {}
    for number in range(20):
        for root in ("gs://bucket", "gs://other", tmp_path.as_uri(), "memory://datapipes"):
            expected[f"{root}/{number}"] = f"{root} {number}".encode().ljust(number * 40)
    assert set(IterableWrapper(list(expected.items())).save_files_by_s3()) == set(expected)
    urls = IterableWrapper(list(expected)).list_files_by_s3()
    listed = {str(url): url for url in urls}  # 1 finds 10, too
    pipe = IterableWrapper([listed[url] for url in expected]).load_files_by_s3(buffer_size=500)
    assert list(contents(pipe).items()) == list(expected.items())


def test_more_urls_of_another_bucket_than_the_lookahead_takes(bucket: Bucket) -> None:
    names = ["gs://bucket/1", *["gs://other/1"] * 5000, "gs://bucket/2"]
    list(IterableWrapper([(name, name.encode()) for name in set(names)]).save_files_by_s3())
    pipe = IterableWrapper(names).load_files_by_s3()
    assert [(url, file.read()) for url, file in pipe] == [(name, name.encode()) for name in names]


def test_an_object_replaced_since_the_listing_is_an_error(bucket: Bucket) -> None:
    bucket.fill(3)
    urls = list(IterableWrapper(["gs://bucket/"]).list_files_by_s3())
    bucket.put("train/001", b"another")
    pipe = IterableWrapper(urls).load_files_by_s3()
    with pytest.raises(NotFoundError, match="gs://bucket/train/001"):
        contents(pipe)
    assert contents(IterableWrapper(["gs://bucket/train/001"]).load_files_by_s3())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_object_is_an_error_that_names_it(bucket: Bucket, num_workers: int) -> None:
    first = bucket.put("a", b"a\n")
    pipe = IterableWrapper([first, "gs://bucket/b", first]).load_files_by_s3().readlines()
    seen: list[Any] = []
    error = failure(seen, DataLoader(pipe, None, num_workers=num_workers, collate_fn=_same))
    assert seen == [(first, b"a")]
    assert error.uri == "gs://bucket/b"
    assert error.status == 404


def test_an_error_of_the_source_comes_after_the_objects_before_it(bucket: Bucket) -> None:
    made = bucket.fill(3)

    def urls() -> Iterator[str]:
        yield from made
        raise ZeroDivisionError("the source's own")

    for source, error in ((urls(), ZeroDivisionError), ([*made, "ftp://x"], ValueError)):
        seen: list[str] = []
        pipe = IterableWrapper(source, deepcopy=False).load_files_by_s3()
        with pytest.raises(error, match=r"own|ftp://x"):
            seen.extend(url for url, _ in pipe)
        assert seen == list(made)


# --- ahead --------------------------------------------------------------------------------------


def test_an_invalid_url_is_an_error_after_the_urls_before_it(bucket: Bucket) -> None:
    """A step before it that returns nothing would leave out all that comes behind."""
    first, last = bucket.fill(2)
    pipe = IterableWrapper([first, None, last]).load_files_by_s3()
    seen = []
    with pytest.raises(TypeError, match="not NoneType"):
        seen.extend(url for url, _ in pipe)
    assert seen == [first]


def test_objects_are_fetched_while_an_earlier_one_is_used(bucket: Bucket) -> None:
    bucket.fill(8)
    files = iter(IterableWrapper(["gs://bucket/"]).list_files_by_s3().load_files_by_s3())
    next(files)
    reach(lambda: bucket.num_reads() == 8)


def test_the_next_stream_begins_while_this_one_is_read(bucket: Bucket) -> None:
    bucket.fill(3, size=200_000)
    pipe = IterableWrapper(["gs://bucket/"]).list_files_by_s3()
    files = iter(pipe.load_files_by_s3(buffer_size=100_000))
    next(files)
    # Two ranges of the second object are asked for, and nothing of the first yet, nor of the third.
    reach(lambda: bucket.num_reads() == 2)
    assert next(files)[1].read(1) == b"t"
    reach(lambda: bucket.num_reads() >= 4)


def test_memory_is_bounded_by_the_buffer(bucket: Bucket) -> None:
    bucket.fill(20, size=10_000)
    options = TransferOptions(max_in_flight=2)
    pipe = IterableWrapper(["gs://bucket/"]).list_files_by_s3().load_files_by_s3(transfer=options)
    files = iter(pipe)
    next(files)
    reach(lambda: bucket.num_reads() >= 3)
    assert bucket.num_reads() < 10
    assert sum(1 for _ in files) == 19


def test_one_request_fills_the_buffer(bucket: Bucket) -> None:
    bucket.fill(1, size=40 << 20)
    urls = IterableWrapper(["gs://bucket/"]).list_files_by_s3()
    assert len(contents(urls.load_files_by_s3(multi_part_download=False))) == 1
    assert bucket.num_reads() == 1
    assert len(contents(urls.load_files_by_s3())) == 1
    assert bucket.num_reads() == 1 + 3  # of 16 MiB


# --- with torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_share_shuffled_urls_and_load_each_object_once(
    bucket: Bucket, num_workers: int
) -> None:
    expected = bucket.fill(20)
    urls = IterableWrapper(["gs://bucket/"]).list_files_by_s3().shuffle().sharding_filter()
    pipe = urls.load_files_by_s3().map(_read).batch(3)
    loader = DataLoader(pipe, None, num_workers=num_workers, collate_fn=_same, shuffle=True)
    for _ in range(2):
        assert sorted(pair for batch in loader for pair in batch) == sorted(expected.items())


def _same(item: Any) -> Any:
    """Collate nothing: torch's own way makes lists of tuples."""
    return item


def _read(pair: tuple[str, Any]) -> tuple[str, bytes]:
    return pair[0], pair[1].read()


def test_a_pipe_works_in_a_process_after_it_was_used(bucket: Bucket) -> None:
    """A fork, and a pickle, carry settings and neither connections nor what is under way."""
    expected = bucket.fill(4)
    pipe = IterableWrapper(["gs://bucket/"]).list_files_by_s3().load_files_by_s3().map(_read)
    assert dict(pipe) == expected
    assert dict(DataLoader(pipe, batch_size=None, num_workers=1)) == expected
    assert dict(pickle.loads(pickle.dumps(pipe))) == expected


def test_lines_are_those_of_torchdata() -> None:
    files = [("a", [b"1\r\n", b"2\n", b"\xff3"])]

    class File(list[bytes]):
        def close(self) -> None:
            self.is_closed = True

    def read(**options: Any) -> list[Any]:
        file = File(files[0][1])
        lines = list(IterableWrapper([("a", file)], deepcopy=False).readlines(**options))
        assert file.is_closed
        return lines

    assert read() == [("a", b"1"), ("a", b"2"), ("a", b"\xff3")]
    assert read(return_path=False) == [b"1", b"2", b"\xff3"]
    assert read(return_path=False, skip_lines=1) == [b"2", b"\xff3"]
    assert read(return_path=False, strip_newline=False) == [b"1\r\n", b"2\n", b"\xff3"]
    assert read(return_path=False, decode=True) == ["1", "2", "3"]
    assert read(return_path=False, decode=True, encoding="latin-1") == ["1", "2", "\xff3"]


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n"]), max_size=20),
    st.integers(1, 6),
)
def test_lines_that_are_split_are_those_that_are_read(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    expected = [line.strip(b"\r\n") for line in io.BytesIO(data)]
    assert list(split_lines(io.BytesIO(data), block_bytes=size)) == expected


# --- cache --------------------------------------------------------------------------------------


def test_a_second_epoch_comes_from_the_cache(bucket: Bucket, tmp_path: Path) -> None:
    expected = bucket.fill(5, size=1_000)
    urls = IterableWrapper(["gs://bucket/"]).list_files_by_s3()
    pipe = urls.load_files_by_s3(cache=tmp_path, buffer_size=10)
    assert contents(pipe) == expected
    reads = bucket.num_reads()
    assert contents(pipe) == expected
    assert bucket.num_reads() == reads
    with pytest.raises(ValueError, match="without its metadata"):
        contents(IterableWrapper(sorted(expected)).load_files_by_s3(cache=tmp_path))


# --- saving -------------------------------------------------------------------------------------


def test_saved_objects_are_whole(bucket: Bucket) -> None:
    pairs = {"a": b"1", "b": b"22"}
    pipe = IterableWrapper(list(pairs.items())).save_files_by_s3(filepath_fn=_below_saved)
    assert sorted(pipe) == ["gs://bucket/saved/a", "gs://bucket/saved/b"]
    assert len(pipe) == 2
    with sync.open_store("gs://bucket/saved") as store:
        assert dict(store.get_many(["a", "b"])) == pairs
    copied = IterableWrapper(["gs://bucket/saved/"]).list_files_by_s3().load_files_by_s3()
    [*urls] = copied.save_files_by_s3(filepath_fn=_beside)
    assert sorted(urls) == ["gs://other/saved/a", "gs://other/saved/b"]


def _below_saved(name: str) -> str:
    return f"gs://bucket/saved/{name}"


def _beside(url: str) -> str:
    return url.replace("//bucket/", "//other/")


def test_mode_xb_does_not_overwrite(bucket: Bucket) -> None:
    bucket.put("a", b"first")
    pipe = IterableWrapper([("gs://bucket/a", b"second")]).save_files_by_s3(mode="xb")
    with pytest.raises(AlreadyExistsError, match="gs://bucket/a"):
        list(pipe)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"request_timeout_ms": 0}, "request_timeout_ms must be above 0, or -1, not 0"),
        ({"request_timeout_ms": 5, "timeouts": Timeouts()}, "pass one of them"),
        ({"buffer_size": 0}, "buffer_size must be above 0, not 0"),
    ],
)
def test_settings_that_make_no_sense_are_rejected(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        IterableWrapper([]).load_files_by_s3(**settings)


def test_an_unknown_mode_is_rejected() -> None:
    with pytest.raises(ValueError, match="mode must be one of wb, xb, not 'w'"):
        IterableWrapper([]).save_files_by_s3(mode="w")


@pytest.mark.parametrize("name", ["list_files_by_s3", "load_files_by_s3"])
def test_a_region_is_rejected_for_services_without_regions(bucket: Bucket, name: str) -> None:
    pipe = getattr(IterableWrapper(["gs://bucket/a"]), name)(region="us-west-2")
    with pytest.raises(ValueError, match="region='us-west-2' has no effect with gs://bucket"):
        list(pipe)


def test_a_region_is_part_of_the_credentials() -> None:
    url = "s3://bucket/a"
    assert in_region({}, "", url) == {}
    assert in_region({}, "us-west-2", url) == {"credentials": S3Access(region="us-west-2")}
    given = S3Access(requester_pays=True)
    expected = S3Access(requester_pays=True, region="us-west-2")
    assert in_region({"credentials": given}, "us-west-2", url) == {"credentials": expected}
    with pytest.raises(ValueError, match="is not the region 'us-west-2' of credentials="):
        in_region({"credentials": expected}, "us-east-1", url)


@pytest.mark.parametrize(
    "credentials", ["planted/secret==", S3Access(credentials=("id", "planted/secret==").__iter__)]
)
def test_no_pickle_and_no_name_of_a_pipe_holds_a_secret(bucket: Bucket, credentials: Any) -> None:
    pipe = IterableWrapper(["az://account/container/a"]).list_files_by_s3(credentials=credentials)
    loaded = pipe.sharding_filter().load_files_by_s3(credentials=credentials)
    with pytest.raises(TypeError, match="stay in this process"):
        pickle.dumps(loaded)
    assert "planted" not in f"{pipe!r} {loaded!r} {loaded._stores!r}"
    assert (
        DataLoader(loaded, None, shuffle=False) is not None
    )  # which reads the graph of pipes by pickle


def test_a_stalled_server_times_out(bucket: Bucket) -> None:
    bucket.fill(1)
    bucket.server.faults.add("objects.get", stall_at=0)
    urls = IterableWrapper(["gs://bucket/train/000"])
    pipe = urls.load_files_by_s3(request_timeout_ms=300, retry=QUICK)
    with pytest.raises(TransientError, match=r"gs://bucket/train/000: .* 0\.3 s"):
        contents(pipe)
