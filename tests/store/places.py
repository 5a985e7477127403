"""The places that stores are tested on, each with its back door.

Environment:
    AIOFLUX_TEST_GCS_URL: Another server of the Cloud Storage API, asked without credentials, for
        the tests of a server that nobody can look into; by default `aioflux serve` is started.
    AIOFLUX_TEST_GCS_BUCKET: An existing bucket on it, "bucket" by default.
    AIOFLUX_TEST_GCS_LACKS: What it cannot do: fields of `SuiteCapabilities`, with commas.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

import google_crc32c
from botocore.credentials import Credentials
from google.auth.credentials import AnonymousCredentials

import aioflux
from aioflux.testing.faults import FlakyStore, random_faults
from tests.servers.process_state import memory_bucket

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer
    from tests.servers.moto import Moto
    from tests.servers.seaweedfs import SeaweedFS

OTHER_URL = os.environ.get("AIOFLUX_TEST_GCS_URL", "")
OTHER_BUCKET = os.environ.get("AIOFLUX_TEST_GCS_BUCKET", "bucket")
OTHER_LACKS = [name for name in os.environ.get("AIOFLUX_TEST_GCS_LACKS", "").split(",") if name]


class Place(Protocol):
    """An empty prefix of some storage, with direct access to its objects."""

    def open(self, **settings: Any) -> aioflux.Store: ...

    def write(self, key: str, data: bytes) -> None: ...

    def read(self, key: str) -> bytes: ...


class MemoryPlace:
    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._bucket = memory_bucket(f"test-{uuid.uuid4().hex}")

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(f"memory://{self._bucket.name}/{self._prefix}", **settings)

    def write(self, key: str, data: bytes) -> None:
        self._bucket.store(self._prefix + key, data)

    def read(self, key: str) -> bytes:
        return self._bucket.objects[self._prefix + key].data


class LocalPlace:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(f"file://{self.root}", **settings)

    def write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root.with_name(f"written-{uuid.uuid4().hex}")
        temporary.write_bytes(data)
        # The kernel's file times have a resolution of 4 ms, so that two writes may get the same.
        os.utime(temporary, ns=(0, time.time_ns()))
        temporary.replace(path)

    def read(self, key: str) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except OSError as exc:
            raise KeyError(key) from exc


class GCSPlace:
    """A prefix on the embedded server; the options are those of `aioflux.open_store`."""

    def __init__(self, server: GCSServer, **options: Any) -> None:
        self._server = server
        self._prefix = f"{uuid.uuid4().hex}/"
        self.endpoint_url = server.url
        self._options = {"endpoint_url": server.url, **options}

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(f"gs://bucket/{self._prefix}", **self._options, **settings)

    def write(self, key: str, data: bytes) -> None:
        self._server.put("bucket", self._prefix + key, data)

    def read(self, key: str) -> bytes:
        whole = self._prefix + key
        if whole not in self._server.keys("bucket", whole):
            raise KeyError(key)
        return self._server.get("bucket", whole)


def tls_place(server: GCSServer) -> GCSPlace:
    context = server.client_ssl_context()
    return GCSPlace(server, ssl_context=context, credentials=AnonymousCredentials())


class RemotePlace:
    """A prefix on any GCS server without credentials; tests access it with its JSON API."""

    def __init__(self, url: str, bucket: str) -> None:
        self._url = url
        self._bucket = bucket
        self._prefix = f"{uuid.uuid4().hex}/"
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def open(self, **settings: Any) -> aioflux.Store:
        uri = f"gs://{self._bucket}/{self._prefix}"
        return aioflux.open_store(uri, endpoint_url=self._url, **settings)

    def write(self, key: str, data: bytes) -> None:
        query = urlencode({"uploadType": "media", "name": self._prefix + key})
        self._ask("POST", f"/upload/storage/v1/b/{self._bucket}/o?{query}", data)

    def read(self, key: str) -> bytes:
        return self._ask("GET", f"{self._path(self._prefix + key)}?alt=media")

    def close(self) -> None:
        """Delete the remaining objects of the test."""
        query = urlencode({"prefix": self._prefix})
        while found := json.loads(self._ask("GET", f"{self._path()}?{query}")).get("items"):
            for item in found:
                self._ask("DELETE", self._path(item["name"]))
        self._connection.close()

    def _path(self, name: str | None = None) -> str:
        objects = f"/storage/v1/b/{self._bucket}/o"
        return objects if name is None else f"{objects}/{quote(name, safe='')}"

    def _ask(self, method: str, target: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        self._connection.request(method, target, body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status == 404:
            raise KeyError(target)
        assert answer.status < 300, f"{method} {target}: {answer.status} {data[:200]!r}"
        return data


class S3Place:
    """A prefix on an S3 server in another process; tests access it with boto3.

    Args:
        server: The server.
        has_checksums: The back door sends a crc32c with each object.
        access: Fields of `aioflux.S3Access`.
    """

    def __init__(
        self, server: SeaweedFS | Moto, *, has_checksums: bool = False, **access: Any
    ) -> None:
        self._client = server.door()
        self._has_checksums = has_checksums
        self._prefix = f"{uuid.uuid4().hex}/"
        self.endpoint_url = server.url
        self.credentials = aioflux.S3Access(
            credentials=Credentials(server.access_key, server.secret_key), **access
        )

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(
            f"s3://bucket/{self._prefix}",
            endpoint_url=self.endpoint_url,
            credentials=self.credentials,
            **settings,
        )

    def write(self, key: str, data: bytes) -> None:
        sums: dict[str, str] = {}
        if self._has_checksums:
            checksum = google_crc32c.value(data).to_bytes(4, "big")
            sums["ChecksumCRC32C"] = base64.b64encode(checksum).decode()
        self._client.put_object(Bucket="bucket", Key=self._prefix + key, Body=data, **sums)

    def read(self, key: str) -> bytes:
        try:
            answer = self._client.get_object(Bucket="bucket", Key=self._prefix + key)
        except self._client.exceptions.NoSuchKey as exc:
            raise KeyError(key) from exc
        with answer["Body"] as body:
            data: bytes = body.read()
        return data


class MotoPlace(S3Place):
    """A prefix on moto, which checks no signatures; tests access it with plain HTTP."""

    def __init__(self, server: Moto, *, endpoint_url: str = "", **access: Any) -> None:
        super().__init__(server, checksums=False, **access)
        self.endpoint_url = endpoint_url or server.url
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc)

    def write(self, key: str, data: bytes) -> None:
        target = "/bucket/" + quote(self._prefix + key)
        # moto rejects an unsigned request that replaces an object.
        headers = {"Content-Type": "text/plain", "Authorization": "AWS id:signature"}
        self._connection.request("PUT", target, data, headers)
        answer = self._connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()

    def close(self) -> None:
        self._connection.close()


class FlakyPlace:
    """Another place, with a share of requests that fail and are retried."""

    def __init__(self, place: Place, *, seed: object, loses: bool = True) -> None:
        self._place = place
        self._draw = random_faults(random.Random(str(seed)), share=0.1, loses=loses)

    def open(self, **settings: Any) -> aioflux.Store:
        plain = self._place.open(**settings)
        return FlakyStore(
            plain.uri,
            draw=self._draw,
            transfer=plain.transfer,
            retry=aioflux.RetryPolicy(max_attempts=12, initial_seconds=1e-4, max_seconds=1e-3),
            timeouts=aioflux.Timeouts(),
            endpoint_url=getattr(self._place, "endpoint_url", None),
            credentials=getattr(self._place, "credentials", None),
        )

    def write(self, key: str, data: bytes) -> None:
        self._place.write(key, data)

    def read(self, key: str) -> bytes:
        return self._place.read(key)
