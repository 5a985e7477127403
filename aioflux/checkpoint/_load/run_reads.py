"""Reads of a load, run on the event loop: bounded in number and bytes, handed out as they end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from aioflux.checkpoint._load.plan import MAX_READ_BYTES
from aioflux.checkpoint._load.units import Frames
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from aioflux.checkpoint._format.codec import Codec
    from aioflux.checkpoint._load.plan import Read
    from aioflux.checkpoint._load.units import Unit
    from aioflux.options import TransferOptions

__all__ = ["Delivery", "Job", "Reads", "run_jobs"]

_REUSED_BYTES: Final = 1024 * 1024
"""Buffers from here on are used again: fresh memory costs ten times a copy."""

_MAX_DECODED: Final = 4
"""Reads that have ended and are decoded, beside those under way: the link does not wait for it."""


class Reads(Protocol):
    """Reads bytes of objects."""

    def uri(self, key: str) -> str:
        """Return the whole uri of an object."""

    async def read(self, key: str, start: int, into: memoryview) -> None:
        """Fill memory with the bytes of an object from `start` on."""


class Job(NamedTuple):
    """One read, and who gets its parts."""

    key: str
    read: Read
    units: tuple[Unit, ...]
    """Of each part of the read."""

    @property
    def num_bytes(self) -> int:
        """Bytes of buffers that it needs."""
        if self.read.is_direct:
            return 0
        decoded = sum(each.num_bytes for each in self.units if isinstance(each, Frames))
        return self.read.end - self.read.start + decoded


class Delivery(NamedTuple):
    """Bytes of a unit that were read."""

    unit: Unit
    start: int
    """First of them in the object."""
    data: torch.Tensor | None
    """The bytes, valid until the next are asked for; None where they are in their place."""


class _Ended(NamedTuple):
    deliveries: list[Delivery]
    buffers: list[torch.Tensor]


class _Buffers:
    """Memory for what is not read to where it is wanted."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of that size, or of `MAX_READ_BYTES` for all that are used again."""
        if not _REUSED_BYTES <= size <= MAX_READ_BYTES:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if self._idle:
            return self._idle.pop()
        return torch.empty(MAX_READ_BYTES, dtype=torch.uint8, device="cpu")

    def give(self, buffer: torch.Tensor) -> None:
        """Take back what nobody looks at any more."""
        if buffer.numel() == MAX_READ_BYTES:
            self._idle.append(buffer)


async def run_jobs(
    reads: Reads, jobs: Iterable[Job], codec: Codec | None, transfer: TransferOptions
) -> AsyncGenerator[list[Delivery], None]:
    """Yield what was read, several at a time, in the order in which it arrives.

    The first failure cancels what is under way and is raised.

    Args:
        reads: Reads bytes.
        jobs: What to read, in the order in which to begin.
        codec: Decodes frames; None where there are none.
        transfer: At most `max_in_flight` reads are under way, with `max_in_flight_bytes` of
            buffers, those that were yielded last among them.
    """
    buffers = _Buffers()
    slots = asyncio.Semaphore(transfer.max_in_flight)
    most = transfer.max_in_flight + (_MAX_DECODED if codec else 0)
    waiting = iter(jobs)
    ahead = next(waiting, None)
    running: dict[asyncio.Task[_Ended], int] = {}
    num_bytes = 0
    try:
        while ahead is not None or running:
            while (
                ahead is not None
                and len(running) < most
                and (not num_bytes or num_bytes + ahead.num_bytes <= transfer.max_in_flight_bytes)
            ):
                task = asyncio.create_task(_run(reads, ahead, codec, buffers, slots))
                running[task] = ahead.num_bytes
                num_bytes += ahead.num_bytes
                ahead = next(waiting, None)
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            results = [task.result() for task in ended]
            yield [delivery for result in results for delivery in result.deliveries]
            num_bytes -= sum(running.pop(task) for task in ended)
            for result in results:
                for buffer in result.buffers:
                    buffers.give(buffer)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(
    reads: Reads, job: Job, codec: Codec | None, buffers: _Buffers, slots: asyncio.Semaphore
) -> _Ended:
    read = job.read
    if read.is_direct:
        (unit,) = job.units
        memory = unit.memory(read.start, read.end)
        assert memory is not None
        async with slots:
            await reads.read(job.key, read.start, memory)
        return _Ended([Delivery(unit, read.start, None)], [])
    size = read.end - read.start
    used = [buffers.take(size)]
    buffer = used[0][:size]
    async with slots:
        await reads.read(job.key, read.start, buffer.numpy().data)
    deliveries: list[Delivery] = []
    for unit, part in zip(job.units, read.parts, strict=True):
        data = buffer[part.start - read.start : part.end - read.start]
        if isinstance(unit, Frames):
            assert codec is not None
            try:
                decoded = await _decode(unit, data, codec, buffers, used)
            except CheckpointCorruptError as exc:
                raise CheckpointCorruptError(f"{reads.uri(job.key)} is damaged: {exc}") from exc
            deliveries.append(Delivery(unit, part.start, decoded))
        else:
            deliveries.append(Delivery(unit, part.start, data))
    return _Ended(deliveries, used)


async def _decode(
    unit: Frames,
    stored: torch.Tensor,
    codec: Codec,
    buffers: _Buffers,
    used: list[torch.Tensor],
) -> torch.Tensor | None:
    """Decode frames to where they go, or into a buffer, which is returned."""
    raw, out = None, unit.raw_memory()
    if out is None:
        used.append(buffers.take(unit.num_bytes))
        raw = used[-1][: unit.num_bytes]
        out = raw.numpy().data
    await codec.decode(stored.numpy().data, unit.slices, out, plane_size=unit.plane_size)
    return raw
