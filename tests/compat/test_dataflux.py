"""The datasets with the old names: their options, and what is right in them that was wrong."""

from __future__ import annotations

import gc
import gzip
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest
from google.api_core.retry import Retry
from google.cloud.storage.retry import DEFAULT_RETRY, DEFAULT_RETRY_IF_GENERATION_SPECIFIED
from google.oauth2.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux.compat.dataflux import dataflux_iterable_dataset, dataflux_mapstyle_dataset
from aioflux.compat.dataflux._retry import DEFAULT_POLICY, policy_of
from aioflux.compat.dataflux.dataflux_iterable_dataset import (
    DataFluxIterableDataset,
    share_of_worker,
)
from aioflux.compat.dataflux.dataflux_mapstyle_dataset import DataFluxMapStyleDataset
from aioflux.testing.gcs_server import Network
from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.compat.conftest import Bucket

    Read = Callable[[Any], list[Any]]

MAP_CONFIG = {
    "sort_listing_results": False,
    "max_composite_object_size": 100_000_000,
    "num_processes": os.cpu_count(),
    "prefix": None,
    "max_listing_retries": 3,
    "threads_per_process": 1,
    "disable_compose": False,
    "list_retry_config": DEFAULT_POLICY,
    "download_retry_config": DEFAULT_POLICY,
}

ONCE = Retry(timeout=300.0, initial=0.01, maximum=0.01)

KINDS = [DataFluxMapStyleDataset, DataFluxIterableDataset]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["map", "iterable"])


def one_by_one(dataset: DataFluxMapStyleDataset) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


def at_once(dataset: DataFluxMapStyleDataset) -> list[Any]:
    return dataset.__getitems__(range(len(dataset)))


each_way = pytest.mark.parametrize(
    ("kind", "read"),
    [
        (DataFluxMapStyleDataset, one_by_one),
        (DataFluxMapStyleDataset, at_once),
        (DataFluxMapStyleDataset, list),
        (DataFluxIterableDataset, list),
    ],
    ids=["getitem", "getitems", "iter", "iterable"],
)


def config_of(kind: type, **options: Any) -> Any:
    return sys.modules[kind.__module__].Config(**options)


def opened(kind: type, *, storage_client: Any = None, format_fn: Any = None, **options: Any) -> Any:
    given = {"data_format_fn": format_fn} if format_fn else {}
    config = config_of(kind, **options)
    return kind("project", "bucket", config, storage_client=storage_client, **given)


# Options.


def test_the_map_config_has_the_old_options_in_their_old_order() -> None:
    config = dataflux_mapstyle_dataset.Config()
    assert vars(config) == MAP_CONFIG
    assert list(inspect.signature(type(config)).parameters) == list(MAP_CONFIG)


def test_the_iterable_config_lacks_threads() -> None:
    expected = {name: value for name, value in MAP_CONFIG.items() if name != "threads_per_process"}
    config = dataflux_iterable_dataset.Config()
    assert vars(config) == expected
    assert list(inspect.signature(type(config)).parameters) == list(expected)


@each_kind
def test_no_compose_means_no_size_of_composites(kind: type) -> None:
    assert config_of(kind, disable_compose=True).max_composite_object_size == 0


@each_kind
def test_a_dataset_takes_its_arguments_by_their_old_names_and_positions(kind: type) -> None:
    names = list(inspect.signature(kind).parameters)
    assert names == ["project_name", "bucket_name", "config", "data_format_fn", "storage_client"]


@each_kind
def test_a_dataset_keeps_what_it_was_given(bucket: Bucket, kind: type) -> None:
    config = config_of(kind, prefix="train/")
    dataset = kind("project", "bucket", config, data_format_fn=len)
    assert dataset.project_name == "project"
    assert dataset.bucket_name == "bucket"
    assert dataset.config is config
    assert dataset.data_format_fn is len
    assert dataset.storage_client is None


