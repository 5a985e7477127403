"""MapDataset: a length, indices and batches over a pinned, sorted listing."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.data import IterableDataset, MapDataset, Sample
from aioflux.testing.gcs_server import Network
from tests.data.transforms import give_token, key_of, refuse

if TYPE_CHECKING:
    from tests.data.conftest import Bucket

pytestmark = pytest.mark.clouds("gs", "s3", "az")


def test_a_dataset_has_a_sample_for_each_object(bucket: Bucket) -> None:
    bucket.fill(12)
    dataset = MapDataset(bucket.uri)
    assert len(dataset) == 12
    sample = dataset[3]
    assert isinstance(sample, Sample)
    assert (sample.key, sample.data) == ("003", b"data of 003")
    assert sample.uri == f"{bucket.uri}/003"
    assert sample.meta.size == 11


def test_samples_are_sorted_by_key(bucket: Bucket) -> None:
    for key in ("b", "ä", "a/2", "a", "B"):
        bucket.put(key, b"x")
    dataset = MapDataset(bucket.uri, transform=key_of)
    assert [dataset[index] for index in range(5)] == ["B", "a", "a/2", "b", "ä"]


def test_a_negative_index_counts_from_the_end(bucket: Bucket) -> None:
    bucket.fill(3)
    assert MapDataset(bucket.uri, transform=key_of)[-1] == "002"


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_outside_is_an_index_error(bucket: Bucket, index: int) -> None:
    bucket.fill(3)
    with pytest.raises(IndexError, match="out of range"):
        MapDataset(bucket.uri)[index]


def test_a_slice_is_no_index(bucket: Bucket) -> None:
    bucket.fill(3)
    with pytest.raises(TypeError, match="'slice' object cannot be interpreted as an integer"):
        MapDataset(bucket.uri)[1:3]  # type: ignore[misc]


def test_a_batch_comes_in_the_order_of_its_indices(bucket: Bucket) -> None:
    bucket.fill(9)
    dataset = MapDataset(bucket.uri, transform=key_of)
    assert dataset.__getitems__([7, 0, 7, -1]) == ["007", "000", "007", "008"]


@pytest.mark.clouds("gs")
def test_a_batch_is_fetched_at_once(bucket: Bucket) -> None:
    bucket.fill(8)
    bucket.server.network = Network(latency_seconds=0.2)
    MapDataset(bucket.uri).__getitems__(range(8))
    assert bucket.server.stats.operation("objects.get").peak_in_flight > 1


@pytest.mark.parametrize("kind", [MapDataset, IterableDataset])
def test_requests_in_flight_hide_the_latency_by_default(bucket: Bucket, kind: Any) -> None:
    assert in_flight(kind.from_keys(bucket.uri, ["a"])) == 256
    assert in_flight(kind.from_keys(bucket.uri, ["a"], transfer=None)) == 256
    few = aioflux.TransferOptions(max_in_flight=3)
    assert in_flight(kind.from_keys(bucket.uri, ["a"], transfer=few)) == 3


def store_of(dataset: Any) -> Any:
    return dataset._source._stores[0].reader.store


def in_flight(dataset: Any) -> Any:
    return store_of(dataset).transfer.max_in_flight


def test_an_empty_listing_is_an_error_that_names_the_uri(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(aioflux.NotFoundError, match=f"{bucket.root}/trian/") as caught:
        MapDataset(f"{bucket.root}/trian")
    assert caught.value.uri == f"{bucket.root}/trian/"


@pytest.mark.clouds("gs")
def test_markers_of_directories_are_left_out(bucket: Bucket) -> None:
    bucket.fill(1)
    bucket.put("dir/", b"")
    bucket.put("full/", b"x")
    bucket.put("zero", b"")
    keys = MapDataset(bucket.uri, transform=key_of).__getitems__(range(3))
    assert keys == ["000", "full/", "zero"]


@pytest.mark.clouds("gs")
def test_from_keys_sends_no_listing(bucket: Bucket) -> None:
    bucket.fill(4)
    dataset = MapDataset.from_keys(bucket.uri, ["003", "001", "003"])
    assert [sample.data for sample in dataset.__getitems__([0, 1, 2])] == [
        b"data of 003",
        b"data of 001",
        b"data of 003",
    ]
    assert bucket.server.stats.operation("objects.list").requests == 0


def test_from_keys_with_a_filtered_listing_is_pinned(bucket: Bucket) -> None:
    bucket.fill(4)
    with aioflux.sync.open_store(bucket.uri) as store:
        odd = [meta for meta in store.list() if int(meta.key) % 2]
    dataset = MapDataset.from_keys(bucket.uri, odd, transform=key_of)
    assert dataset.__getitems__([0, 1]) == ["001", "003"]
    bucket.put("003", b"other")
    with pytest.raises(aioflux.NotFoundError, match=f"{bucket.uri}/003"):
        dataset[1]


@pytest.mark.parametrize("keys", ["abc", ["a", b"b"], [1]], ids=["string", "mixed", "number"])
def test_keys_of_another_kind_are_a_type_error(keys: list[str]) -> None:
    with pytest.raises(TypeError, match="keys must"):
        MapDataset.from_keys("memory://bucket", keys)


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_an_object_that_changed_since_the_listing_is_an_error(bucket: Bucket, change: str) -> None:
    bucket.fill(5)
    dataset = MapDataset(bucket.uri)
    if change == "deleted":
        with aioflux.sync.open_store(bucket.uri) as store:
            store.delete("003")
    else:
        bucket.put("003", b"other")
    with pytest.raises(aioflux.NotFoundError) as caught:
        dataset.__getitems__(range(5))
    assert caught.value.uri == f"{bucket.uri}/003"


def test_a_transform_that_fails_names_the_sample(bucket: Bucket) -> None:
    bucket.fill(1)
    with pytest.raises(ArithmeticError) as caught:
        MapDataset(bucket.uri, transform=refuse)[0]
    assert caught.value.__notes__ == [f"while transforming {bucket.uri}/000"]


@pytest.mark.clouds("gs")
def test_an_error_ends_all_requests_while_it_is_referenced(bucket: Bucket) -> None:
    bucket.fill(2)
    bucket.server.faults.add("objects.media", key="train/001", stall_at=0, times=1)
    impatient = aioflux.Timeouts(progress_seconds=0.5)
    dataset = MapDataset(bucket.uri, transform=refuse, timeouts=impatient)
    with pytest.raises(ArithmeticError) as caught:
        dataset.__getitems__([0, 1])
    assert caught.value.__traceback__ is not None  # keeps the frames, with all that they hold
    assert store_of(dataset).stats.num_in_flight == 0


@pytest.mark.clouds("gs")
def test_a_batch_of_unknown_sizes_is_transformed_while_it_is_read(bucket: Bucket) -> None:
    keys = bucket.fill(20)
    received = []

    def transform(sample: Sample) -> str:
        received.append(store_of(dataset).stats.num_requests)
        return sample.key

    options = aioflux.TransferOptions(max_in_flight=2, max_in_flight_bytes=3)
    dataset = MapDataset.from_keys(bucket.uri, keys, transform=transform, transfer=options)
    assert dataset.__getitems__(range(20)) == keys
    assert received[0] < 20


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("max_bytes", [3, 1024])
def test_a_large_batch_is_transformed_while_it_is_read(bucket: Bucket, max_bytes: int) -> None:
    """Its objects need not be in memory at the same time."""
    bucket.fill(20)
    received = []

    def transform(sample: Sample) -> str:
        received.append(store_of(dataset).stats.num_requests)
        return sample.key

    options = aioflux.TransferOptions(max_in_flight=2, max_in_flight_bytes=max_bytes)
    dataset = MapDataset(bucket.uri, transform=transform, transfer=options)
    num_listing = store_of(dataset).stats.num_requests
    assert dataset.__getitems__(range(20)) == [f"{number:03}" for number in range(20)]
    assert (received[0] - num_listing == 20) == (max_bytes == 1024)


@pytest.mark.clouds("gs")
def test_retries_of_a_batch_that_fails_are_counted(bucket: Bucket) -> None:
    bucket.fill(1)
    bucket.server.faults.add("objects.media", status=503, times=1)
    dataset = MapDataset(bucket.uri, transform=refuse)
    with pytest.raises(ArithmeticError):
        dataset[0]
    assert dataset.stats.num_retries == 1


@pytest.mark.clouds("gs")
def test_a_pickle_keeps_the_settings(bucket: Bucket) -> None:
    bucket.fill(2)
    options = aioflux.TransferOptions(max_in_flight=3)
    dataset = MapDataset(
        bucket.uri,
        transform=key_of,
        transfer=options,
        credentials=give_token,
        endpoint_url=bucket.server.url,
    )
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[1] == "001"
    assert store_of(copy).transfer == options


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="shuffle"):
        MapDataset("memory://bucket", shuffle=True)


def test_construction_leaves_no_connection_open(bucket: Bucket) -> None:
    bucket.fill(2)
    dataset = MapDataset(bucket.uri)
    assert store_of(dataset)._store._sessions.open_sessions() == []


@pytest.mark.clouds("gs")
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"shuffle": True}, r"loader\(dataset, shuffle=True\)"),
        ({"seed": 3}, r"loader\(dataset, seed=3\)"),
        ({"shuffle": True, "rank": 0}, r"ObjectSampler\(dataset, rank=0, shuffle=True\)"),
    ],
)
def test_an_order_is_rejected_with_a_hint_how_to_set_it(
    bucket: Bucket, options: dict[str, Any], remedy: str
) -> None:
    bucket.fill(1)
    with pytest.raises(TypeError, match=f"MapDataset takes no .*{remedy}"):
        MapDataset(bucket.uri, **options)
    with pytest.raises(TypeError, match=r"MapDataset takes no shufle; it takes .*compose"):
        MapDataset(bucket.uri, shufle=True)
