"""A process that ends while it saves publishes nothing, and never replaces what was there."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import aioflux

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")

KEY = "run/model.pt"
URI = f"gs://bucket/{KEY}"
OPTIONS = "TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)"
WRITES = {
    "save": f"""
import torch
from aioflux import TransferOptions
from aioflux.checkpoint import save
state = {{str(number): torch.ones(1_000_000) for number in range(8)}}
save(state, {URI!r}, transfer={OPTIONS})
""",
    "file": f"""
from aioflux import TransferOptions
from aioflux.checkpoint import open_writer
with open_writer({URI!r}, transfer={OPTIONS}) as file:
    for _ in range(32):
        file.write(bytes(1 << 20))
""",
}


@pytest.fixture(params=WRITES)
def saving(request: pytest.FixtureRequest, server: GCSServer) -> Iterator[subprocess.Popen[str]]:
    """A process that has sent parts of a new object over an old one, and hears of none."""
    server.put("bucket", KEY, b"good")
    server.faults.add("multipart.part", delay_seconds=300)
    with subprocess.Popen(
        [sys.executable, "-c", WRITES[request.param]], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while not server.stats.operation("multipart.part").requests:
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_publishes_nothing(
    server: GCSServer, saving: subprocess.Popen[str], name: str
) -> None:
    saving.send_signal(signal.Signals[name])
    _, told = saving.communicate(timeout=60)
    assert saving.returncode == -signal.Signals[name]
    assert server.get("bucket", KEY) == b"good"
    assert server.keys("bucket") == [KEY]
    if name == "SIGINT":
        assert "KeyboardInterrupt" in told
        assert server.stats.open_uploads == 0
        return
    # Death leaves no time to clean up: the upload is found, and ended, by `clean`.
    server.faults.clear()

    async def clean() -> int:
        async with aioflux.open_store("gs://bucket") as store:
            return len((await store.clean(older_than_seconds=0)).aborted)

    assert asyncio.run(clean()) == 1
    assert server.stats.open_uploads == 0
    assert server.get("bucket", KEY) == b"good"
