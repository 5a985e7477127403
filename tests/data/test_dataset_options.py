"""Ways into a dataset and ways of reading it: uris, manifests, records, composites, a cache."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import aioflux
from aioflux.data import IterableDataset, MapDataset, jsonl, parquet
from tests.data.transforms import key_of, refuse_odd, uri_of

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer
    from tests.data.conftest import Bucket

pytestmark = pytest.mark.clouds("gs", "s3", "az")

KINDS = [MapDataset, IterableDataset]


def keys_of(dataset: Any) -> list[str]:
    """All items in order, read as DataLoader reads them, in this process."""
    return [key for batch in DataLoader(dataset, batch_size=5) for key in batch]


def requests(server: GCSServer) -> int:
    return server.stats.operation("objects.get").requests


@pytest.mark.parametrize("kind", KINDS)
def test_several_uris_follow_each_other(bucket: Bucket, kind: type[Any]) -> None:
    for number in range(3):
        bucket.server.put("bucket", f"a/{number}", b"x")
        bucket.server.put("bucket", f"b/{number}", b"y")
    dataset = kind([f"{bucket.root}/b", f"{bucket.root}/a"], transform=uri_of)
    assert keys_of(dataset) == [
        f"{bucket.root}/{at}/{number}" for at in "ba" for number in range(3)
    ]


@pytest.mark.clouds("gs")
def test_several_uris_are_shuffled_together(bucket: Bucket) -> None:
    uris = [f"{bucket.root}/{at}" for at in "abc"]
    expected = [f"{uri}/{number:02d}" for uri in uris for number in range(20)]
    for uri in expected:
        bucket.server.put("bucket", uri.removeprefix(f"{bucket.root}/"), b"x")
    read = list(IterableDataset(uris, transform=uri_of, shuffle=True))
    assert sorted(read) == expected
    assert len({uri[12] for uri in read[:20]}) == 3


def test_one_uri_without_objects_among_several_is_an_error(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(aioflux.NotFoundError, match=f"{bucket.root}/trian/"):
        IterableDataset([bucket.uri, f"{bucket.root}/trian"])


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_takes_the_place_of_a_listing(bucket: Bucket, kind: type[Any]) -> None:
    keys = bucket.fill(12)
    with aioflux.sync.open_store(bucket.root) as store:
        store.save_manifest("lists/train.manifest", "train/")
    bucket.server.stats.reset()
    bucket.put("zzz", b"later")
    dataset = kind.from_manifest(f"{bucket.root}/lists/train.manifest", transform=uri_of)
    assert keys_of(dataset) == [f"{bucket.uri}/{key}" for key in keys]
    assert bucket.server.stats.operation("objects.list").requests == 0


def test_something_else_is_no_manifest(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(ValueError, match="not a listing that aioflux saved") as caught:
        MapDataset.from_manifest(f"{bucket.uri}/000")
    assert f"the manifest {bucket.uri}/000 is" in str(caught.value)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_listing_is_used_as_it_is(bucket: Bucket, kind: type[Any]) -> None:
    keys = bucket.fill(6)
    with aioflux.sync.open_store(bucket.uri) as store:
        listing = store.list_all()
    bucket.server.stats.reset()
    assert keys_of(kind.from_keys(bucket.uri, listing[2:], transform=key_of)) == keys[2:]
    assert bucket.server.stats.operation("objects.list").requests == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [({"shard_by": "bytes"}, "sizes of the objects"), ({"cache": "cache"}, "cached without")],
)
def test_options_that_need_metadata_reject_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        IterableDataset.from_keys("memory://bucket", ["a"], **option)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_epoch_from_the_cache_sends_nothing(
    bucket: Bucket, tmp_path: Path, kind: type[Any]
) -> None:
    keys = bucket.fill(30)
    dataset = kind(bucket.uri, transform=key_of, cache=tmp_path / "cache")
    assert keys_of(dataset) == keys
    bucket.server.stats.reset()
    assert keys_of(dataset) == keys
    other = kind(bucket.uri, transform=key_of, cache=tmp_path / "cache")
    assert keys_of(other) == keys
    assert requests(bucket.server) == 0
    assert dataset.stats.num_cache_hits == 30
    assert dataset.stats.num_objects == 60


def test_an_empty_name_is_no_directory_of_a_cache(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(ValueError, match='cache="" names no directory'):
        MapDataset(bucket.uri, cache="")


@pytest.mark.clouds("gs")
def test_hits_and_misses_keep_the_order_of_the_epoch(bucket: Bucket, tmp_path: Path) -> None:
    """Some are here and some are not, in runs of any length; others come in while it reads."""
    keys = bucket.fill(200)
    part = [key for key in keys if int(key) % 7 in {0, 1, 5} or 60 < int(key) < 120]
    with aioflux.sync.open_store(bucket.uri) as store:
        metas = [meta for meta in store.list() if meta.key in part]
    cache = {"cache": tmp_path / "cache", "transform": key_of}
    assert keys_of(MapDataset.from_keys(bucket.uri, metas, **cache)) == part
    bucket.server.stats.reset()
    dataset = IterableDataset(bucket.uri, **cache)
    assert list(dataset) == keys
    assert requests(bucket.server) == len(keys) - len(part)


def test_a_replaced_object_is_not_taken_from_the_cache(bucket: Bucket, tmp_path: Path) -> None:
    bucket.fill(3)
    options = {"cache": tmp_path / "cache", "transform": data_of}
    list(IterableDataset(bucket.uri, **options))
    bucket.put("001", b"new")
    assert list(IterableDataset(bucket.uri, **options))[1] == b"new"


def data_of(sample: Any) -> bytes:
    return sample.data


@pytest.mark.parametrize("option", [{"cache": "/nowhere"}, {"compose": "on"}])
def test_ordered_false_with_what_reads_in_order_is_rejected(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ordered=False has no effect"):
        IterableDataset("memory://bucket", ordered=False, **option)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("kind", KINDS)
def test_composites_give_the_same_samples(bucket: Bucket, kind: type[Any]) -> None:
    keys = bucket.fill(70)
    assert keys_of(kind(bucket.uri, transform=key_of, compose="on")) == keys
    with aioflux.sync.open_store(bucket.root) as store:
        assert [meta.key for meta in store.list("aioflux-composed-objects/")] == []
        assert not list(store.list("train/aioflux-composed-objects/"))


@pytest.mark.clouds("s3", "az")
@pytest.mark.parametrize("kind", KINDS)
def test_composites_are_rejected_if_the_service_makes_none(bucket: Bucket, kind: type[Any]) -> None:
    bucket.fill(3)
    with pytest.raises(ValueError, match="cannot compose"):
        kind(bucket.uri, compose="on")


def test_as_they_arrive_all_come(bucket: Bucket) -> None:
    keys = bucket.fill(60)
    assert sorted(IterableDataset(bucket.uri, transform=key_of, ordered=False)) == keys


def test_records_of_large_objects_stream_in(bucket: Bucket) -> None:
    """Objects beyond what may be read ahead are never whole in memory."""
    line = b'{"n": %d}' + b" " * 1000 + b"\n"
    for number in range(3):
        size = 6000 if number == 1 else 10
        bucket.put(str(number), b"".join(line % each for each in range(size)))
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=5 << 20)
    dataset = IterableDataset(bucket.uri, records=jsonl(), transfer=options)
    read = [record["n"] for record in dataset]
    assert read == [*range(10), *range(6000), *range(10)]
    assert dataset.stats.num_objects == 3


@pytest.mark.clouds("gs")
def test_columns_of_large_parquet_objects_are_read_alone(bucket: Bucket) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet_module = pytest.importorskip("pyarrow.parquet")
    noise = [os.urandom(2000) for _ in range(400)]
    table = pyarrow.table({"n": list(range(400)), "noise": noise})
    held = io.BytesIO()
    parquet_module.write_table(table, held, row_group_size=200)
    bucket.put("0", held.getvalue())
    options = aioflux.TransferOptions(range_size_bytes=100_000)
    dataset = IterableDataset(bucket.uri, records=parquet(columns=["n"]), transfer=options)
    bucket.server.stats.reset()
    assert [record["n"] for record in dataset] == list(range(400))
    assert 0 < bucket.server.stats.operation("objects.get").bytes_out < 400_000


class TestSkipping:
    """Objects that cannot be read or transformed are skipped, counted and logged, or an error."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_deleted_objects_are_skipped_and_counted(
        self, bucket: Bucket, kind: type[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = bucket.fill(30)
        dataset = kind(bucket.uri, transform=key_of, on_error="skip")
        with aioflux.sync.open_store(bucket.uri) as store:
            store.delete_many(["003", "004", "029"])
        bucket.put("011", b"other")
        gone = {"003", "004", "011", "029"}
        assert keys_of(dataset) == [key for key in keys if key not in gone]
        assert dataset.stats.num_skipped == 4
        logged = [record.getMessage() for record in caplog.records if "skipped" in record.message]
        assert len(logged) == 4
        assert f"{bucket.uri}/003" in logged[0]

    @pytest.mark.parametrize("kind", KINDS)
    def test_transforms_that_fail_are_given_to_a_function(
        self, bucket: Bucket, kind: type[Any]
    ) -> None:
        keys = bucket.fill(10)
        seen: list[tuple[str, str]] = []

        def note(error: Exception, uri: str) -> None:
            seen.append((type(error).__name__, uri))

        dataset = kind(bucket.uri, transform=refuse_odd, on_error=note)
        assert keys_of(dataset) == keys[::2]
        assert seen == [("ArithmeticError", f"{bucket.uri}/{key}") for key in keys[1::2]]

    def test_a_function_may_raise(self, bucket: Bucket) -> None:
        bucket.fill(3)

        def end(error: Exception, uri: str) -> None:
            raise LookupError(uri) from error

        with pytest.raises(LookupError, match="train/001"):
            list(IterableDataset(bucket.uri, transform=refuse_odd, on_error=end))

    def test_workers_count_what_they_skip(self, bucket: Bucket) -> None:
        keys = bucket.fill(10)
        dataset = IterableDataset(bucket.uri, transform=refuse_odd, on_error="skip")
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert sorted(loader) == keys[::2]
        assert dataset.stats.num_skipped == 5

    def test_a_batch_of_which_nothing_is_left_is_an_error(self, bucket: Bucket) -> None:
        bucket.fill(4)
        dataset = MapDataset(bucket.uri, transform=refuse_odd, on_error="skip")
        with pytest.raises(ArithmeticError):
            dataset.__getitems__([1, 3])
        with pytest.raises(ArithmeticError):
            dataset[1]

    def test_a_bad_record_ends_its_object_only(self, bucket: Bucket) -> None:
        bucket.put("a", b"1\n2\n{torn")
        bucket.put("b", b"3\n")
        dataset = IterableDataset(bucket.uri, records=jsonl(), on_error="skip")
        assert list(dataset) == [1, 2, 3]
        assert dataset.stats.num_skipped == 1
        with pytest.raises(aioflux.RecordError, match=f"{bucket.uri}/a"):
            list(IterableDataset(bucket.uri, records=jsonl()))

    def test_a_skipped_object_is_not_read_again_on_resume(self, bucket: Bucket) -> None:
        keys = bucket.fill(10)
        dataset = IterableDataset(bucket.uri, transform=key_of, on_error="skip")
        bucket.put("001", b"other")
        stream = iter(dataset)
        assert [next(stream) for _ in range(3)] == ["000", "002", "003"]
        stream.close()
        dataset.load_state_dict(dataset.state_dict())
        assert list(dataset) == keys[4:]
        assert dataset.stats.num_skipped == 1

    def test_an_unknown_on_error_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="on_error must be"):
            MapDataset.from_keys("memory://bucket", ["a"], on_error="ignore")


