"""google-cloud-storage's XML multipart uploads, unmodified."""

from __future__ import annotations

import base64
import hashlib
import os
from typing import TYPE_CHECKING

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager
from google.cloud.storage._media.requests import XMLMPUContainer, XMLMPUPart
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MIB = 1024 * 1024


@pytest.fixture(params=["memory", "root"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GCSServer]:
    root = tmp_path / "root" if request.param == "root" else None
    with GCSServer(buckets=["bucket"], root=root) as running:
        yield running


@pytest.fixture
def client(server: GCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[storage.Client]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    client = storage.Client(project="p", credentials=AnonymousCredentials())
    yield client
    client.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(11 * MIB + 17))
    return path


@pytest.mark.parametrize("checksum", ["crc32c", "md5", None])
def test_upload_in_parts_side_by_side(server, client, source, checksum):
    """upload_chunks_concurrently stores the file, its type and its metadata."""
    blob = client.bucket("bucket").blob("dir/käse %2F")
    blob.metadata = {"colour": "red"}
    blob.content_type = "x/y"
    transfer_manager.upload_chunks_concurrently(
        str(source),
        blob,
        chunk_size=5 * MIB,
        worker_type="thread",
        max_workers=3,
        checksum=checksum,
    )
    assert server.get("bucket", "dir/käse %2F") == source.read_bytes()
    blob.reload()
    assert (blob.content_type, blob.metadata) == ("x/y", {"colour": "red"})
    assert blob.md5_hash is None
    assert server.state.multipart_uploads == {}


def test_download_in_ranges_side_by_side(server, client, source, tmp_path):
    """An object uploaded in parts is downloaded by download_chunks_concurrently."""
    server.put("bucket", "key", source.read_bytes())
    blob = client.bucket("bucket").blob("key")
    target = tmp_path / "target"
    transfer_manager.download_chunks_concurrently(
        blob, str(target), chunk_size=3 * MIB, worker_type="thread"
    )
    assert target.read_bytes() == source.read_bytes()


def test_a_part_too_small_fails_the_upload_and_leaves_nothing(server, client, source):
    """EntityTooSmall reaches the caller, and the client's cancel ends the upload."""
    blob = client.bucket("bucket").blob("key")
    with pytest.raises(InvalidResponse):
        transfer_manager.upload_chunks_concurrently(
            str(source), blob, chunk_size=MIB, worker_type="thread"
        )
    assert server.keys("bucket") == []
    assert server.state.multipart_uploads == {}


def test_the_steps_of_an_upload(server, client, source):
    """initiate, upload, finalize: parts may come in any order, and one may be sent again."""
    url = f"{server.url}/bucket/key"
    container = XMLMPUContainer(url, str(source))
    container.initiate(client._http, content_type="x/y")
    for number, start, end in [(2, 5 * MIB, 11 * MIB), (1, 100, 200), (1, 0, 5 * MIB)]:
        part = XMLMPUPart(url, container.upload_id, str(source), start, end, number)
        part.upload(client._http)
        container.register_part(number, part.etag)
    container._parts = dict(sorted(container._parts.items()))
    container.finalize(client._http)
    assert server.get("bucket", "key") == source.read_bytes()[: 11 * MIB]
    with pytest.raises(InvalidResponse):
        container.finalize(client._http)


def test_a_cancelled_upload_is_gone(server, client, source):
    """cancel forgets the parts, and no further part is taken."""
    url = f"{server.url}/bucket/key"
    container = XMLMPUContainer(url, str(source))
    container.initiate(client._http, content_type="x/y")
    part = XMLMPUPart(url, container.upload_id, str(source), 0, 10, 1)
    part.upload(client._http)
    container.cancel(client._http)
    assert server.state.multipart_uploads == {}
    with pytest.raises(InvalidResponse):
        XMLMPUPart(url, container.upload_id, str(source), 0, 10, 2).upload(client._http)


def test_a_part_whose_checksum_differs_is_rejected(server, client, source):
    """The server's BadDigest is the client's DataCorruption."""
    url = f"{server.url}/bucket/key"
    container = XMLMPUContainer(url, str(source))
    container.initiate(client._http, content_type="x/y")
    wrong = hashlib.md5(b"other").digest()
    headers = {"Content-MD5": base64.b64encode(wrong).decode()}
    part = XMLMPUPart(url, container.upload_id, str(source), 0, 10, 1, headers=headers)
    with pytest.raises(DataCorruption):
        part.upload(client._http)
    assert server.state.multipart_uploads[container.upload_id].parts == {}
