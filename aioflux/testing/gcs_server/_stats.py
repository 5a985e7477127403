"""Counters per operation, which tests and benchmarks read while the server runs."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._app import Hook
from aioflux.testing.gcs_server._delivery import BEFORE_HEAD

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._app import App
    from aioflux.testing.gcs_server._messages import Request, Response


@dataclass(kw_only=True, slots=True)
class OperationStats:
    """Counters of one operation, or of several together."""

    requests: int = 0
    """Requests received."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Responses by status; 0 counts requests whose connection ended without a response."""
    bytes_in: int = 0
    """Bytes of request bodies, as received."""
    bytes_out: int = 0
    """Bytes of response bodies handed to the kernel."""
    in_flight: int = 0
    """Requests whose response has not ended."""
    peak_in_flight: int = 0

    def add(self, other: OperationStats) -> None:
        """Add another's totals, without requests in flight and their peak."""
        self.requests += other.requests
        self.statuses += other.statuses
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out


class Stats(Hook):
    """Counters of a server. Any thread may read them.

    A response is counted before its last byte is sent: a client that has received it finds it here.
    Requests that match no operation are not counted; those of a batch count under their own.

    Args:
        app: The application whose connections and uploads are counted too.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._operations: dict[str, OperationStats] = {}
        self._in_flight = self._peak_in_flight = self._first_connection = 0

    # --- reading -------------------------------------------------------------------------

    def operation(self, name: str) -> OperationStats:
        """Return a copy of the counters of one operation; zeros if there was no request.

        Args:
            name: An operation as `operations` has it, or without its API: `objects.get` counts
                `storage.objects.get` and `xml.objects.get` together.
        """
        found = self.operations
        if name in found:
            return found[name]
        total = OperationStats()
        for operation, entry in found.items():
            if operation.partition(".")[2] == name:
                total.add(entry)
                total.in_flight += entry.in_flight
                total.peak_in_flight = max(total.peak_in_flight, entry.peak_in_flight)
        return total

    @property
    def operations(self) -> dict[str, OperationStats]:
        """A copy of all counters by operation."""
        with self._lock:
            return copy.deepcopy(self._operations)

    @property
    def total(self) -> OperationStats:
        """A copy of the counters of all operations together."""
        total = OperationStats()
        for entry in self.operations.values():
            total.add(entry)
        with self._lock:
            total.in_flight, total.peak_in_flight = self._in_flight, self._peak_in_flight
        return total

    @property
    def open_uploads(self) -> int:
        """Multipart and resumable uploads that are neither completed nor aborted."""
        state = self._app.state
        with state.lock:
            resumable = sum(upload.resource is None for upload in state.resumable_uploads.values())
            return len(state.multipart_uploads) + resumable

    @property
    def connections_opened(self) -> int:
        """Connections accepted since the start or the last `reset`."""
        return self._app.num_opened - self._first_connection

    @property
    def connections_open(self) -> int:
        """Connections open now."""
        return len(self._app.connections)

    def reset(self) -> None:
        """Set all counters to zero, but for requests in flight."""
        with self._lock:
            self._operations = {
                name: OperationStats(in_flight=entry.in_flight, peak_in_flight=entry.in_flight)
                for name, entry in self._operations.items()
                if entry.in_flight
            }
            self._peak_in_flight = self._in_flight
            self._first_connection = self._app.num_opened

    # --- counting ------------------------------------------------------------------------

    def before(self, request: Request) -> Response | None:
        size = request.size
        name = request.match.route.operation
        with self._lock:
            entry = self._operations.get(name) or self._entry(name)
            entry.requests += 1
            entry.bytes_in += size
            entry.in_flight += 1
            self._in_flight += 1
            if entry.in_flight > entry.peak_in_flight:  # max() would cost three times as much
                entry.peak_in_flight = entry.in_flight
            if self._in_flight > self._peak_in_flight:
                self._peak_in_flight = self._in_flight
        return None

    def finished(self, request: Request, response: Response) -> None:
        delivery, status = response.delivery, response.status
        if delivery is not None and delivery.cut_at is not None and delivery.cut_at <= BEFORE_HEAD:
            status = 0
        name = request.match.route.operation
        with self._lock:
            entry = self._operations.get(name) or self._entry(name)
            entry.statuses[status] += 1
            entry.bytes_out += response.sent_bytes
            entry.in_flight -= 1
            self._in_flight -= 1

    def _entry(self, name: str) -> OperationStats:
        """Return the counters of an operation, created at its first request."""
        return self._operations.setdefault(name, OperationStats())
