"""A service whose `begin_get` reads complete when a test says so, and with the test's result."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aioflux
from aioflux._http.errors import ConnectionLostError
from aioflux._values.uri import check_name
from aioflux.errors import StorageError, TransientError
from aioflux.testing.faults import FlakyService
from tests.servers.process_state import memory_bucket
from tests.transfer.scripted_service import MIB, RETRY, ServiceStore, service_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioflux._services.base import Body, ReadRequest

OPTIONS = aioflux.TransferOptions(
    max_in_flight=4, max_in_flight_bytes=4 * MIB, range_size_bytes=MIB
)
FIRST_BYTES = 512 * 1024
"""Size of the first range of a read by name with these options: half of an even share."""


@dataclass(eq=False)
class Begun:
    """A read in progress."""

    request: ReadRequest
    waiter: Any
    is_stale: bool = False


class FakeService(FlakyService):
    """Objects in memory. A read of `begin_get` waits until the test completes it.

    Attributes:
        begun: Keys of all reads that were begun without a task, in order.
        under_way: Those that were not answered yet.
        dropped: Those that nobody waits for any more.
        gets: (key, start, generation) of all other reads.
        is_full: No read can be begun without a task.
        max_under_way: Most reads that were under way at once.
        spoil: Changes what other reads return, or raises.
    """

    def __init__(self, name: str) -> None:
        super().__init__(service_of(f"memory://{name}"))
        self.bucket = memory_bucket(name)
        self.begun: list[str] = []
        self.under_way: dict[str, Begun] = {}
        self.dropped: list[str] = []
        self.gets: list[tuple[str, int, str]] = []
        self.is_full = False
        self.max_under_way = 0
        self.spoil: Callable[[Body], Body] = lambda body: body

    def store(self, key: str, data: bytes) -> aioflux.ObjectMeta:
        return self.bucket.store(key, data)

    def open(
        self,
        *,
        retry: aioflux.RetryPolicy = RETRY,
        progress: Any = None,
        is_warm: bool = True,
        **options: Any,
    ) -> ServiceStore:
        """A store that has an estimate of the size of objects."""
        store = ServiceStore(
            self, transfer=replace(OPTIONS, **options), retry=retry, progress=progress
        )
        if is_warm:
            store.session.unknown_size.add(1000)
        return store

    # Methods that complete a read in progress.

    def answer(self, *keys: str, change: Callable[[Body], Body | None] = lambda body: body) -> None:
        """Complete reads with the stored objects; `change` may modify the result or raise."""
        for key in keys:
            read = self.under_way.pop(key)
            read.waiter.set_result(change)

    def refuse(self, key: str, error: Exception) -> None:
        """Complete reads with an error."""

        def raising(_: Body) -> Body:
            raise error

        self.answer(key, change=raising)

    def lose(self, key: str, *, is_stale: bool = False) -> None:
        """Fail a read with a closed connection."""
        read = self.under_way.pop(key)
        read.is_stale = is_stale
        read.waiter.set_exception(ConnectionLostError("the connection was lost"))

    # Methods that the session calls.

    def begin_get(self, request: ReadRequest, waiter: Any) -> Any:
        key = request.key
        check_name(key)
        if self.is_full:
            return None
        self.begun.append(key)
        self.under_way[key] = read = Begun(request, waiter)
        self.max_under_way = max(self.max_under_way, len(self.under_way))
        return read

    def end_get(self, request: ReadRequest, exchange: Any, response: Any) -> Any:
        assert exchange.request == request
        stored = self.inner._find(request.key, request.generation)
        return response(self._body(stored, stored.data[: request.end]))

    def fail_get(
        self, request: ReadRequest, exchange: Any, error: Exception
    ) -> StorageError | None:
        assert isinstance(error, ConnectionLostError)
        return None if exchange.is_stale else TransientError(str(error), uri=self.uri(request.key))

    def abort_get(self, exchange: Any) -> None:
        del self.under_way[exchange.request.key]
        self.dropped.append(exchange.request.key)

    def _body(self, stored: Any, data: bytes) -> Body:
        from aioflux._services.base import Body

        meta = stored.meta
        return Body(data, len(stored.data), meta.generation, meta.crc32c, lambda: meta)

    async def get(self, request: ReadRequest, **settings: Any) -> Body:
        self.gets.append((request.key, request.start, request.generation))
        return self.spoil(await super().get(request, **settings))


class Reading:
    """A consumer of many objects, in a separate task.

    Attributes:
        got: (key, data) of what came, in order.
    """

    def __init__(
        self,
        store: ServiceStore,
        items: Any,
        *,
        ordered: bool = True,
        gate: asyncio.Event | None = None,
    ) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.store = store
        self._gate = gate
        self.task = asyncio.create_task(self._run(items, ordered=ordered))

    async def _run(self, items: Any, *, ordered: bool) -> None:
        async for batch in self.store.get_batches(items, ordered=ordered):
            self.got += batch
            if self._gate is not None:
                await self._gate.wait()

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.got]

    def is_clean(self) -> bool:
        """Return whether every slot and byte is released, and no deadline is open."""
        return self.store.is_clean()


def counts(store: aioflux.Store) -> dict[str, int]:
    stats = store.stats
    names = ("requests", "retries", "failures", "throttled", "in_flight")
    return {name: value for name in names if (value := getattr(stats, f"num_{name}"))}


async def settle() -> None:
    """Run the loop until every task waits."""
    for _ in range(30):
        await asyncio.sleep(0)


async def answer_all(fake: FakeService, reading: Reading) -> None:
    """Complete all reads until the consumer has finished."""
    async with asyncio.timeout(100):
        while not reading.task.done():
            fake.answer(*fake.under_way)
            await asyncio.sleep(0)
    await reading.task


def filled(fake: FakeService, keys: Iterable[str], *, size: int = 100) -> dict[str, bytes]:
    """Store a different object under each key."""
    stored = {key: (key.encode() + b".") * (size // (len(key) + 1) + 1) for key in keys}
    for key, data in stored.items():
        fake.store(key, data)
    return stored
