"""The codec: frames on several threads, in order, few at a time."""

from __future__ import annotations

import asyncio
import io
import threading
from contextlib import aclosing
from itertools import count, groupby
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from aioflux.checkpoint._format.codec import Codec, EncodedFrames
from aioflux.checkpoint._format.frames import decode_frame, plan_slices
from aioflux.checkpoint._format.streams import StreamReader
from aioflux.checkpoint._save.items import encode_tensor
from aioflux.errors import CheckpointCorruptError
from tests.checkpoint.test_streams import frame_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux.checkpoint._format.commit import StoredItem

FRAME_SIZE = 4096


@pytest.fixture
def codec() -> Iterator[Codec]:
    with Codec(frame_size=FRAME_SIZE) as codec:
        yield codec


def weights(num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_elements, generator=generator).mul_(0.02).bfloat16()


async def joined(codec: Codec, item: EncodedFrames) -> bytes:
    """The bytes of an item."""
    return b"".join([segment async for _, segment in codec.encode_items([item])])


async def packed(codec: Codec, tensor: torch.Tensor, offset: int = 0) -> tuple[bytes, StoredItem]:
    """The stored bytes of one tensor's item, and its location."""
    item = codec.encode_item(*encode_tensor(tensor).segments, element_size=tensor.element_size())
    return await joined(codec, item), item.stored(offset)


def test_frames_come_in_order(codec: Codec) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 50 * FRAME_SIZE + 7, dtype=np.uint8).tobytes()
    out, at = bytearray(len(raw)), 0
    for frame in codec.encode(raw, element_size=2):
        size = min(FRAME_SIZE, len(raw) - at)
        decode_frame(frame, memoryview(out)[at : at + size])
        at += size
    assert bytes(out) == raw


def test_frames_are_the_same_on_any_number_of_threads() -> None:
    memory = encode_tensor(weights(100_000)).segments[1]
    made = []
    for threads in (1, 2, 5):
        with Codec(threads=threads, frame_size=FRAME_SIZE) as codec:
            made.append(b"".join(codec.encode(memory, element_size=2)))
    assert made[0] == made[1] == made[2]


def test_a_bounded_number_of_calls_is_started_ahead() -> None:
    started = count()

    def calls() -> Iterator[Callable[[], int]]:
        for _ in range(1000):
            next(started)
            yield lambda: 1

    with Codec(threads=2) as codec:
        results = codec.in_order(calls())
        for _ in range(10):
            next(results)
        results.close()
    # Ten that were consumed, and four ahead.
    assert next(started) <= 14


async def test_a_bounded_number_of_calls_is_started_ahead_on_a_loop() -> None:
    started = count()

    def calls() -> Iterator[Callable[[], int]]:
        for _ in range(1000):
            next(started)
            yield lambda: 1

    with Codec(threads=2) as codec:
        async with aclosing(codec.in_order_on_loop(calls())) as results:
            for _ in range(10):
                await anext(results)
    assert next(started) <= 14


def test_closing_early_waits_for_calls_that_read_the_memory() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        may_end.wait()
        ended.set()
        return 1

    with Codec(threads=2) as codec:
        results = codec.in_order(iter([lambda: 0, slow, lambda: 2, lambda: 3, lambda: 4]))
        assert next(results) == 0
        begun.wait()
        threading.Timer(0.05, may_end.set).start()
        results.close()
        assert ended.is_set()


async def test_a_cancelled_task_waits_for_calls_that_read_the_memory() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        may_end.wait()
        ended.set()
        return 1

    async def consume(codec: Codec) -> None:
        async with aclosing(codec.in_order_on_loop(iter([slow, slow]))) as results:
            async for _ in results:
                pass

    with Codec(threads=1) as codec:
        task = asyncio.create_task(consume(codec))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        threading.Timer(0.05, may_end.set).start()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


def test_an_error_of_a_thread_is_raised(codec: Codec) -> None:
    def fail() -> int:
        raise OSError("no such luck")

    results = codec.in_order(iter([lambda: 1, fail, lambda: 2]))
    assert next(results) == 1
    with pytest.raises(OSError, match="no such luck"):
        next(results)


def test_threads_end_with_the_codec() -> None:
    before = frame_threads()
    with Codec(threads=3, frame_size=FRAME_SIZE) as codec:
        b"".join(codec.encode(bytes(100_000), element_size=1))
        assert not frame_threads() <= before
    assert frame_threads() <= before


