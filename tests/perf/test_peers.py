"""Every contender does what it is asked, through its own public interface, on either transport."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perf.peers import transfer_manager, wrk
from perf.peers._parts import part_size_bytes, ranges
from perf.peers.wrk import completed
from perf.servers import BUCKET, Server, ServerSpec, open_server
from perf.work import MIB, Work, body_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.more

SMALL, LARGE = 1000, 7 * MIB + 3
READS = {"get_many", "get_one", "get_into"}
OPERATIONS = {
    "aioflux": READS | {"get_range", "put_many", "put_one"},
    "aioflux_unverified": {"get_many", "get_one", "put_one"},
    "aioflux_sync": READS | {"put_many"},
    "aiohttp": READS | {"put_many"},
    "gcloud_aio": READS | {"put_many", "put_one"},
    "gcsfs": READS | {"put_many", "put_one"},
    "google": READS | {"put_many", "put_one"},
    "obstore": READS | {"get_range", "put_many", "put_one"},
    "obstore_crc32c": {"get_many", "put_one"},
    "obstore_ranges": {"get_one"},
    "raw": {"get_many"},
    "requests": READS | {"put_many"},
    "transfer_manager": {"get_many", "get_one", "put_many", "put_one"},
    "wrk": {"get_many"},
}
DO = """
import json, sys
from perf.work import Work, measure
for fields in json.loads(sys.argv[1]):
    try:
        told = measure(Work(**{**fields, "server_pids": ()}))
    except Exception as exc:
        told = {"error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(told), flush=True)
"""
SPEC = ServerSpec(objects=((SMALL, 4), (LARGE, 1), (MIB, 1)))
PEERS = pytest.mark.parametrize(
    "peer",
    [
        pytest.param(
            peer,
            marks=pytest.mark.skipif(
                peer == "wrk" and shutil.which("wrk") is None, reason="wrk is missing"
            ),
        )
        for peer in OPERATIONS
    ],
)


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with open_server(SPEC) as server:
        yield server


@pytest.fixture(scope="module")
def secure() -> Iterator[Server]:
    with open_server(replace(SPEC, tls=True)) as server:
        yield server


def work(server: Server, peer: str, operation: str) -> Work:
    is_many = operation.endswith("many")
    return Work(
        peer=peer,
        operation=operation,
        url=server.url,
        ca_file=server.ca_file,
        size_bytes=SMALL if is_many else LARGE,
        num_objects=20 if is_many else 2,
        num_keys=4 if is_many else 1,
        in_flight=4,
        range_size_bytes=5 * MIB,
    )


def do(works: list[Work]) -> list[dict[str, Any]]:
    """Do each work in one other process, and return what it took or its error."""
    command = [sys.executable, "-c", DO, json.dumps([asdict(work) for work in works])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def store_short(server: Server) -> None:
    """Have objects that are a byte shorter than their keys say."""
    for size in (SMALL + 1, LARGE + 1):
        place = Path(server.directory) / "objects" / BUCKET / str(size)
        place.mkdir(exist_ok=True)
        for index in range(4):
            (place / str(index)).write_bytes(bytes(size - 1))


def written(server: Server) -> list[Path]:
    place = Path(server.directory) / "objects" / BUCKET / "put"
    return [path for path in place.rglob("*") if path.is_file()]


@PEERS
def test_each_operation_moves_all_bytes_and_finds_out_when_some_are_missing(
    peer: str, plain: Server
) -> None:
    works = [work(plain, peer, operation) for operation in sorted(OPERATIONS[peer])]
    is_file = plain.kind == "nginx"
    short: list[Work] = []
    if is_file and peer != "wrk":
        store_short(plain)
        reads = [each for each in works if each.operation.startswith("get")]
        short = [replace(each, size_bytes=each.size_bytes + 1) for each in reads]
        for path in written(plain):
            path.unlink()
    told = do([*works, *short])
    for each, result in zip(works, told, strict=False):
        assert "error" not in result, f"{each.operation}: {result}"
        assert result["num_bytes"] == result["num_objects"] * each.size_bytes
        if peer != "wrk":
            assert result["num_objects"] == each.num_objects
    assert [result for result in told[len(works) :] if "error" not in result] == []
    if is_file:
        stored = [path.read_bytes() for path in written(plain)]
        sizes = {each.size_bytes for each in works if each.operation.startswith("put")}
        assert {len(data) for data in stored} >= sizes
        assert all(data == body_of(len(data)) for data in stored)


@PEERS
def test_each_peer_reads_over_tls(peer: str, secure: Server) -> None:
    operation = "get_many" if "get_many" in OPERATIONS[peer] else "get_one"
    [told] = do([work(secure, peer, operation)])
    assert "error" not in told, told


@pytest.mark.parametrize("peer", ["aioflux", "obstore", "google"])
def test_a_client_is_opened_for_each_object(peer: str, plain: Server) -> None:
    many = work(plain, peer, "get_many")
    opened, steady = do([replace(many, operation="open_get"), many])
    assert "error" not in opened, opened
    assert opened["num_objects"] == steady["num_objects"] == many.num_objects
    assert opened["cpu_seconds"] > steady["cpu_seconds"]


def test_requests_before_the_measured_part_do_not_count(plain: Server) -> None:
    if not plain.counter:
        pytest.skip("the server counts no requests")
    many = replace(work(plain, "aioflux", "get_many"), counter=plain.counter)
    [told] = do([many])
    assert told["num_requests"] == many.num_objects


def test_processes_of_a_peer_trust_the_server(secure: Server) -> None:
    [told] = do([work(secure, "transfer_manager", "get_one")])
    assert "error" not in told, told
    assert told["num_bytes"] == 2 * LARGE


@PEERS
def test_the_operations_are_all_that_there_are(peer: str) -> None:
    module = importlib.import_module(f"perf.peers.{peer}")
    names = READS | {"get_range", "put_many", "put_one"}
    assert {name for name in names if hasattr(module, name)} == OPERATIONS[peer]


def test_a_failure_of_wrk_is_reported() -> None:
    told = "  100 requests in 1.01s, 1.00MB read\n"
    assert completed(told) == 100
    with pytest.raises(RuntimeError, match="Non-2xx"):
        completed(told + "  Non-2xx or 3xx responses: 3\n")
    with pytest.raises(RuntimeError, match="unable"):
        completed("unable to connect")


async def test_where_wrk_is_missing_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="apt install wrk"):
        await wrk.get_many(work(Server(url="", kind="nginx"), "wrk", "get_many"))


def test_body_is_made_once_and_is_no_zeros() -> None:
    body = body_of(LARGE)
    assert len(body) == LARGE
    assert body.count(0) < LARGE / 100
    assert body is work(Server(url="", kind="nginx"), "aioflux", "put_one").body()
    assert body_of(10) == body[:10]


def test_what_is_written_is_made_before_it_is_measured(plain: Server) -> None:
    size = 64 * MIB
    one = replace(work(plain, "aioflux", "put_one"), size_bytes=size, num_objects=1)
    [told] = do([one])
    assert "error" not in told, told
    assert told["idle_bytes"] > size
    assert told["peak_bytes"] - told["idle_bytes"] < size


def test_file_that_is_written_is_made_before() -> None:
    one = work(Server(url="", kind="nginx"), "transfer_manager", "put_one")
    transfer_manager.prepare(one)
    source = transfer_manager._source(LARGE)
    assert transfer_manager._source.cache_info().hits == 1
    assert source.path.read_bytes() == one.body()
    transfer_manager._source.cache_clear()


def test_ranges_are_the_whole_object() -> None:
    one = work(Server(url="", kind="nginx"), "aioflux", "get_one")
    assert ranges(one) == [(0, 5 * MIB), (5 * MIB, LARGE)]
    assert part_size_bytes(replace(one, range_size_bytes=1)) == 5 * MIB
