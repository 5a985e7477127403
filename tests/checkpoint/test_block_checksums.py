"""Checksums of blocks do not depend on the pieces that the bytes come in."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioflux import CheckpointCorruptError, TransferOptions
from aioflux._values.checksums import crc32c
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._format.commit import (
    BlockDigest,
    StoredObject,
    checksum_ranges,
    joined_blocks,
    verify_blocks,
)

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

URI = "gs://bucket/blocks"


@given(
    data=st.binary(max_size=500),
    cuts=st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=6),
    block_size=st.integers(1, 64),
)
def test_a_digest_does_not_depend_on_the_pieces(
    data: bytes, cuts: list[tuple[int, bool]], block_size: int
) -> None:
    """Some come as bytes, and others as the checksums of their ranges."""
    digest = BlockDigest(block_size)
    edges = [0, *sorted(min(cut, len(data)) for cut, _ in cuts), len(data)]
    kinds = [*(is_summed for _, is_summed in cuts), False]
    for (start, end), is_summed in zip(pairwise(edges), kinds, strict=True):
        piece = memoryview(data)[start:end]
        if not is_summed:
            digest.update(piece)
            continue
        for each in checksum_ranges(piece, offset=start, block_size=block_size):
            digest.add(each)
    whole, blocks = digest.finish()
    assert digest.size == len(data)
    assert whole == crc32c(data)
    assert blocks == b"".join(
        crc32c(data[start : start + block_size]).to_bytes(4)
        for start in range(0, len(data), block_size)
    )


@given(data=st.binary(min_size=1, max_size=100), at=st.integers(0, 99), first=st.integers(0, 9))
def test_the_first_damaged_block_is_found(data: bytes, at: int, first: int) -> None:
    digest = BlockDigest(8)
    digest.update(memoryview(data))
    whole, blocks = digest.finish()
    stored = StoredObject(key="k", size=len(data), crc32c=whole, block_size=8, block_crcs=blocks)
    start, at = min(8 * first, (len(data) - 1) // 8 * 8), at % len(data)
    damaged = bytearray(data)
    damaged[at] ^= 1
    assert verify_blocks(stored, start, memoryview(data)[start:]) is None
    found = verify_blocks(stored, start, memoryview(damaged)[start:])
    assert found == (at // 8 if at >= start else None)


@given(data=st.binary(min_size=1, max_size=100), first=st.integers(0, 9), last=st.integers(0, 12))
def test_blocks_are_joined_to_the_checksum_of_a_range(data: bytes, first: int, last: int) -> None:
    digest = BlockDigest(8)
    digest.update(memoryview(data))
    whole, blocks = digest.finish()
    stored = StoredObject(key="k", size=len(data), crc32c=whole, block_size=8, block_crcs=blocks)
    start, end = min(8 * first, len(data) // 8 * 8), min(8 * last, len(data))
    part = data[start : max(start, end)]
    assert joined_blocks(stored, start, len(part)) == crc32c(part)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size_before", [1, 65_536, 70_000])
def test_a_damaged_range_is_read_again(
    server: GCSServer, size_before: int, *, verify: bool
) -> None:
    """Blocks are verified with the checksum of the received bytes, and without it."""
    values = torch.randint(256, (1_000_000,), dtype=torch.uint8)
    state = {"before": torch.zeros(size_before, dtype=torch.uint8), "values": values}
    with Checkpointer(URI, transfer=TransferOptions(verify=verify)) as checkpointer:
        checkpointer.save(1, state)
        into = {"values": torch.zeros_like(values)}
        server.faults.add("objects.media", key="*.distcp", flip_at=100_000, times=2)
        checkpointer.load(1, into)
        assert torch.equal(into["values"], values)
        assert server.faults.injected["flip"] == 2
        server.faults.add("objects.media", key="*.distcp", flip_at=100_000)
        with pytest.raises(CheckpointCorruptError, match=r"in the block \[") as raised:
            checkpointer.load(1, into)
    [(start, end)] = re.findall(r"\[(\d+), (\d+)\)", str(raised.value))
    assert int(end) - int(start) == 65_536  # the damaged block, of all that are read