@pytest.mark.parametrize(
    ("retry", "policy"),
    [
        (
            DEFAULT_RETRY.with_deadline(300.0).with_delay(
                initial=2.0, multiplier=1.2, maximum=45.0
            ),
            (sys.maxsize, 2.0, 1.2, 45.0, 300.0),
        ),
        (DEFAULT_RETRY_IF_GENERATION_SPECIFIED, (sys.maxsize, 1.0, 2.0, 60.0, 120.0)),
        (Retry(initial=0, timeout=None), (sys.maxsize, 0.001, 2.0, 60.0, 365 * 86_400.0)),
    ],
    ids=["delays", "conditional", "for ever"],
)
def test_a_retry_of_google_becomes_a_retry_policy(retry: Any, policy: tuple[Any, ...]) -> None:
    ours = policy_of(retry)
    assert policy == (
        ours.max_attempts,
        ours.initial_seconds,
        ours.multiplier,
        ours.max_seconds,
        ours.deadline_seconds,
    )


def test_no_retry_is_one_attempt() -> None:
    assert policy_of(None).max_attempts == 1


def test_a_retry_policy_is_used_as_it_is() -> None:
    policy = aioflux.RetryPolicy(max_attempts=3)
    assert policy_of(policy) is policy


def test_anything_else_is_no_retry(bucket: Bucket) -> None:
    with pytest.raises(TypeError, match=r"google\.api_core\.retry\.Retry.* not float"):
        opened(DataFluxMapStyleDataset, list_retry_config=3.0)


@pytest.mark.parametrize("module", [dataflux_mapstyle_dataset, dataflux_iterable_dataset])
def test_the_default_retry_is_there_as_an_object_of_google(module: Any) -> None:
    assert isinstance(module.MODIFIED_RETRY, Retry)
    assert policy_of(module.MODIFIED_RETRY) == DEFAULT_POLICY
    with pytest.raises(AttributeError, match="no attribute 'MODIFIED'"):
        _ = module.MODIFIED


# Listing.


@each_kind
def test_objects_are_names_and_sizes_sorted(bucket: Bucket, kind: type) -> None:
    for key in ("b", "a/2", "a/10", "猫"):
        bucket.put(key, key.encode())
    assert opened(kind).objects == [("a/10", 4), ("a/2", 3), ("b", 1), ("猫", 3)]


@each_kind
@pytest.mark.parametrize("prefix", ["train/0", "train/00"])
def test_a_prefix_is_the_beginning_of_a_name(bucket: Bucket, kind: type, prefix: str) -> None:
    keys = bucket.fill(12)
    dataset = opened(kind, prefix=prefix)
    assert [name for name, _ in dataset.objects] == [key for key in keys if key.startswith(prefix)]


@each_way
def test_directory_markers_and_old_composites_are_left_out(
    bucket: Bucket, kind: type, read: Read
) -> None:
    bucket.put("train/", b"")
    bucket.put("dataflux-composed-objects/1", b"left")
    bucket.put("train/1", b"one")
    dataset = opened(kind)
    assert dataset.objects == [("train/1", 3)]
    assert read(dataset) == [b"one"]


@each_kind
def test_old_composites_are_listed_by_their_own_prefix(bucket: Bucket, kind: type) -> None:
    bucket.put("dataflux-composed-objects/1", b"left")
    assert list(opened(kind, prefix="dataflux-composed-objects/")) == [b"left"]


@each_kind
def test_objects_of_all_storage_classes_are_listed(bucket: Bucket, kind: type) -> None:
    blobs = bucket.client().bucket("bucket")
    for storage_class in ("ARCHIVE", "NEARLINE", "STANDARD"):
        blob = blobs.blob(storage_class)
        blob.storage_class = storage_class
        blob.upload_from_string(b"x")
    names = [name for name, _ in opened(kind).objects]
    assert names == ["ARCHIVE", "NEARLINE", "STANDARD"]


@each_way
def test_a_prefix_without_objects_is_an_empty_dataset(
    bucket: Bucket, kind: type, read: Read
) -> None:
    dataset = opened(kind, prefix="nothing/")
    assert dataset.objects == []
    assert list(dataset) == []


