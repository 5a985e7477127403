"""The memory of calls, in their own process: bounded, however large the object is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aioflux import sync
from aioflux.testing import GCSServerProcess

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.more]

MIB = 1024 * 1024
PROGRAM = """
import asyncio, re, sys
import aioflux
from aioflux import sync

MIB = 1024 * 1024
url, call, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"endpoint_url": url}

def resident(field):
    return int(re.search(rf"{field}:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

async def move(store):
    await store.put("idle", b"1")
    await store.get("idle")
    idle, count = resident("VmRSS"), 0
    if call == "get":
        count = len(await store.get("object"))
    elif call == "open_reader":
        async with store.open_reader("object") as reader:
            while piece := await reader.read(MIB):
                count += len(piece)
    else:
        piece = bytes(MIB)
        async with store.open_writer("written") as writer:
            for _ in range(size // MIB):
                await writer.write(piece)
        count = writer.meta.size
    return idle, count

async def main():
    async with aioflux.open_store("gs://bucket", **options) as store:
        return await move(store)

if call == "sync_get":
    with sync.open_store("gs://bucket", **options) as store:
        store.put("idle", b"1")
        store.get("idle")
        idle, count = resident("VmRSS"), len(store.get("object"))
else:
    idle, count = asyncio.run(main())
assert count == size, count
print(resident("VmHWM") - idle)
"""


@pytest.mark.parametrize(
    ("call", "size_bytes", "limit_bytes"),
    [
        # An allowance of 32 MiB for what lies between two sockets; the rest is the caller's, or
        # bounded by an option of the store.
        ("get", 96 * MIB, (96 * 11 // 10 + 32) * MIB),
        ("sync_get", 96 * MIB, (96 * 11 // 10 + 32) * MIB),
        ("open_reader", 256 * MIB, (64 + 32 + 64) * MIB),
        ("open_writer", 256 * MIB, (64 + 32 + 64) * MIB),
    ],
)
def test_a_call_holds_no_more_than_it_must(call: str, size_bytes: int, limit_bytes: int) -> None:
    with GCSServerProcess(buckets=("bucket",), arguments=("--no-md5",)) as server:
        if call != "open_writer":
            with sync.open_store("gs://bucket", endpoint_url=server.url) as store:
                store.put("object", bytes(size_bytes))
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.url, call, str(size_bytes)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert int(done.stdout) < limit_bytes
