"""store_batches: batches on an event loop, transformed in threads, without worker processes.

keys -> store.fetch_batches -> groups in threads -> items -> batches
        bounded by the store   bounded in number and in bytes
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from aioflux.data._records.formats import records_of_sample
from aioflux.data._sample import make_sample
from aioflux.data._transform import apply_transform

if TYPE_CHECKING:
    from concurrent.futures import Future

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._records.formats import Records
    from aioflux.data._sample import ItemOfRecord, Record, Sample
    from aioflux.store import Store

    Keys: TypeAlias = Iterable[str | ObjectMeta] | AsyncIterable[str | ObjectMeta]

T = TypeVar("T")

_MAX_GROUP = 16
"""Largest number of samples that one call on a thread transforms. To start a call and wait for it
costs 50 us, as much as decoding a small sample."""


def store_batches(
    store: Store,
    keys: Keys,
    *,
    batch_size: int,
    transform: Callable[[Record], ItemOfRecord] | None = None,
    records: Records[Record] | None = None,
    num_threads: int = 4,
    ordered: bool = True,
    drop_last: bool = False,
    max_bytes: int | None = None,
) -> AsyncGenerator[list[ItemOfRecord], None]:
    """Yield batches of transformed items; objects are prefetched, and transformed in threads.

        async for batch in store_batches(store, store.list(), batch_size=64, transform=decode): ...

    At most two batches of samples are buffered, in addition to the buffers of the store. If the
    iteration ends early, by `break` within `contextlib.aclosing`, an error or a cancellation, the
    requests in flight are cancelled and transforms that are running are waited for.

    Args:
        store: An asynchronous store, open on the running loop.
        keys: Keys, or metadata of a listing, which pins generations. May be a generator,
            synchronous or asynchronous, such as `store.list()`.
        batch_size: Number of items in a batch; the last batch may have fewer.
        transform: Called in a thread with each `Sample`, or with each record; returns an item. Runs
            in parallel if it releases the GIL, as image decoders, numpy and torch do.
            Without a transform, items are the samples or records.
        records: Decodes the records of one object, such as `jsonl()`; objects are read whole.
        num_threads: Number of threads for transforms.
        ordered: Whether items are in the order of `keys`; otherwise in the order of completion.
        drop_last: Whether a last batch that is not full is left out.
        max_bytes: Largest total size of objects that wait for their transform or for the consumer;
            `TransferOptions.max_in_flight_bytes` by default. A larger object is admitted alone.

    Raises:
        StorageError: An object cannot be read; the error names the object and ends the iteration.
        ValueError: A number is not above 0.
    """
    limit = store.transfer.max_in_flight_bytes if max_bytes is None else max_bytes
    for name, value in (
        ("batch_size", batch_size),
        ("num_threads", num_threads),
        ("max_bytes", limit),
    ):
        if value <= 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    pipeline: _TransformPipeline[Any] = _TransformPipeline(
        transform,
        records,
        num_threads=num_threads,
        ordered=ordered,
        max_group=min(batch_size, _MAX_GROUP),
        max_samples=2 * batch_size,
        max_bytes=limit,
    )
    return _batches(pipeline, store, keys, batch_size, ordered=ordered, drop_last=drop_last)


async def _batches(
    pipeline: _TransformPipeline[T],
    store: Store,
    keys: Keys,
    batch_size: int,
    *,
    ordered: bool,
    drop_last: bool,
) -> AsyncGenerator[list[T], None]:
    # Not a TaskGroup: after an error in `fill`, it would cancel the task that iterates.
    filling = asyncio.create_task(pipeline.fill(store.fetch_batches(keys, ordered=ordered)))
    items: list[T] = []
    try:
        while ready := await pipeline.next_items():
            items += ready
            whole = len(items) - len(items) % batch_size
            for start in range(0, whole, batch_size):
                yield items[start : start + batch_size]
            del items[:whole]
        if items and not drop_last:
            yield items
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await pipeline.close()


@dataclass(slots=True, eq=False)
class _Group(Generic[T]):
    """Samples that one thread transforms in sequence."""

    num_samples: int
    num_bytes: int
    work: Future[tuple[list[T], Exception | None]] | None
    done: asyncio.Future[tuple[list[T], Exception | None]]


class _TransformPipeline(Generic[T]):
    """Groups of samples between the store and the consumer."""

    def __init__(
        self,
        transform: Callable[[Any], T] | None,
        records: Records[Any] | None,
        *,
        num_threads: int,
        ordered: bool,
        max_group: int,
        max_samples: int,
        max_bytes: int,
    ) -> None:
        self._transform = transform
        self._records = records
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="aioflux-transform")
        self._ordered = ordered
        self._max_group = max_group
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._num_samples = self._num_bytes = 0
        self._groups: deque[_Group[T]] = deque()
        self._changed, self._may_add = asyncio.Event(), asyncio.Event()
        self._is_filled = self._is_closing = False
        self._fetch_error: BaseException | None = None
        self._transform_error: Exception | None = None

    async def fill(self, batches: AsyncGenerator[list[tuple[ObjectMeta, bytes]], None]) -> None:
        """Fetch objects and start their transforms, within the limits."""
        try:
            async with aclosing(batches) as fetched:
                async for batch in fetched:
                    samples = [make_sample(meta, data) for meta, data in batch]
                    # Groups small enough that every thread has one.
                    size = max(1, min(self._max_group, -(-len(samples) // self._num_threads)))
                    for start in range(0, len(samples), size):
                        await self._start(samples[start : start + size])
        except BaseException as exc:
            # `next_items` raises this error after it has returned all earlier items.
            self._fetch_error = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            self._is_filled = True
            self._changed.set()

    async def _start(self, samples: Sequence[Sample]) -> None:
        num_bytes = sum(len(sample.data) for sample in samples)
        while self._groups and not (
            self._num_samples + len(samples) <= self._max_samples
            and self._num_bytes + num_bytes <= self._max_bytes
        ):
            self._may_add.clear()
            await self._may_add.wait()
        self._num_samples += len(samples)
        self._num_bytes += num_bytes
        work = None
        if self._transform is None and self._records is None:
            done = asyncio.get_running_loop().create_future()
            done.set_result((samples, None))
        else:
            work = self._threads.submit(self._transform_samples, samples)
            done = asyncio.wrap_future(work)
        done.add_done_callback(self._on_done)
        self._groups.append(_Group(len(samples), num_bytes, work, done))

    def _transform_samples(self, samples: Sequence[Sample]) -> tuple[list[T], Exception | None]:
        """Transform samples, in a thread, until one fails; return the items and the error."""
        items: list[T] = []
        try:
            for sample in samples:
                values = (
                    [sample] if self._records is None else records_of_sample(self._records, sample)
                )
                for value in values:
                    if self._is_closing:
                        return items, None
                    items.append(apply_transform(value, self._transform, uri=sample.uri))
        except Exception as exc:  # raised by `next_items` after all earlier items
            return items, exc
        return items, None

    def _on_done(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # the loop logs exceptions that are never retrieved
        self._changed.set()

    async def next_items(self) -> list[T]:
        """Wait for items and return them; an empty list is the end.

        Raises:
            Exception: The error of a read or of a transform, after all earlier items.
        """
        while True:
            if self._transform_error is not None:
                raise self._transform_error
            group = self._pop_done()
            if group is not None:
                self._num_samples -= group.num_samples
                self._num_bytes -= group.num_bytes
                self._may_add.set()
                items, self._transform_error = group.done.result()
                if items:
                    return items
            elif self._is_filled and not self._groups:
                if self._fetch_error is not None:
                    raise self._fetch_error
                return []
            else:
                self._changed.clear()
                await self._changed.wait()

    def _pop_done(self) -> _Group[T] | None:
        """Remove and return a group that is done; with `ordered` only the first group."""
        for group in self._groups:
            if group.done.done():
                self._groups.remove(group)
                return group
            if self._ordered:
                break
        return None

    async def close(self) -> None:
        """Cancel the groups that have not started, and wait for the running ones."""
        self._is_closing = True
        running = [
            group.done
            for group in self._groups
            if group.work is not None and not group.work.cancel()
        ]
        self._groups.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running:
            await asyncio.wait(running)