def test_batches_that_fail_print_nothing(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    bucket.fill(150)
    dataset = opened(DataFluxMapStyleDataset, disable_compose=True)
    for number in range(5, 150, 10):
        bucket.put(f"train/{number:03d}", b"replaced")
    errors = []
    for start in range(0, 150, 10):
        with pytest.raises(aioflux.NotFoundError) as caught:
            dataset.__getitems__(range(start, start + 10))
        errors.append(caught.value)  # and with it the frames
    errors.clear()
    gc.collect()
    assert dataset[0] == b"data of train/000"
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("kind", "position"),
    [(DataFluxMapStyleDataset, 0), (DataFluxIterableDataset, 30)],
    ids=["map", "iterable"],
)
def test_a_format_that_fails_ends_the_requests(bucket: Bucket, kind: type, position: int) -> None:
    bucket.fill(60)

    def fail(data: bytes) -> bytes:
        if data.endswith(b"%03d" % position):
            raise ArithmeticError
        return data

    dataset = opened(kind, disable_compose=True, format_fn=fail)
    bucket.server.faults.add("objects.media", key="train/059", stall_at=0)
    with pytest.raises(ArithmeticError) as caught:
        list(dataset)
    assert caught.value.__traceback__ is not None  # keeps the frames, with all that they hold
    assert dataset._store.stats.num_in_flight == 0


@each_kind
def test_a_missing_bucket_is_an_error_at_once(bucket: Bucket, kind: type) -> None:
    with pytest.raises(aioflux.NotFoundError, match="gs://elsewhere"):
        kind("project", "elsewhere")
    assert bucket.server.stats.operation("objects.list").requests == 1


@each_kind
def test_a_listing_that_fails_temporarily_is_started_again(bucket: Bucket, kind: type) -> None:
    bucket.fill(2)
    bucket.server.faults.add("objects.list", status=503, times=2)
    assert len(opened(kind, list_retry_config=None).objects) == 2


@each_kind
def test_a_listing_that_keeps_failing_raises_its_own_error(bucket: Bucket, kind: type) -> None:
    bucket.server.faults.add("objects.list", status=503)
    with pytest.raises(aioflux.TransientError, match="503"):
        opened(kind, list_retry_config=None, max_listing_retries=2)
    assert bucket.server.stats.operation("objects.list").requests == 2


@each_kind
def test_a_listing_is_retried_by_its_own_config(bucket: Bucket, kind: type) -> None:
    bucket.server.faults.add("objects.list", status=503, times=3)
    retries = {"list_retry_config": ONCE, "download_retry_config": None, "max_listing_retries": 1}
    opened(kind, disable_compose=True, **retries)
    assert bucket.server.stats.operation("objects.list").requests == 4


# Reading.


@each_way
def test_items_are_what_the_format_makes_of_the_bytes(
    bucket: Bucket, kind: type, read: Read
) -> None:
    keys = bucket.fill(70)
    assert read(opened(kind, format_fn=bytes.decode)) == [f"data of {key}" for key in keys]


def test_an_index_may_be_negative_and_not_too_large(bucket: Bucket) -> None:
    bucket.fill(3)
    dataset = opened(DataFluxMapStyleDataset)
    assert len(dataset) == 3
    assert dataset[-1] == b"data of train/002"
    assert dataset.__getitems__([2, 0, 0]) == [dataset[2], dataset[0], dataset[0]]
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"index {index} .* 3 objects of gs://bucket"):
            _ = dataset[index]


@each_way
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_an_object_that_changed_is_an_error_that_names_it(
    bucket: Bucket, kind: type, read: Read, change: str
) -> None:
    """The old class left it out of its batch, or shifted the bytes of others."""
    bucket.fill(8)
    dataset = opened(kind)
    if change == "deleted":
        bucket.client().bucket("bucket").blob("train/005").delete()
    else:
        bucket.put("train/005", b"other data of its")
    with pytest.raises(aioflux.NotFoundError, match="gs://bucket/train/005"):
        read(dataset)


@each_way
def test_a_rejected_read_is_an_error(bucket: Bucket, kind: type, read: Read) -> None:
    """The old class handed out an empty batch."""
    bucket.fill(4)
    dataset = opened(kind)
    bucket.server.faults.add("objects.get", status=403)
    with pytest.raises(PermissionError, match="gs://bucket/train/00"):
        read(dataset)


@each_way
def test_downloads_are_retried_by_their_own_config(bucket: Bucket, kind: type, read: Read) -> None:
    bucket.fill(1)
    dataset = opened(kind, list_retry_config=None, download_retry_config=ONCE)
    bucket.server.faults.add("objects.get", status=503, times=3)
    assert read(dataset) == [b"data of train/000"]
    assert bucket.server.stats.operation("objects.get").requests == 4


