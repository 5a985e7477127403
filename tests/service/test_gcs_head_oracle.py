"""`head` returns what `blob.reload` of google-cloud-storage returns, for 20 kinds of metadata."""

from __future__ import annotations

import base64
import gzip
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

import aioflux
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = b"0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


@pytest.fixture(scope="module")
def bucket(server: GCSServer) -> Iterator[storage.Bucket]:
    options = {"api_endpoint": server.url}
    with storage.Client("p", AnonymousCredentials(), client_options=options) as client:
        yield client.bucket("bucket")


def upload(data: bytes = DATA, content_type: str = "x/y", **fields: Any) -> Callable[..., None]:
    """Return a function that uploads a blob with these fields."""

    def run(blob: storage.Blob) -> None:
        for name, value in fields.items():
            setattr(blob, name, value)
        blob.upload_from_string(data, content_type=content_type)

    return run


def patch(blob: storage.Blob) -> None:
    upload(metadata={"a": "1", "b": "2"})(blob)
    blob.metadata = {"a": None, "c": "3"}
    blob.content_language = "en"
    blob.patch()


def update(blob: storage.Blob) -> None:
    upload(metadata={"a": "1"}, cache_control="no-store")(blob)
    blob.metadata = {"z": "26"}
    blob.update()


def replace(blob: storage.Blob) -> None:
    upload(metadata={"a": "1"})(blob)
    upload(b"other", metadata={"b": "2"})(blob)


def rewrite(blob: storage.Blob) -> None:
    source = blob.bucket.blob("source of a rewrite")
    upload(metadata={"a": "1"}, content_encoding="gzip")(source)
    blob.rewrite(source)


def change_class(blob: storage.Blob) -> None:
    upload(metadata={"a": "1"})(blob)
    blob.update_storage_class("ARCHIVE")


def compose(blob: storage.Blob) -> None:
    source = blob.bucket.blob("source of a compose")
    upload()(source)
    blob.content_type = "text/csv"
    blob.metadata = {"rows": "2"}
    blob.compose([source, source])


def resumable(blob: storage.Blob) -> None:
    blob.chunk_size = 256 * 1024
    upload(bytes(600_000), metadata={"a": "1"})(blob)


KINDS: dict[str, Callable[[storage.Blob], None]] = {
    "plain": upload(),
    "empty": upload(b""),
    "no content type": upload(content_type=""),
    "content type with parameters": upload(content_type='text/plain; charset="utf-8"'),
    "content encoding": upload(gzip.compress(DATA), content_encoding="gzip"),
    "content encoding of no name": upload(content_encoding="identity"),
    "content disposition": upload(content_disposition='attachment; filename="a b"'),
    "content language": upload(content_language="de"),
    "cache control": upload(cache_control="no-store, max-age=0"),
    "custom time": upload(custom_time=datetime(2024, 2, 29, 1, 2, 3, tzinfo=UTC)),
    "nearline": upload(storage_class="NEARLINE"),
    "changed storage class": change_class,
    "metadata": upload(metadata={"label": "cat", "Mixed-Case": "Value"}),
    "metadata of unicode": upload(metadata={"käse": "röt \u732b \U0001f600"}),
    "metadata of empty and spaced texts": upload(metadata={"empty": "", "spaced": " a  b "}),
    "much metadata": upload(metadata={f"name-{number}": "v" * 70 for number in range(100)}),
    "patched": patch,
    "updated": update,
    "replaced": replace,
    "rewritten": rewrite,
    "composed": compose,
    "resumable": resumable,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("is_pinned", [False, True], ids=["current", "pinned"])
async def test_head_returns_what_the_client_of_google_returns(
    server: GCSServer, bucket: storage.Bucket, make: Callable[..., None], is_pinned: bool
) -> None:
    blob = bucket.blob("p/käse a/%2F?#+")
    make(blob)
    blob.reload()
    async with aioflux.open_store("gs://bucket/p", endpoint_url=server.url) as store:
        meta = await store.head((await store.list_all())[0] if is_pinned else "käse a/%2F?#+")
    assert meta == aioflux.ObjectMeta(
        key="käse a/%2F?#+",
        uri="gs://bucket/p/käse a/%2F?#+",
        size=blob.size,
        etag=blob.etag,
        generation=str(blob.generation),
        crc32c=int.from_bytes(base64.b64decode(blob.crc32c), "big"),
        updated=blob.time_created,
        content_type=blob.content_type or "",
        content_encoding=blob.content_encoding or "",
        content_disposition=blob.content_disposition or "",
        cache_control=blob.cache_control or "",
        storage_class=blob.storage_class,
        metadata=blob.metadata or {},
    )
