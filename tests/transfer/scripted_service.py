"""A store on a service in memory with scripted faults; retries take no real time."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import aioflux
from aioflux._values.uri import parse_uri
from aioflux.errors import StorageError
from aioflux.testing.faults import Fault, FlakyService
from tests.servers.process_state import memory_bucket
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


def service_of(uri: str) -> Service:
    """Return a new service of a uri."""
    store = aioflux.open_store(uri)
    return store._open_service(store._config)


class ServiceStore(aioflux.Store):
    """A store on a given service and the running loop. Its clock is the clock of the loop.

    Attributes:
        session: Its session on that loop, with limits and counters.
    """

    def __init__(self, service: Service, **settings: Any) -> None:
        super().__init__(parse_uri(service.uri("")), timeouts=aioflux.Timeouts(), **settings)
        self._service = service
        self._sessions.clock = loop_time
        self.session = self._sessions.current()

    def _open_service(self, _: Any) -> Service:
        return self._service

    def is_clean(self) -> bool:
        """Return whether every slot and byte is released, and no deadline is open."""
        limits = self.session.admission
        return (
            limits.bytes.held_bytes == 0
            and limits.slots.num_held == 0
            and self.stats.num_in_flight == 0
            and self.session.admission.deadlines.is_idle
        )


class ScriptedService:
    """A flaky memory service, its bucket, and a store.

    Attributes:
        verify_ranges: The option of new stores, by default.
    """

    verify_ranges = False

    def __init__(self, name: str, *, service: Service | None = None) -> None:
        self.bucket = memory_bucket(name)
        self.service = FlakyService(service or service_of(f"memory://{name}"))

    @cached_property
    def store(self) -> ServiceStore:
        """A store on the running loop, which need not be closed."""
        return self.new_store()

    def new_store(
        self, *, retry: aioflux.RetryPolicy = RETRY, progress: Any = None, **options: Any
    ) -> ServiceStore:
        """Return a store with other options."""
        transfer = replace(OPTIONS, **({"verify_ranges": self.verify_ranges} | options))
        return ServiceStore(self.service, transfer=transfer, retry=retry, progress=progress)

    def put(self, key: str, data: bytes) -> aioflux.ObjectMeta:
        return self.bucket.store(key, data)

    def get(self, key: str) -> bytes:
        return self.bucket.objects[key].data

    def is_clean(self) -> bool:
        """Return whether no upload is open and every slot and byte is released."""
        return not self.bucket.uploads and self.store.is_clean()

    def holds_no_bytes(self) -> bool:
        """Return whether open uploads have no parts and every slot and byte is released."""
        parts = [each.parts for each in self.bucket.uploads.values()]
        return not any(parts) and self.store.is_clean()


def refused_for_good() -> Fault:
    return Fault(kind="refuse", error=StorageError("no", uri="memory://x"))
