"""Loaders take the same epoch: every object of a set, decoded alike, whoever loads it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from perf.peers import _loading
from perf.peers._loading import OneByOne, decode, epoch
from perf.servers import Server, ServerSpec, open_server
from perf.work import Work, _checked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.more

SIZE, COUNT = 5000, 10
OPERATIONS = {
    "aioflux_data": ("load", "stream"),
    "direct": ("load", "stream"),
    "gcsfs_data": ("load",),
    "obstore_data": ("load",),
}
DO = """
import json, sys, warnings
from perf.work import Work, measure
for fields in json.loads(sys.argv[1]):
    told = measure(Work(**{**fields, "server_pids": ()}))
    print(json.dumps(told), flush=True)
"""
WORK = Work(
    peer="",
    operation="load",
    url="",
    size_bytes=SIZE,
    num_objects=COUNT,
    is_set=True,
    batch_size=4,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(ServerSpec(sets=((SIZE, COUNT),))) as server:
        yield server


def test_each_loader_takes_every_object_once(server: Server) -> None:
    works = [
        replace(
            WORK,
            peer=peer,
            operation=operation,
            url=server.url,
            counter=server.counter,
            is_whole=is_whole,
            # It begins a loop for each batch, which none may run around.
            num_workers=1 if peer == "obstore_data" else 0,
        )
        for peer, operations in OPERATIONS.items()
        for operation in operations
        for is_whole in ((False, True) if peer == "aioflux_data" else (False,))
    ]
    command = [sys.executable, "-c", DO, json.dumps([asdict(work) for work in works])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(works)
    for work, result in zip(works, told, strict=True):
        assert result["num_bytes"] == COUNT * SIZE, work
        assert 0 < result["waited_seconds"] <= result["seconds"], work
        # Listed before. Other clients may repeat a request on a busy machine, and google's looks up
        # the bucket.
        may_repeat = not work.peer.startswith("aioflux")
        assert COUNT <= result["num_requests"] <= COUNT + 3 * may_repeat, work


@pytest.mark.parametrize("name", ["dataflux", "litdata"])
def test_a_peer_that_is_missing_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("dataflux_core", "litdata"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"perf.peers.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match="perf-loading"):
        importlib.import_module(f"perf.peers.{name}")


class Clock:
    """In place of the module `time`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_consumer_that_takes_its_time_waits_for_the_loader_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(_: str) -> bytes:
        clock.now += 0.5
        return bytes(SIZE)

    clock = Clock()
    monkeypatch.setattr(_loading, "time", clock)
    one = replace(WORK, num_objects=8, batch_size=2, step_seconds=100.0)
    keys = [f"{index}" for index in range(8)]
    num_bytes, waited_seconds = epoch(OneByOne(keys, lambda: read, decode(one)), one)
    assert num_bytes == 8 * SIZE
    assert (waited_seconds, clock.now) == (8 * 0.5, 8 * 0.5 + 4 * one.step_seconds)


def test_bytes_become_a_tensor_of_their_own() -> None:
    data = bytearray(b"some bytes")
    tensor = decode(replace(WORK, is_whole=True))(data)
    data[:] = bytes(len(data))
    assert bytes(tensor) == b"some bytes"
    assert tensor.dtype == torch.uint8
    assert decode(WORK)(b"12345") == 5


def test_a_loader_that_leaves_out_an_object_fails() -> None:
    with pytest.raises(RuntimeError, match="moved 45000 bytes"):
        _checked(WORK, (COUNT - 1) * SIZE)


def test_the_cache_of_a_process_that_was_killed_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aioflux_data = importlib.import_module("perf.peers.aioflux_data")
    monkeypatch.setattr(aioflux_data, "memory_directory", lambda _: tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"aioflux-perf-cache-{ended.pid}-x"
    left.mkdir()
    own = aioflux_data._new_directory(1)
    assert sorted(tmp_path.iterdir()) == [own]
    assert aioflux_data._new_directory(1) != own
    assert own.exists()
