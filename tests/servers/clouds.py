"""Empty buckets on each cloud with one interface, so that the same test runs on all of them.

The interface is the part of `GCSServer` that other servers have, too: a test that needs more
(faults, counted requests) runs on `gs://` only. The bucket's name is `bucket` in this interface,
and its uris begin with `root`.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from tests.servers.azurite import Azurite
    from tests.servers.seaweedfs import SeaweedFS

__all__ = ["AzureBucket", "GCSBucket", "S3Bucket", "open_bucket"]


class GCSBucket(GCSServer):
    """A server for one test.

    Attributes:
        root: Uri of the bucket.
    """

    root = "gs://bucket"


class _Stats:
    """Counters of another server."""

    def __init__(self, bucket: S3Bucket | AzureBucket) -> None:
        self._bucket = bucket

    @property
    def open_uploads(self) -> int:
        return self._bucket.num_open_uploads()


class S3Bucket:
    """A prefix on a server that tests share.

    Attributes:
        url: Root url of the server.
        root: Uri of the prefix.
        stats: Its counters.
    """

    def __init__(self, server: SeaweedFS) -> None:
        self._door = server.door()
        self._prefix = f"{uuid.uuid4().hex}/"
        self.url = server.url
        self.root = f"s3://bucket/{self._prefix[:-1]}"
        self.stats = _Stats(self)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._door.put_object(Bucket=bucket, Key=self._prefix + key, Body=data)

    def get(self, bucket: str, key: str) -> bytes:
        with self._door.get_object(Bucket=bucket, Key=self._prefix + key)["Body"] as body:
            data: bytes = body.read()
        return data

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self._door.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=self._prefix + prefix
        )
        return [self._own(each["Key"]) for page in pages for each in page.get("Contents", ())]

    def num_open_uploads(self) -> int:
        found = self._door.list_multipart_uploads(Bucket="bucket", Prefix=self._prefix)
        return len(found.get("Uploads", ()))

    def _own(self, key: str) -> str:
        return key.removeprefix(self._prefix)


class AzureBucket:
    """A prefix in a container of a server that tests share.

    Attributes:
        url: Root url of the server.
        root: Uri of the prefix.
        stats: Its counters.
    """

    def __init__(self, server: Azurite, door: Any) -> None:
        self._door = door
        self._prefix = f"{uuid.uuid4().hex}/"
        self.url = server.url
        self.root = f"az://{server.account}/container/{self._prefix[:-1]}"
        self.stats = _Stats(self)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._door.upload_blob(self._prefix + key, bytes(data), overwrite=True)

    def get(self, bucket: str, key: str) -> bytes:
        data: bytes = self._door.download_blob(self._prefix + key).readall()
        return data

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        found = self._door.list_blob_names(name_starts_with=self._prefix + prefix)
        return [key.removeprefix(self._prefix) for key in found]

    def num_open_uploads(self) -> int:
        """Return 0: Azure has no open uploads; it discards uncommitted blocks after a week."""
        return 0


@contextlib.contextmanager
def open_bucket(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Create an empty bucket, and set the variables for its endpoint and credentials."""
    if cloud == "gs":
        with GCSBucket(buckets=("bucket",)) as bucket:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
            yield bucket
    elif cloud == "s3":
        seaweedfs: SeaweedFS = request.getfixturevalue("seaweedfs")
        seaweedfs.sign_in(monkeypatch)
        yield S3Bucket(seaweedfs)
    else:
        azurite: Azurite = request.getfixturevalue("azurite")
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"AccountName={azurite.account};AccountKey={azurite.key};"
            f"BlobEndpoint={azurite.url}/{azurite.account}",
        )
        yield AzureBucket(azurite, azurite.door())
