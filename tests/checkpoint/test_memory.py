"""What saving and loading take beside the state itself, in a process that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.more]

SCRIPT = """
import asyncio, json, re
from contextlib import contextmanager
from pathlib import Path
import torch
import aioflux
from aioflux import TransferOptions
from aioflux.checkpoint import load, open_writer, save
from aioflux.testing import GCSServerProcess

MIB = 1024 * 1024
options = TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=20 * MIB)
grown = {}

def resident(field):
    return int(re.search(rf"{field}:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

@contextmanager
def measured(name):
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    grown[name] = resident("VmHWM") - before

def write_file(url, num_pieces):
    with open_writer("gs://bucket/file", transfer=options, endpoint_url=url) as file:
        for _ in range(num_pieces):
            file.write(piece)

async def write_copies(url):
    async with aioflux.open_store("gs://bucket", endpoint_url=url, transfer=options) as store:
        async with store.open_writer("copies", zero_copy=True) as writer:
            piece = bytearray(8 * MIB)
            for _ in range(16):
                await writer.write_copy(piece)

torch.set_num_threads(1)
with GCSServerProcess(buckets=("bucket",)) as server:
    url = server.url
    for name, size in (("small", 1), ("large", 64)):
        state = {"w": torch.ones(size * MIB, dtype=torch.uint8)}
        save(state, f"gs://bucket/{name}", endpoint_url=url)
    del state
    load("gs://bucket/small", endpoint_url=url)
    with measured("load"):
        loaded = load("gs://bucket/large", endpoint_url=url)
        assert loaded["w"].max() == 1
    del loaded

    state = {str(number): torch.ones(8 * MIB, dtype=torch.uint8) for number in range(8)}
    with measured("save"):
        save(state, "gs://bucket/tensors", endpoint_url=url)
    with measured("copies"):
        asyncio.run(write_copies(url))

    piece = bytes(4 * MIB)
    write_file(url, 8)
    with measured("file"):
        write_file(url, 40)
print(json.dumps(grown))
"""


@pytest.fixture(scope="module")
def grown() -> dict[str, int]:
    """By how many MiB the process grew in each of its turns."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


STAGING = """
import os, re, resource, sys
from pathlib import Path
import torch
from aioflux.checkpoint import Checkpointer
from aioflux.testing import GCSServerProcess

def resident():
    children = Path("/proc/self/task").glob("*/children")
    pids = {"self", *(pid for path in children for pid in path.read_text().split())} - {server}
    texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(re.search(r"Pss:\\s*(\\d+) kB", text)[1]) for text in texts) >> 10

torch.set_num_threads(1)
state = {"w": torch.ones(25_000)}
with GCSServerProcess(buckets=("bucket",), arguments=["--latency-ms", "2"]) as process:
    server = str(process.pid)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with Checkpointer("gs://bucket", staging=sys.argv[1], endpoint_url=process.url) as checkpoints:
        checkpoints.save(0, state)
        before = most = resident()
        for step in range(1, 601):
            checkpoints.save_async(step, state)
            if not step % 50:
                most = max(most, resident())
    with Checkpointer("gs://bucket", endpoint_url=process.url) as checkpoints:
        print(len(checkpoints.steps()), most - before)
"""


@pytest.mark.parametrize("staging", ["thread", "process"])
def test_saves_that_nobody_waits_for_take_little_memory_and_few_descriptors(staging: str) -> None:
    """600 saves of 100 KB, each staged while those before it are uploaded, with 256 descriptors."""
    done = subprocess.run(
        [sys.executable, "-c", STAGING, staging], check=True, stdout=subprocess.PIPE, text=True
    )
    num_steps, grown = map(int, done.stdout.split())
    assert num_steps == 601
    assert grown < 48


def test_a_load_takes_the_memory_of_the_object(grown: dict[str, int]) -> None:
    """64 MiB are loaded, each page read, and 1.1 times as much is resident at most."""
    assert 60 <= grown["load"] <= 64 * 1.1 + 4


def test_a_save_takes_hardly_any_beside_64_mib_of_tensors(grown: dict[str, int]) -> None:
    assert grown["save"] < 20


def test_copies_are_bounded_by_the_buffer(grown: dict[str, int]) -> None:
    """128 MiB are copied; `max_buffered_bytes` of 20 MiB, and 8 MiB of the caller's own."""
    assert grown["copies"] < 20 + 8 + 32


def test_a_file_is_bounded_by_the_buffer(grown: dict[str, int]) -> None:
    """160 MiB go through 20 MiB of buffers: the process hardly grows once these are there."""
    assert grown["file"] < 60