@pytest.mark.clouds("gs")
def test_nothing_runs_after_a_stream_is_closed(bucket: Bucket) -> None:
    """Neither objects read ahead nor a second uri's."""
    bucket.fill(300)
    for number in range(300):
        bucket.server.put("bucket", f"other/{number}", b"x")
    dataset = IterableDataset(
        [bucket.uri, f"{bucket.root}/other"],
        shuffle=True,
        transfer=aioflux.TransferOptions(max_in_flight=4),
    )
    stream = iter(dataset)
    next(stream)
    stream.close()
    counts = []
    with aioflux.sync.open_store(bucket.uri) as store:  # on the loop that would go on reading
        for _ in range(40):
            store.head("000")
            counts.append(requests(bucket.server))
    # A request that had left when the stream was closed may arrive after that.
    assert counts[-1] <= 40 + 2 * 4 + 2
    assert counts[-1] - counts[19] == 20


def test_a_loader_in_a_thread_reads(bucket: Bucket) -> None:
    keys = bucket.fill(10)
    dataset = MapDataset(bucket.uri, transform=key_of)
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.extend(keys_of(dataset)))
    thread.start()
    thread.join(60)
    assert read == keys


def test_a_dataset_works_below_a_running_loop(bucket: Bucket) -> None:
    """As in a notebook: cells block the loop that runs them."""
    keys = bucket.fill(10)

    async def cell() -> tuple[list[str], list[str]]:
        dataset = IterableDataset(bucket.uri, transform=key_of)
        return list(dataset), keys_of(MapDataset(bucket.uri, transform=key_of))

    assert asyncio.run(cell()) == (keys, keys)


