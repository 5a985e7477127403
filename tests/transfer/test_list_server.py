"""Listings of a bucket on the embedded server: requests, order and what a prefix may hold."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer() as server:
        yield server


@pytest.fixture
def bucket(server: GCSServer) -> str:
    name = f"test-{uuid.uuid4().hex}"
    server.create_bucket(name)
    return name


def filled(server: GCSServer, bucket: str, keys: list[str]) -> None:
    for key in keys:
        server.put(bucket, key, b"")


async def test_a_large_prefix_is_listed_by_ranges_within_the_bound(
    server: GCSServer, bucket: str
) -> None:
    keys = [f"train/{at:06}.jpg" for at in range(15_000)]
    filled(server, bucket, [*keys, "a", "trai", "train0", "z"])
    async with aioflux.open_store(f"gs://{bucket}", endpoint_url=server.url) as store:
        listing = await store.list_all("train/")
        num_requests = store.stats.num_requests
        assert list(listing.keys) == keys
        assert listing[0] == await store.head(keys[0])
        assert list((await store.list_all()).keys) == ["a", "trai", *keys, "train0", "z"]
    assert num_requests <= 1.2 * 15_000 / 5_000 + 2 * 32


@pytest.mark.parametrize(("limit", "num_requests"), [(0, 0), (1, 1), (6_000, 2)])
async def test_no_page_is_requested_after_the_limit(
    server: GCSServer, bucket: str, limit: int, num_requests: int
) -> None:
    filled(server, bucket, [f"t/{at:06}" for at in range(12_000)])
    async with aioflux.open_store(f"gs://{bucket}", endpoint_url=server.url) as store:
        assert len([meta async for meta in store.list("t/", limit=limit)]) == limit
        assert store.stats.num_requests == num_requests


async def test_one_level_and_a_pattern_are_listed_by_ranges_within_the_bound(
    server: GCSServer, bucket: str
) -> None:
    level = [f"t/{at:05}{'/x' * (at % 2)}" for at in range(12_000)]
    filled(server, bucket, [*level, "s", "u/v"])
    async with aioflux.open_store(f"gs://{bucket}", endpoint_url=server.url) as store:
        listing = await store.list_all("t/", delimiter="/")
        num_requests = store.stats.num_requests
        assert list(listing.keys) == level[::2]
        assert listing.prefixes == [key[:-1] for key in level[1::2]]
        assert num_requests <= 1.2 * 12_000 / 5_000 + 2 * 32
        assert list((await store.list_all(match_glob="t/*")).keys) == level[::2]
        assert store.stats.num_requests - num_requests <= 1.2 * 6_000 / 5_000 + 2 * 32


@pytest.mark.parametrize("num", [0, 10, 5_000])
async def test_a_small_prefix_costs_one_request(server: GCSServer, bucket: str, num: int) -> None:
    filled(server, bucket, [f"k{at}" for at in range(num)])
    async with aioflux.open_store(f"gs://{bucket}", endpoint_url=server.url) as store:
        assert len(await store.list_all()) == num
        assert store.stats.num_requests == 1


async def test_who_stops_early_has_sent_one_request(server: GCSServer, bucket: str) -> None:
    filled(server, bucket, [f"k{at:05}" for at in range(12_000)])
    async with aioflux.open_store(f"gs://{bucket}", endpoint_url=server.url) as store:
        listing = store.list()
        assert (await anext(listing)).key == "k00000"
        await listing.aclose()
        assert store.stats.num_requests == 1


async def test_a_store_prefix_is_no_pattern(server: GCSServer, bucket: str) -> None:
    keys = [f"{prefix}/a.jpg" for prefix in ("[x]*{y,z}?", "x", "[x]ab{y,z}c", "xy")]
    filled(server, bucket, keys)
    uri = f"gs://{bucket}/[x]*{{y,z}}?"
    async with aioflux.open_store(uri, endpoint_url=server.url) as store:
        [meta] = await store.list_all(match_glob="*.jpg")
        assert meta.uri == f"{uri}/a.jpg"


async def test_a_page_is_narrowed_to_fields(server: GCSServer, bucket: str) -> None:
    """User metadata and types are among them, links and owners are not."""
    async with aioflux.open_store(f"gs://{bucket}", endpoint_url=server.url) as store:
        await store.put("a", b"1", content_type="text/csv", metadata={"split": "train"})
        await store.put("b", b"22")
        first, second = await store.list_all()
        assert (first, second) == (await store.head("a"), await store.head("b"))
        assert first.metadata == {"split": "train"}
