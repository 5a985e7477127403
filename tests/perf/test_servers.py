"""The servers that measurements run against: what they answer, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.auth.credentials import AnonymousCredentials

import aioflux
from perf.servers import BUCKET, Server, ServerSpec, contents, open_server
from perf.servers._nginx import INSTALL, encode_crc32c, missing
from perf.servers._open import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

pytestmark = pytest.mark.more

MIB = 1 << 20
SPEC = ServerSpec(objects=((1000, 3), (3 * MIB + 7, 1)))
needs_nginx = pytest.mark.skipif(bool(missing()), reason=missing() or "nginx is here")
KINDS = pytest.mark.parametrize(
    "server",
    [
        pytest.param(SPEC, id="nginx", marks=needs_nginx),
        pytest.param(replace(SPEC, tls=True), id="nginx tls", marks=needs_nginx),
        pytest.param(replace(SPEC, kind="embedded"), id="embedded"),
        pytest.param(replace(SPEC, kind="embedded", tls=True), id="embedded tls"),
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with open_server(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def nginx() -> Iterator[Server]:
    if missing():
        pytest.skip(missing())
    with open_server(SPEC) as server:
        yield server


def context(server: Server) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=server.ca_file) if server.ca_file else None


def send(
    server: Server,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    request = urllib.request.Request(
        server.url + path, data=body, headers=dict(headers or {}), method=method
    )
    try:
        with urllib.request.urlopen(request, context=context(server)) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.headers, exc.read()


def open_store(server: Server, **options: Any) -> aioflux.Store:
    return aioflux.open_store(
        f"gs://{BUCKET}",
        endpoint_url=server.url,
        ssl_context=context(server),
        credentials=AnonymousCredentials() if server.ca_file else None,
        **options,
    )


# --- reads ---------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    "path",
    [
        f"/{BUCKET}/1000/1",
        f"/storage/v1/b/{BUCKET}/o/1000%2F1?alt=media",
        f"/download/storage/v1/b/{BUCKET}/o/1000%2F1?alt=media",
    ],
    ids=["xml", "json", "download"],
)
def test_an_object_is_read_under_each_of_its_urls(server: Server, path: str) -> None:
    status, headers, body = send(server, "GET", path)
    assert (status, body) == (200, contents(1000))
    assert headers["x-goog-generation"].isdigit()
    assert headers["x-goog-stored-content-length"] == "1000"
    assert headers["x-goog-hash"].startswith("crc32c=")
    assert headers["ETag"]


@KINDS
def test_a_range_and_a_head_are_answered(server: Server) -> None:
    path = f"/{BUCKET}/1000/0"
    status, headers, body = send(server, "GET", path, headers={"Range": "bytes=10-19"})
    assert (status, body) == (206, contents(1000)[10:20])
    assert headers["Content-Range"] == "bytes 10-19/1000"
    status, headers, body = send(server, "HEAD", path)
    assert (status, headers["Content-Length"], body) == (200, "1000", b"")


@KINDS
async def test_the_store_verifies_what_it_reads_and_reads_what_it_wrote(server: Server) -> None:
    data = os.urandom(7 * MIB)
    options = aioflux.TransferOptions(
        range_size_bytes=MIB, part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB
    )
    async with open_store(server, transfer=options) as store:
        large = 3 * MIB + 7
        assert await store.get(f"{large}/0") == contents(large)
        assert (await store.head("1000/0")).size == 1000
        assert (await store.put("written/small", data[:1000])).size == 1000
        async with store.open_writer("written/large") as writer:
            await writer.write(data)
        assert writer.meta.crc32c == (await store.head("written/large")).crc32c is not None
        assert await store.get("written/large") == data
        assert await store.get("written/small") == data[:1000]
        await store.delete("written/small")
        with pytest.raises(aioflux.NotFoundError):
            await store.get("written/small")


# --- uploads of the native server ----------------------------------------------------------------


@needs_nginx
def test_bytes_that_are_not_what_was_declared_are_refused(nginx: Server) -> None:
    headers = {"x-goog-hash": "crc32c=AAAAAA=="}
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=bad%2F1"
    assert send(nginx, "POST", path, b"not these", headers)[0] == 400
    assert send(nginx, "GET", f"/{BUCKET}/bad/1")[0] == 404
    assert send(nginx, "POST", path, b"", headers)[0] == 200


@needs_nginx
def test_a_large_body_is_verified_and_not_kept(nginx: Server) -> None:
    data = os.urandom(9 * MIB)
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=dropped"
    wrong = {"x-goog-hash": "crc32c=AAAAAA=="}
    right = {"x-goog-hash": f"crc32c={encode_crc32c(data)}"}
    assert send(nginx, "POST", path, data, wrong)[0] == 400
    assert send(nginx, "GET", f"/storage/v1/b/{BUCKET}/o/dropped")[0] == 404
    assert send(nginx, "POST", path, data, right)[0] == 200
    _, _, resource = send(nginx, "GET", f"/storage/v1/b/{BUCKET}/o/dropped")
    assert json.loads(resource)["size"] == str(len(data))
    assert json.loads(resource)["crc32c"] == encode_crc32c(data)
    assert not (Path(nginx.directory) / "objects" / BUCKET / "dropped").exists()


@needs_nginx
def test_a_resumable_upload_goes_on_where_it_was(nginx: Server) -> None:
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable"
    status, headers, _ = send(nginx, "POST", path, b'{"name": "resumed/1"}')
    assert status == 200
    session = headers["Location"].removeprefix(nginx.url)
    told = {"Content-Range": "bytes 0-4/*"}
    status, headers, _ = send(nginx, "PUT", session, b"first", told)
    assert (status, headers["Range"]) == (308, "bytes=0-4")
    status, headers, _ = send(nginx, "PUT", session, b"", {"Content-Range": "bytes */10"})
    assert (status, headers["Range"]) == (308, "bytes=0-4")
    told = {"Content-Range": "bytes 0-4/10"}
    assert send(nginx, "PUT", session, b"again", told)[0] == 400
    told = {"Content-Range": "bytes 5-9/10"}
    status, _, body = send(nginx, "PUT", session, b"second"[:5], told)
    assert status == 200
    assert b'"size":"10"' in body
    assert send(nginx, "GET", f"/{BUCKET}/resumed/1")[2] == b"firstsecon"


@needs_nginx
def test_parts_that_were_not_uploaded_do_not_complete(nginx: Server) -> None:
    status, _, body = send(nginx, "POST", f"/{BUCKET}/parts/1?uploads", b"")
    upload_id = body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    listed = "<X><Part><PartNumber>1</PartNumber><ETag>none</ETag></Part></X>"
    path = f"/{BUCKET}/parts/1?uploadId={upload_id}"
    assert status == 200
    assert send(nginx, "POST", path, listed.encode())[0] == 400
    assert send(nginx, "DELETE", path)[0] == 204
    assert send(nginx, "POST", path, listed.encode())[0] == 404


@needs_nginx
def test_a_large_upload_leaves_no_parts_in_memory(nginx: Server) -> None:
    """Beyond 64 MiB parts are counted and dropped, so that 1 GiB can be put many times."""

    async def put() -> None:
        data = bytes(70 * MIB)
        async with open_store(nginx) as store:
            assert (await store.put("large", data)).size == len(data)
            assert (await store.head("large")).size == len(data)

    asyncio.run(put())
    stored = [path for path in Path(nginx.directory).rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in stored) < 10 * MIB


# --- the network ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param("nginx", marks=needs_nginx), pytest.param("embedded")]
)
def test_latency_comes_before_the_first_byte(kind: Any) -> None:
    spec = ServerSpec(kind=kind, latency_seconds=0.1, objects=((1000, 1),))
    with open_server(spec) as server:
        begun = time.monotonic()
        assert send(server, "GET", f"/{BUCKET}/1000/0")[0] == 200
        assert time.monotonic() - begun >= 0.1


def test_faults_are_as_frequent_as_they_are_requested() -> None:
    spec = ServerSpec(fault_rate=0.2, objects=((1000, 1),))
    met = {"ok": 0, "503": 0, "reset": 0}
    with open_server(spec) as server:
        assert server.kind == "embedded"
        assert server.notes
        for _ in range(200):
            try:
                status = send(server, "GET", f"/{BUCKET}/1000/0")[0]
            except OSError:
                met["reset"] += 1
            else:
                met["ok" if status == 200 else str(status)] += 1
    assert met["503"] > 15
    assert met["reset"] > 15
    assert met["ok"] > 90


def test_a_connection_is_paced() -> None:
    spec = ServerSpec(connection_bytes_per_second=4 * MIB, objects=((3 * MIB, 1),))
    with open_server(spec) as server:
        begun = time.monotonic()
        assert len(send(server, "GET", f"/{BUCKET}/{3 * MIB}/0")[2]) == 3 * MIB
        assert time.monotonic() - begun > 0.3


# --- what runs -----------------------------------------------------------------------------------


def test_the_embedded_server_stands_in_where_nginx_is_missing() -> None:
    served, notes = choose(ServerSpec(), f"nginx is missing ({INSTALL})")
    assert served.kind == "embedded"
    assert INSTALL in notes[0]
    assert choose(ServerSpec(), "") == (ServerSpec(), ())
    embedded = ServerSpec(kind="embedded")
    assert choose(embedded, "nginx is missing") == (embedded, ())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerSpec(kind="apache"),  # type: ignore[arg-type]
        lambda: ServerSpec(fault_rate=0.6),
        lambda: ServerSpec(latency_seconds=-1),
        lambda: ServerSpec(connection_bytes_per_second=0),
    ],
    ids=["kind", "faults", "latency", "bandwidth"],
)
def test_a_server_that_cannot_be_is_refused(make: Callable[[], ServerSpec]) -> None:
    with pytest.raises(ValueError, match="must"):
        make()


# --- the end -------------------------------------------------------------------------------------

OWNER = """
import sys
from perf.servers import ServerSpec, open_server
with open_server(ServerSpec(kind=sys.argv[1], tls=True, objects=((1000, 1),))) as server:
    print(server.ca_file, *server.pids, flush=True)
    sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "kind", [pytest.param("nginx", marks=needs_nginx), pytest.param("embedded")]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_nothing_stays_behind_an_owner_that_is_killed(kind: str, number: int) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with owner:
        assert owner.stdout is not None
        ca_file, *pids = owner.stdout.readline().decode().split()
        assert all(is_running(int(pid)) for pid in pids)
        owner.send_signal(number)
        owner.wait(100)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if not any(is_running(int(pid)) for pid in pids) and not Path(ca_file).parent.exists():
            return
        time.sleep(0.02)
    pytest.fail(f"of {pids} there run {[pid for pid in pids if is_running(int(pid))]}")


@needs_nginx
def test_nginx_ends_with_its_supervisor() -> None:
    with open_server(SPEC) as server:
        stat = Path(f"/proc/{server.pids[0]}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(stat[1]), signal.SIGKILL)
        deadline = time.monotonic() + 100
        while any(map(is_running, server.pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, server.pids))
    assert not Path(server.directory).exists()


@needs_nginx
def test_a_server_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "nginx"
    broken.write_text("#!/bin/sh\nexec false\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert shutil.which("nginx") == str(broken)
    with pytest.raises(RuntimeError, match="nginx did not start"), open_server(SPEC):
        pass