@each_way
def test_an_object_stored_as_gzip_is_decompressed(bucket: Bucket, kind: type, read: Read) -> None:
    """As by Google's client, and in a batch no less than by itself."""
    blobs = bucket.client().bucket("bucket")
    for number in range(3):
        blob = blobs.blob(str(number))
        blob.content_encoding = "gzip"
        blob.upload_from_string(gzip.compress(b"text %d" % number))
    bucket.put("plain.gz", gzip.compress(b"text"))
    *texts, plain = read(opened(kind))
    assert texts == [b"text 0", b"text 1", b"text 2"]
    assert gzip.decompress(plain) == b"text"


def fail(data: bytes) -> Any:
    raise ArithmeticError("no such number")


@each_way
def test_a_format_that_fails_names_the_object(bucket: Bucket, kind: type, read: Read) -> None:
    bucket.fill(1)
    with pytest.raises(ArithmeticError) as caught:
        read(opened(kind, format_fn=fail))
    assert caught.value.__notes__ == ["while formatting gs://bucket/train/000"]


def test_a_loop_over_a_map_dataset_prefetches(bucket: Bucket) -> None:
    bucket.fill(5)
    dataset = opened(DataFluxMapStyleDataset)
    items = iter(dataset)
    next(items)
    stats = bucket.server.stats
    wait_until(lambda: stats.operation("objects.get").requests == 5 and not stats.total.in_flight)
    bucket.server.faults.add("objects.get", status=404)
    assert len(list(items)) == 4


def test_threads_are_requests_in_flight(bucket: Bucket) -> None:
    """And no fewer than ours by default, which the old default of 1 would be."""
    bucket.fill(100)
    bucket.server.network = Network(latency_seconds=0.2)
    peaks = []
    for threads in (1, 100):
        dataset = opened(DataFluxMapStyleDataset, threads_per_process=threads, disable_compose=True)
        bucket.server.stats.reset()
        at_once(dataset)
        peaks.append(bucket.server.stats.operation("objects.get").peak_in_flight)
    assert 1 < peaks[0] <= aioflux.TransferOptions().max_in_flight < peaks[1]


class Labelled(DataFluxMapStyleDataset):
    """What users write to have a name with each item."""

    def __getitem__(self, idx: Any) -> Any:
        return self.objects[idx][0], super().__getitem__(idx)


def test_a_loop_over_a_subclass_gives_its_own_items(bucket: Bucket) -> None:
    keys = bucket.fill(2)
    dataset = Labelled("project", "bucket")
    assert list(dataset) == [(key, f"data of {key}".encode()) for key in keys]


# Composites.


@each_kind
@pytest.mark.parametrize(
    "options",
    [{}, {"disable_compose": True}, {"max_composite_object_size": 0}],
    ids=["default", "disabled", "no bytes"],
)
def test_without_composites_there_are_only_a_listing_and_reads(
    bucket: Bucket, kind: type, options: dict[str, Any]
) -> None:
    keys = bucket.fill(40)
    dataset = opened(kind, **options)
    for _ in range(4):
        assert len(list(dataset)) == len(keys)
    assert bucket.server.stats.operation("objects.list").requests == 1
    assert bucket.server.stats.total.requests == 1 + 4 * len(keys)


# `objects` as users change it.


@each_way
def test_a_share_of_the_objects_can_be_set(bucket: Bucket, kind: type, read: Read) -> None:
    keys = bucket.fill(9)
    dataset = opened(kind)
    dataset.objects = dataset.objects[1::4]
    assert read(dataset) == [f"data of {key}".encode() for key in keys[1::4]]


@each_way
def test_objects_in_another_order_are_read_in_it(bucket: Bucket, kind: type, read: Read) -> None:
    keys = bucket.fill(9)
    dataset = opened(kind)
    dataset.objects.reverse()
    assert read(dataset) == [f"data of {key}".encode() for key in reversed(keys)]
    bucket.put("train/005", b"other")
    with pytest.raises(aioflux.NotFoundError, match="train/005"):
        read(dataset)


@each_way
def test_an_object_that_was_not_listed_is_read_by_name(
    bucket: Bucket, kind: type, read: Read
) -> None:
    bucket.fill(2)
    bucket.put("zz", b"more")
    dataset = opened(kind, prefix="train/")
    dataset.objects.insert(0, ("zz", 4))
    for _ in range(5):
        assert read(dataset) == [b"more", b"data of train/000", b"data of train/001"]


