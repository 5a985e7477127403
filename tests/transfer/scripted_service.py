"""What tests of transfers stand on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aioflux
from aioflux._services.memory import MemoryService, memory_bucket
from aioflux._transfer.limits import Limits
from aioflux._transfer.session import Session
from aioflux.errors import StorageError
from aioflux.testing.faults import Fault, FlakyService
from tests.transfer.clock import loop_time

if TYPE_CHECKING:
    from aioflux._services.base import Service

MIB = 1024 * 1024
PART = 5 * MIB

OPTIONS = aioflux.TransferOptions(
    max_in_flight=4, range_size_bytes=1000, part_size_bytes=PART, max_buffered_bytes=2 * PART
)
RETRY = aioflux.RetryPolicy(max_attempts=4, initial_seconds=1e-6, max_seconds=1e-6)

REFUSE = Fault(kind="refuse")
LOSE = Fault(kind="lose")


def pattern(size: int, seed: int = 1) -> bytes:
    step = bytes((seed + at * at + at // 256) % 256 for at in range(min(size, 65_521)))
    return (step * (size // 65_521 + 1))[:size]


def store_of(session: Session) -> aioflux.Store:
    """Return a store whose calls on the running loop use a session."""
    store = aioflux.open_store(
        session.service.uri(""), transfer=session.options, retry=session.retry
    )
    store._sessions._by_loop[asyncio.get_running_loop()] = session
    return store


class ScriptedService:
    """A flaky memory service, its bucket, and a session."""

    def __init__(self, name: str, *, service: Service | None = None) -> None:
        self.bucket = memory_bucket(name)
        self.service = FlakyService(service or MemoryService(name, ""))
        self.session = self.new_session()

    @property
    def store(self) -> aioflux.Store:
        """A store over the session; it needs no end."""
        return store_of(self.session)

    def new_store(self, **options: Any) -> aioflux.Store:
        """Return a store over a session of its own."""
        return store_of(self.new_session(**options))

    def new_session(self, *, retry: aioflux.RetryPolicy = RETRY, **options: Any) -> Session:
        chosen = replace(OPTIONS, **options)
        limits = Limits(
            max_in_flight=chosen.max_in_flight, max_in_flight_bytes=chosen.max_in_flight_bytes
        )
        return Session(self.service, chosen, retry, limits, clock=loop_time)

    def put(self, key: str, data: bytes) -> aioflux.ObjectMeta:
        return self.bucket.store(key, data)

    def get(self, key: str) -> bytes:
        return self.bucket.objects[key].data

    def is_clean(self) -> bool:
        """No upload is open and every place and byte was given back."""
        limits = self.session.limits
        return (
            not self.bucket.uploads
            and limits.bytes.held_bytes == 0
            and limits.requests.num_held == 0
        )


def refused_for_good() -> Fault:
    return Fault(kind="refuse", error=StorageError("no", uri="memory://x"))
