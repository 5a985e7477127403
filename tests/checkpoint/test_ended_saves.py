"""A process that ends while it saves publishes nothing, and never replaces what was there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import aioflux
from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")

KEY = "run/model.pt"
URI = f"gs://bucket/{KEY}"
FORKER = f"""
import json, os, sys
import torch
from aioflux import TransferOptions
from aioflux.checkpoint import open_writer, save
from tests.bridge.patience import be_patient

options = TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)

def save_state():
    state = {{str(number): torch.ones(1_000_000) for number in range(8)}}
    save(state, {URI!r}, transfer=options)

def write_file():
    with open_writer({URI!r}, transfer=options) as file:
        for _ in range(32):
            file.write(bytes(1 << 20))

be_patient()
torch.set_num_threads(1)
for line in sys.stdin:
    name, url, log = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        os.environ["STORAGE_EMULATOR_HOST"] = url
        {{"save": save_state, "file": write_file}}[name]()
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""PyTorch is imported once: each that saves is a process that was forked then."""


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKER],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class Saving(NamedTuple):
    forker: subprocess.Popen[str]
    pid: int
    log: Path

    def end(self, number: int) -> str:
        """Send a signal, of which it ends; return what it wrote to standard error."""
        os.kill(self.pid, number)
        assert read(self.forker) == -number
        return self.log.read_text()


def read(forker: subprocess.Popen[Any]) -> int:
    assert forker.stdout is not None
    return int(forker.stdout.readline())


@pytest.fixture
def saving(
    kind: str,
    server: GCSServer,
    forker: subprocess.Popen[str],
    tmp_path: Path,
) -> Saving:
    """A process that has sent parts of a new object over an old one, and hears of none."""
    server.put("bucket", KEY, b"good")
    server.faults.add("multipart.part", delay_seconds=1000)
    log = tmp_path / "log"
    assert forker.stdin is not None
    forker.stdin.write(json.dumps([kind, server.url, str(log)]) + "\n")
    forker.stdin.flush()
    pid = read(forker)
    wait_until(lambda: server.stats.operation("multipart.part").requests)
    return Saving(forker, pid, log)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("save", "SIGINT"), ("save", "SIGTERM"), ("file", "SIGINT"), ("file", "SIGKILL")],
)
def test_a_signal_publishes_nothing(server: GCSServer, saving: Saving, name: str) -> None:
    result = saving.end(signal.Signals[name])
    assert server.get("bucket", KEY) == b"good"
    assert server.keys("bucket") == [KEY]
    if name == "SIGINT":
        assert "KeyboardInterrupt" in result
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
