"""Objects that outlive the server: `GCSServer(root=...)`."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

import google_crc32c
import pytest

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server._records import Attributes
from tests.gcs_server.conftest import Received

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024 * 1024
NASTY_KEYS = [
    "../../x",
    "/etc/passwd",
    "a//b",
    "%2e%2e",
    "%2e%2e/%2e%2e/x",
    "..\\..\\x",
    "~/x",
    "a/../../../x",
    "bucket.json",
    "k" * 1024,
    "\u732b" * 341,
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outer" / "root"


def exchange(
    server: GCSServer,
    method: str,
    target: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> Received:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request(method, target, body, headers or {})
    response = connection.getresponse()
    received = Received(response.status, response.headers, response.read())
    connection.close()
    return received


def request(server: GCSServer, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    response = exchange(server, method, target, body)
    return response.status, response.body


def files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def test_objects_and_buckets_survive_a_restart(root):
    """Bytes, metadata and generations are those of before."""
    attributes = Attributes(
        content_type="x/y", metadata={"colour": "red"}, cache_control="no-store"
    )
    with GCSServer(root=root, buckets=["bucket", "empty"]) as server:
        server.state.put("bucket", "key", [b"da", b"ta"], attributes)
        server.state.put("bucket", "zero", [])
        before = server.state.get("bucket", "key")
        server.state.update(before, attributes)
        before = server.state.get("bucket", "key")
    with GCSServer(root=root) as server:
        after = server.state.get("bucket", "key")
        assert server.get("bucket", "key") == b"data"
        assert server.get("bucket", "zero") == b""
        assert server.keys("empty") == []
        assert server.state.buckets["bucket"].generation
    for name in ("generation", "metageneration", "size", "crc32c", "md5", "etag", "attributes"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.time_created_us == before.time_created_us


def test_what_was_deleted_stays_deleted(root):
    """Neither objects nor buckets come back, and their bytes are gone."""
    with GCSServer(root=root, buckets=["bucket", "gone"]) as server:
        server.put("bucket", "a", b"1" * 100)
        server.put("bucket", "a", b"2" * 100)
        assert request(server, "DELETE", "/bucket/a")[0] == 204
        assert request(server, "DELETE", "/gone")[0] == 204
    assert files(root / "data") == set()
    with GCSServer(root=root) as server:
        assert list(server.state.buckets) == ["bucket"]
        assert server.keys("bucket") == []


def test_generations_never_repeat_though_the_clock_steps_back(root):
    """The first generation of a new run is above all of the run before, deleted ones included."""
    with GCSServer(root=root, buckets=["bucket"]) as server:
        last = server.put("bucket", "key", b"x")
        server.state.delete("bucket", "key")
    generations = root / "generations"
    assert int(generations.read_text()) > last
    generations.write_text(str(1 << 62))  # as if the clock had stepped back since
    with GCSServer(root=root) as server:
        assert server.put("bucket", "key", b"y") > 1 << 62


def test_bytes_without_a_record_are_swept(root):
    """A server that was killed between its two writes leaves them."""
    with GCSServer(root=root, buckets=["bucket"]) as server:
        server.put("bucket", "key", b"x")
    kept = files(root / "data")
    (root / "data" / ("0" * 32)).write_bytes(b"y")
    with GCSServer(root=root) as server:
        assert files(root / "data") == kept
        assert server.get("bucket", "key") == b"x"


def test_a_directory_of_another_version_is_an_error(root):
    with GCSServer(root=root):
        pass
    (root / "data" / "00").mkdir(parents=True)
    with pytest.raises(ValueError, match="another version"), GCSServer(root=root):
        pass


def test_files_of_other_programs_are_kept(root):
    names = [f"{number}.csv" for number in range(6)]
    (root / "data").mkdir(parents=True)
    for name in names:
        (root / "data" / name).touch()
    with (
        pytest.raises(ValueError, match=r"\.csv is not a file of this server"),
        GCSServer(root=root),
    ):
        pass
    assert sorted(path.name for path in (root / "data").iterdir()) == names


def test_an_open_upload_goes_on_after_a_restart(root):
    """Parts of before and after a restart make one object; its upload is then gone for good."""
    big = bytes(5 * MIB)
    with GCSServer(root=root, buckets=["bucket"]) as server:
        _, body = request(server, "POST", "/bucket/key?uploads")
        upload_id = body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
        for data in (b"not this", big):
            status, _ = request(
                server, "PUT", f"/bucket/key?partNumber=1&uploadId={upload_id}", data
            )
            assert status == 200
    with GCSServer(root=root) as server:
        request(server, "PUT", f"/bucket/key?partNumber=2&uploadId={upload_id}", b"tail")
        parts = server.state.multipart_uploads[upload_id].parts.values()
        rows = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{part.etag}</ETag></Part>"
            for part in parts
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        assert request(server, "POST", f"/bucket/key?uploadId={upload_id}", body)[0] == 200
        assert server.get("bucket", "key") == big + b"tail"
    with GCSServer(root=root) as server:
        assert server.state.multipart_uploads == {}
        assert server.get("bucket", "key") == big + b"tail"
    assert len(files(root / "data")) == 2


def test_a_resumable_upload_goes_on_after_a_restart(root):
    """The bytes received before count; a finished upload still returns its object."""
    data = os.urandom(3 * 256 * 1024 + 5)
    half = 2 * 256 * 1024
    path = "/upload/storage/v1/b/bucket/o?uploadType=resumable"
    with GCSServer(root=root, buckets=["bucket"]) as server:
        response = exchange(server, "POST", f"{path}&name=key&ifGenerationMatch=0")
        session = f"{path}&upload_id={response.headers['X-GUploader-UploadID']}"
        headers = {"Content-Range": f"bytes 0-{half - 1}/*"}
        assert exchange(server, "PUT", session, data[:half], headers).status == 308
    with GCSServer(root=root) as server:
        response = exchange(server, "PUT", session, headers={"Content-Range": "bytes */*"})
        assert (response.status, response.headers["Range"]) == (308, f"bytes=0-{half - 1}")
        headers = {"Content-Range": f"bytes {half}-{len(data) - 1}/{len(data)}"}
        assert exchange(server, "PUT", session, data[half:], headers).status == 200
        record = server.state.get("bucket", "key")
        assert record.crc32c == google_crc32c.value(data)
        assert record.md5 == hashlib.md5(data).digest()
    with GCSServer(root=root) as server:
        response = exchange(server, "PUT", session, headers={"Content-Range": "bytes */*"})
        assert response.status == 200
        assert json.loads(response.body)["generation"] == str(record.generation)
        assert server.get("bucket", "key") == data
        assert exchange(server, "DELETE", session).status == 499
    with GCSServer(root=root) as server:
        assert server.state.resumable_uploads == {}


@pytest.mark.parametrize("key", NASTY_KEYS, ids=lambda key: key[:20])
def test_no_key_leads_out_of_the_root(root, key):
    """Whatever the key, it comes back after a restart, and nothing lies outside the root."""
    target = f"/bucket/{quote(key, safe='')}"
    with GCSServer(root=root, buckets=["bucket"]) as server:
        assert request(server, "PUT", target, b"data")[0] == 200
    with GCSServer(root=root) as server:
        assert server.keys("bucket") == [key]
        assert request(server, "GET", target) == (200, b"data")
    outside = files(root.parent) - files(root)
    assert outside == set()


@pytest.mark.parametrize("name", ["..", "../outside", "a/b"])
def test_no_bucket_name_leads_out_of_the_root(root, name):
    """A name that no bucket should have does no harm either."""
    with GCSServer(root=root) as server:
        status, _ = request(server, "PUT", f"/{quote(name, safe='')}")
        assert status in (200, 400)
        if status == 200:
            request(server, "PUT", f"/{quote(name, safe='')}/key", b"data")
    assert files(root.parent) - files(root) == set()
    assert set(root.parent.iterdir()) == {root}


@pytest.mark.parametrize("key", ["a\0b", "a\nb", "a\rb", "k" * 1025, "..", "."], ids=ascii)
def test_names_that_no_object_can_have_are_rejected(root, key):
    """NUL, line ends, dot names and more than 1,024 bytes are 400, and store nothing."""
    with GCSServer(root=root, buckets=["bucket"]) as server:
        assert request(server, "PUT", f"/bucket/{quote(key, safe='')}", b"data")[0] == 400
        assert request(server, "POST", f"/bucket/{quote(key, safe='')}?uploads")[0] == 400
    assert files(root / "data") == set()


def test_one_server_at_a_time_uses_a_root(root):
    """A second server is rejected while the first runs, and not after."""
    with (
        GCSServer(root=root),
        pytest.raises(RuntimeError, match="another server uses"),
    ):
        GCSServer(root=root)
    with GCSServer(root=root):
        pass


def test_a_stopped_server_does_not_start_again_on_its_root(root):
    """Another server may have changed the directory since."""
    server = GCSServer(root=root)
    with server:
        pass
    with pytest.raises(RuntimeError, match="create a new server"):
        server.start()


def test_a_copy_outlives_its_source(root):
    """Copies share bytes on the disk, but not their end."""
    with GCSServer(root=root, buckets=["bucket"]) as server:
        server.put("bucket", "a", b"x" * MIB)
        source = server.state.get("bucket", "a")
        blob = server.state.blobs.concat([source.blob, source.blob])
        server.state.commit("bucket", "b", blob, crc32c=0, md5=None)
        server.state.delete("bucket", "a")
        assert server.get("bucket", "b") == b"x" * 2 * MIB
    with GCSServer(root=root) as server:
        assert server.get("bucket", "b") == b"x" * 2 * MIB


def test_a_read_goes_on_after_its_object_was_replaced(root):
    """A body on its way to a slow client is that of the generation it began with."""
    old, new = b"o" * (32 * MIB), b"n" * (32 * MIB)
    with GCSServer(root=root, buckets=["bucket"]) as server:
        server.put("bucket", "key", old)
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        connection.request("GET", "/bucket/key")
        response = connection.getresponse()
        first = response.read(1000)
        server.put("bucket", "key", new)
        assert first + response.read() == old
        connection.close()


# --- SIGKILL ------------------------------------------------------------------------------

SERVE = """
import signal, sys
from aioflux.testing import GCSServer
server = GCSServer(root=sys.argv[1], buckets=["bucket"])
server.start()
print(server.port, flush=True)
signal.pause()
"""


class Writer(threading.Thread):
    """Puts objects and multipart uploads until its connection breaks; notes what was acknowledged.

    Args:
        port: Of the server.
        name: Prefix of its keys; no other writer has it.
    """

    def __init__(self, port: int, name: str) -> None:
        super().__init__(name=name)
        self.port = port
        self.sent: dict[str, set[int]] = {}
        self.acknowledged: dict[str, int] = {}
        self.open: str | None = None
        self.has_begun = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            for number in range(10_000):
                self.put(connection, f"{self.name}/{number % 7}", os.urandom(200 * 1024))
                if number % 5 == 0:
                    self.multipart(connection, f"{self.name}/parts", os.urandom(1000))
        except (OSError, http.client.HTTPException):
            pass  # the server was killed
        finally:
            connection.close()

    def put(self, connection: http.client.HTTPConnection, key: str, data: bytes) -> None:
        self.commit(connection, "PUT", f"/bucket/{key}", data, key, google_crc32c.value(data))

    def multipart(self, connection: http.client.HTTPConnection, key: str, data: bytes) -> None:
        body = self.send(connection, "POST", f"/bucket/{key}?uploads", b"")
        upload_id = body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
        target = f"/bucket/{key}?uploadId={upload_id}"
        connection.request("PUT", f"{target}&partNumber=1", data)
        response = connection.getresponse()
        response.read()
        self.open = upload_id
        etag = response.headers["ETag"]
        listing = (
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
            f"<ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
        )
        crc32c = google_crc32c.value(data)
        self.open = None
        self.commit(connection, "POST", target, listing.encode(), key, crc32c)

    def commit(self, connection, method, target, body, key, crc32c) -> None:
        self.sent.setdefault(key, set()).add(crc32c)
        self.send(connection, method, target, body)
        self.acknowledged[key] = crc32c
        self.sent[key] = {crc32c}
        self.has_begun.set()

    def send(self, connection, method, target, body) -> bytes:
        connection.request(method, target, body)
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        return data


@pytest.fixture
def process(root: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    started = []

    def start() -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-c", SERVE, str(root)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(server)
        assert server.stdout is not None
        return server, int(server.stdout.readline())

    yield start
    for server in started:
        server.kill()
        server.wait()
        server.stdout.close()


def check(root: Path, writers: list[Writer]) -> None:
    """Compare what a reopened root holds with what was sent and acknowledged."""
    with GCSServer(root=root) as server:
        found = {}
        for key in server.keys("bucket"):
            record = server.state.get("bucket", key)
            data = server.get("bucket", key)
            assert google_crc32c.value(data) == record.crc32c, key
            found[key] = record.crc32c
        for writer in writers:
            assert writer.acknowledged.keys() <= found.keys()
            for key, possible in writer.sent.items():
                assert found.get(key) in possible | (
                    set() if key in writer.acknowledged else {None}
                ), key
        assert all(
            writer.open in server.state.multipart_uploads for writer in writers if writer.open
        )
        blobs = [server.state.get("bucket", key).blob for key in found]
        uploads = server.state.multipart_uploads.values()
        blobs += [part.blob for upload in uploads for part in upload.parts.values()]
        named = {leaf.path for blob in blobs for leaf in blob.leaves()}
        assert {str(path) for path in files(root / "data")} == named
        assert files(root / "new") == set()


def test_sigkill_leaves_no_half_object(root, process):
    """Killed at any moment, five times: visible objects are whole, acknowledged ones are there.

    An object whose response was lost may be old or new, nothing else; leftovers are swept.
    """
    writers: list[Writer] = []
    known: dict[str, int] = {}
    for number in range(5):
        server, port = process()
        writers = [Writer(port, name) for name in ("a", "b")]
        for writer in writers:
            mine = {k: v for k, v in known.items() if k.startswith(f"{writer.name}/")}
            writer.acknowledged = dict(mine)
            writer.sent = {key: {crc32c} for key, crc32c in mine.items()}
            writer.start()
        for writer in writers:
            assert writer.has_begun.wait(100)
        time.sleep(0.03 * number)  # waits for nothing: it picks the moment
        server.kill()
        server.wait()
        for writer in writers:
            writer.join()
        check(root, writers)
        with GCSServer(root=root) as reopened:
            records = reopened.state.buckets["bucket"].objects
            known = {key: records.get(key).crc32c for key in records.ordered()}
    assert known