def test_progress_is_shown(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    bucket.fill(10)
    list(IterableDataset(bucket.uri, progress=True))
    assert f"{bucket.uri}/ epoch 0" in capsys.readouterr().err


def test_progress_of_workers_ends_with_all_objects(
    bucket: Bucket, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their shares differ in size, and the first worker may end before the others."""
    bucket.fill(11)
    dataset = IterableDataset(bucket.uri, transform=key_of, progress=True)
    assert len(list(DataLoader(dataset, batch_size=None, num_workers=2))) == 11
    assert "100% [####################] 11 of 11 objects" in capfd.readouterr().err.splitlines()[-1]


def raises_stop(sample: Any) -> str:
    return next(iter(())) if sample.key.endswith("3") else sample.key


def raises_index(sample: Any) -> str:
    return sample.key.split("-")[1] if sample.key.endswith("3") else sample.key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", [raises_stop, raises_index])
def test_an_error_of_a_transform_never_ends_an_iteration(
    bucket: Bucket, kind: type[Any], transform: Any
) -> None:
    bucket.fill(6)
    dataset = kind(bucket.uri, transform=transform)
    for read in (list, keys_of):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            read(dataset)
        texts = [str(caught.value), *getattr(caught.value, "__notes__", ())]
        assert any(bucket.uri in line for line in texts)
    assert len(list(kind(bucket.uri, transform=transform, on_error="skip"))) == 5


def test_an_iteration_over_a_map_dataset_can_end_early(bucket: Bucket) -> None:
    bucket.fill(30)
    dataset = MapDataset(bucket.uri, transform=key_of)
    assert list(dataset) == [dataset[index] for index in range(30)]
    items = iter(dataset)
    assert next(items) == dataset[0]
    items.close()
    assert list(items) == []