def test_a_name_may_join_listed_objects(bucket: Bucket) -> None:
    bucket.fill(8)
    bucket.put("zz", b"more")
    dataset = opened(DataFluxMapStyleDataset, prefix="train/")
    dataset.objects.append(("zz", 4))
    assert at_once(dataset)[-2:] == [b"data of train/007", b"more"]


# Shares of workers.


@given(num_objects=st.integers(0, 200), num_workers=st.integers(1, 50))
def test_workers_take_runs_that_join_and_differ_by_one(num_objects: int, num_workers: int) -> None:
    runs = [
        share_of_worker(num_objects, worker_id=w, num_workers=num_workers)
        for w in range(num_workers)
    ]
    assert [position for run in runs for position in run] == list(range(num_objects))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


# Clients of Google's library.


@each_way
def test_the_endpoint_of_a_client_is_taken_over(server: Bucket, kind: type, read: Read) -> None:
    keys = server.fill(2)
    client = server.client()
    dataset = opened(kind, storage_client=client)
    assert dataset.storage_client is client
    assert read(dataset) == [f"data of {key}".encode() for key in keys]


@each_way
def test_the_endpoint_of_a_client_counts_for_more_than_the_environment(
    server: Bucket, kind: type, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = server.fill(2)
    client = server.client()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    dataset = opened(kind, storage_client=client)
    assert read(dataset) == [f"data of {key}".encode() for key in keys]


@each_way
def test_the_credentials_of_a_client_are_taken_over(
    guarded: Bucket, kind: type, read: Read
) -> None:
    guarded.fill(2)
    dataset = opened(kind, storage_client=guarded.client(Credentials("secret")))
    assert len(read(dataset)) == 2


@each_kind
def test_other_credentials_are_rejected(guarded: Bucket, kind: type) -> None:
    with pytest.raises(aioflux.StorageError, match="gs://bucket"):
        opened(kind, storage_client=guarded.client(), list_retry_config=None)


@each_kind
def test_anything_else_is_no_client(bucket: Bucket, kind: type) -> None:
    with pytest.raises(TypeError, match=r"google.cloud.storage.Client, not str"):
        opened(kind, storage_client="project")


# Pickles.


@each_way
def test_a_pickle_keeps_endpoint_and_anonymous_credentials(
    server: Bucket, kind: type, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = server.fill(3)
    dataset = opened(kind, storage_client=server.client())
    read(dataset)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.storage_client is None
    assert copy.objects == dataset.objects
    assert read(copy) == [f"data of {key}".encode() for key in keys]
    assert dataset.storage_client is not None


@each_kind
def test_no_secret_goes_into_a_pickle(guarded: Bucket, kind: type) -> None:
    dataset = opened(kind, storage_client=guarded.client(Credentials("secret")))
    with pytest.raises(
        TypeError, match="Credentials of storage_client are pickled for worker processes"
    ):
        pickle.dumps(dataset)


def test_a_pickle_without_a_client_uses_the_defaults(bucket: Bucket) -> None:
    bucket.fill(2)
    dataset = pickle.loads(pickle.dumps(opened(DataFluxMapStyleDataset)))
    assert dataset[1] == b"data of train/001"


# The package.


def read_without_google() -> None:
    """End with status 0 if it works; at once, since nothing ends the thread of the event loop."""
    for name in [*sys.modules]:
        if name.startswith(("google.cloud", "google.api_core", "aioflux.compat.dataflux")):
            del sys.modules[name]
    sys.modules |= {"google.cloud": None, "google.api_core": None}  # imports of them fail
    for name in ("dataflux_mapstyle_dataset", "dataflux_checkpoint"):
        importlib.import_module(f"aioflux.compat.dataflux.{name}")
    module: Any = sys.modules["aioflux.compat.dataflux.dataflux_mapstyle_dataset"]
    dataset = module.DataFluxMapStyleDataset("project", "bucket")
    seen = dataset[0], dataset.config.list_retry_config.deadline_seconds
    os._exit(seen != (b"data of train/000", 100_000.0))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_it_works_without_the_packages_of_google(bucket: Bucket) -> None:
    bucket.fill(1)
    process = multiprocessing.get_context("fork").Process(target=read_without_google)
    process.start()
    process.join()
    assert process.exitcode == 0
