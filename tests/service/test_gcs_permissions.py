"""Permissions are asked of the service, and an answer that tells none is no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux import NotFoundError, TransientError, UnsupportedError, sync
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Response
from tests.service.gcs_rig import Answering, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ["storage.objects.create", "storage.objects.get", "storage.objects.delete"]


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


async def test_missing_permissions_come_in_the_order_that_they_were_requested_in(
    server: GCSServer,
) -> None:
    server.state.denied_permissions |= {NAMES[0], NAMES[2]}
    async with aioflux.open_store("gs://bucket/p", endpoint_url=server.url) as store:
        assert await store.missing_permissions(NAMES) == [NAMES[0], NAMES[2]]
        assert await store.missing_permissions(NAMES[::-1]) == [NAMES[2], NAMES[0]]
        assert await store.missing_permissions([NAMES[1]]) == []
        assert store.stats.num_requests == 3
        assert await store.missing_permissions([]) == []
        with pytest.raises(TypeError, match="put it in a list"):
            await store.missing_permissions(NAMES[0])
        assert store.stats.num_requests == 3


async def test_a_bucket_that_is_not_there_has_none(server: GCSServer) -> None:
    async with aioflux.open_store("gs://other/p", endpoint_url=server.url) as store:
        with pytest.raises(NotFoundError, match=r"permissions of gs://other/p/"):
            await store.missing_permissions(NAMES)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"<html>", b'{"permissions": ["a"]}'], ids=repr)
async def test_a_response_that_reports_no_permissions_is_none(
    server: GCSServer, body: bytes
) -> None:
    server.app.hooks += (Answering(lambda _: Response(body=body)),)
    async with opened(server.url) as service:
        with pytest.raises(TransientError, match="not a list of permissions"):
            await service.granted_permissions(NAMES)


def test_memory_permits_everything() -> None:
    with sync.open_store("memory://permissions") as store:
        assert store.missing_permissions(NAMES) == []


@pytest.mark.parametrize("uri", ["s3://bucket/p", "az://account/container/p", "file:///tmp/p"])
def test_a_service_without_a_request_for_permissions_says_so(uri: str) -> None:
    """It would otherwise answer that none is missing without asking anyone."""
    endpoint = None if uri.startswith("file") else "http://127.0.0.1:9"
    with sync.open_store(uri, endpoint_url=endpoint) as store:
        with pytest.raises(UnsupportedError, match=f"permissions of {uri}/: .* try the operation"):
            store.missing_permissions(NAMES)
        assert store.missing_permissions([]) == []
