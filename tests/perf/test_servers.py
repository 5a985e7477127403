"""The servers that measurements run against: what they answer, and that nothing of them stays."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.auth.credentials import AnonymousCredentials

import aioflux
from perf.servers import BUCKET, Server, ServerSpec, contents, open_server
from perf.servers._nginx import INSTALL, missing
from perf.servers._open import choose
from perf.work import set_key, set_prefix
from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.more

MIB = 1 << 20
SPEC = ServerSpec(objects=((1000, 3), (3 * MIB + 7, 1)), sets=((1000, 2100),))
needs_nginx = pytest.mark.skipif(bool(missing()), reason=missing() or "nginx is here")
BOTH = pytest.mark.parametrize("kind", [pytest.param("nginx", marks=needs_nginx), "embedded"])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SPEC, id="nginx", marks=needs_nginx),
        pytest.param(replace(SPEC, tls=True), id="nginx tls", marks=needs_nginx),
        pytest.param(replace(SPEC, kind="embedded"), id="embedded"),
        pytest.param(replace(SPEC, kind="embedded", tls=True), id="embedded tls"),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with open_server(request.param) as server:
        yield server


async def test_the_store_reads_lists_and_writes(server: Server) -> None:
    data = os.urandom(7 * MIB)
    options = aioflux.TransferOptions(
        range_size_bytes=MIB, part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB
    )
    async with aioflux.open_store(
        f"gs://{BUCKET}",
        endpoint_url=server.url,
        ssl_context=ssl.create_default_context(cafile=server.ca_file) if server.ca_file else None,
        credentials=AnonymousCredentials() if server.ca_file else None,
        transfer=options,
    ) as store:
        large = 3 * MIB + 7
        assert await store.get(f"{large}/0") == contents(large)
        assert await store.get_range("1000/1", start=10, end=20) == contents(1000)[10:20]
        assert (await store.head("1000/0")).size == 1000
        listing = await store.list_all(set_prefix(1000, 2100))
        assert list(listing.keys) == [set_key(1000, 2100, index) for index in range(2100)]
        assert await store.get(listing[2000]) == contents(1000)
        # dataflux reads composites.
        await store.compose("perf-composed-objects/1", [listing[1].key, listing[2].key])
        assert await store.get("perf-composed-objects/1") == 2 * contents(1000)
        await store.delete("perf-composed-objects/1")
        assert (await store.put("written/small", data[:1000])).size == 1000
        async with store.open_writer("written/large") as writer:
            await writer.write(data)
        assert writer.meta.crc32c == (await store.head("written/large")).crc32c is not None
        assert await store.get("written/large") == data
        await store.delete("written/small")
        with pytest.raises(aioflux.NotFoundError):
            await store.get("written/small")


@BOTH
def test_latency_and_the_bandwidth_of_a_connection(kind: Any) -> None:
    size = 3 * MIB
    spec = ServerSpec(
        kind=kind,
        latency_seconds=0.1,
        connection_bytes_per_second=4 * MIB,
        objects=((1000, 1), (size, 1)),
    )
    with open_server(spec) as server:
        for each, seconds in ((1000, 0.1), (size, 0.4)):
            begun = time.monotonic()
            with urllib.request.urlopen(f"{server.url}/{BUCKET}/{each}/0") as answer:
                assert len(answer.read()) == each
            assert time.monotonic() - begun >= seconds


def test_the_embedded_server_replaces_nginx_where_it_is_missing_or_has_no_faults() -> None:
    served, notes = choose(ServerSpec(), f"nginx is missing ({INSTALL})")
    assert served.kind == "embedded"
    assert INSTALL in notes[0]
    assert choose(ServerSpec(), "") == (ServerSpec(), ())
    assert choose(ServerSpec(fault_rate=0.1), "")[0].kind == "embedded"
    with pytest.raises(ValueError, match="must"):
        ServerSpec(fault_rate=0.6)


OWNER = """
import sys
from perf.servers import ServerSpec, open_server
with open_server(ServerSpec(kind=sys.argv[1], tls=True, objects=((1000, 1),))) as server:
    print(server.ca_file, *server.pids, flush=True)
    sys.stdin.read()
"""


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@BOTH
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
        assert all(map(is_running, pids))
        owner.send_signal(number)
        owner.wait(100)
    wait_until(lambda: not any(map(is_running, pids)) and not Path(ca_file).parent.exists())


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