def test_each_thread_uses_its_memory_again(codec: Codec) -> None:
    b"".join(codec.encode(bytes(100 * FRAME_SIZE), element_size=4))
    assert 1 <= len(codec._idle) <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.int8])
@pytest.mark.parametrize("bounds", [(0, 60_000), (1, 59_999), (8192, 16384), (5000, 5002), (7, 7)])
async def test_a_range_of_an_item_is_read_from_its_frames(
    codec: Codec, dtype: torch.dtype, bounds: tuple[int, int]
) -> None:
    tensor = weights(60_000 // dtype.itemsize).mul(1000).to(dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes()
    offset = 640
    stored, item = await packed(codec, tensor, offset)
    whole = memoryview(bytes(offset) + stored)
    assert (item.offset, item.length, item.data_size) == (offset, len(stored), len(raw))
    slices = plan_slices(
        *bounds, size=item.data_size, frame_size=item.frame_size, frame_ends=item.frame_ends
    )
    out = bytearray(bounds[1] - bounds[0])
    begin = item.data_start + (slices[0].stored_start if slices else 0)
    end = item.data_start + (slices[-1].stored_end if slices else 0)
    await codec.decode(whole[begin:end], slices, memoryview(out), plane_size=item.plane_size)
    assert bytes(out) == raw[slice(*bounds)]


async def test_one_damaged_frame_fails_a_range(codec: Codec) -> None:
    stored, item = await packed(codec, weights(60_000))
    damaged = bytearray(stored)
    damaged[item.data_start + item.frame_ends[3] + 40] ^= 1
    slices = plan_slices(
        0, item.data_size, size=item.data_size, frame_size=FRAME_SIZE, frame_ends=item.frame_ends
    )
    frames = memoryview(damaged)[item.data_start : item.data_start + item.frame_ends[-1]]
    with pytest.raises(CheckpointCorruptError):
        await codec.decode(
            frames, slices, memoryview(bytearray(item.data_size)), plane_size=item.plane_size
        )


@pytest.mark.parametrize("shape", [(30_000,), (7, 11, 13), (), (1,)], ids=str)
async def test_an_item_is_a_stream_of_what_torch_save_writes(
    codec: Codec, shape: tuple[int, ...]
) -> None:
    tensor = torch.rand(shape)
    stored, _ = await packed(codec, tensor)
    plain = StreamReader(io.BytesIO(stored), lambda: Codec(threads=1)).readall()
    assert plain == b"".join(encode_tensor(tensor).segments)
    assert torch.equal(torch.load(io.BytesIO(plain), weights_only=True), tensor)


def test_an_item_has_no_table_before_its_last_segment(codec: Codec) -> None:
    frames = codec.encode_item(b"", bytes(10), b"", element_size=1)
    with pytest.raises(ValueError, match="only after its last segment"):
        frames.stored(0)


async def test_planes_can_be_left_out() -> None:
    with Codec(byte_planes=False) as codec:
        stored, item = await packed(codec, weights(200_000))
        assert item.plane_size == 1
    with Codec() as codec:
        smaller, item = await packed(codec, weights(200_000))
        assert item.plane_size == 2
    assert len(smaller) < 0.69 * 400_000 < len(stored)


async def test_items_follow_each_other(codec: Codec) -> None:
    tensors = [weights(size) for size in (5, 10_000, 1, 30_000, 2048)]
    made = [
        codec.encode_item(*encode_tensor(tensor).segments, element_size=2) for tensor in tensors
    ]
    pairs = [pair async for pair in codec.encode_items(made)]
    assert [key for key, _ in groupby(item for item, _ in pairs)] == made
    offset = 0
    for item, tensor in zip(made, tensors, strict=True):
        stored = b"".join(segment for owner, segment in pairs if owner is item)
        assert (stored, item.stored(offset)) == await packed(codec, tensor, offset)
        assert [owner for owner, _ in pairs].count(item) == item.num_segments
        offset += item.length


async def test_an_item_without_memory_is_a_stream_too(codec: Codec) -> None:
    frames = codec.encode_item(b"before", b"", b"after", element_size=2)
    stored = await joined(codec, frames)
    assert StreamReader(io.BytesIO(stored), Codec).readall() == b"beforeafter"
    assert frames.stored(0).frame_ends == ()
    assert frames.length == len(stored)
