"""Contenders of the scenario of compression: what they compress comes back."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from aioflux.testing import GCSServer
from perf.weights import KINDS, num_bytes_of, weights_of
from perf.work import MIB, OperationResult, Work

PEERS = ("aioflux_zstd", "torch_zstd", "zstd_plain")


def work(peer: str, kind: str, operation: str) -> Work:
    return Work(peer=peer, operation=operation, url="", size_bytes=MIB, num_objects=1, dtype=kind)


def did(one: Work) -> OperationResult:
    adapter = importlib.import_module(f"perf.peers.{one.peer}")
    adapter.prepare(one)
    operation: Any = getattr(adapter, one.operation)
    told = asyncio.run(operation(one))
    assert isinstance(told, OperationResult)
    return told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peer", PEERS)
def test_what_is_compressed_comes_back(peer: str, kind: str) -> None:
    adapter: Any = importlib.import_module(f"perf.peers.{peer}")
    packed = did(work(peer, kind, "compress"))
    unpacked = did(work(peer, kind, "decompress"))
    assert packed.num_bytes == unpacked.num_bytes == MIB
    assert 0.3 * MIB < packed.stored_bytes < MIB
    # Streams of torch tell no size in their heads: a few bytes.
    assert abs(packed.stored_bytes - unpacked.stored_bytes) < 100
    tensors = [each[-1] for each in adapter._compressed(kind, MIB)]
    assert all(map(torch.equal, tensors, weights_of(kind, MIB).values()))


def test_ours_are_the_smallest() -> None:
    for kind in KINDS:
        sizes = {peer: did(work(peer, kind, "compress")).stored_bytes for peer in PEERS}
        assert min(sizes, key=sizes.__getitem__) == "aioflux_zstd", kind


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable")
@pytest.mark.parametrize("how", ["compressed", "plain"])
def test_a_state_is_saved_and_loaded(how: str) -> None:
    with GCSServer(buckets=("perf",), md5=False) as server:
        for operation in (f"save_{how}", f"load_{how}"):
            told = did(replace(work("aioflux_zstd", "bf16", operation), url=server.url))
            assert told.num_bytes == MIB
            assert (told.stored_bytes < 0.7 * MIB) == (how == "compressed")


def test_weights_have_the_size_that_is_requested() -> None:
    for kind in ("bf16", "fp32"):
        assert num_bytes_of(weights_of(kind, 33 * MIB)) == 33 * MIB


def test_weights_of_no_known_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="'fp7'"):
        weights_of("fp7", MIB)
