"""Counters of requests and bytes by operation, for tests and benchmarks."""

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
    """Counters of one operation, or sums over several operations."""

    requests: int = 0
    """Number of received requests."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Number of responses by status. The key 0 counts requests whose connection the server closed
    before it sent a response."""
    bytes_in: int = 0
    """Bytes of received request bodies."""
    bytes_out: int = 0
    """Bytes of response bodies passed to the kernel."""
    in_flight: int = 0
    """Number of received requests whose response is not counted yet."""
    peak_in_flight: int = 0
    """Maximum of `in_flight` so far."""

    def add(self, other: OperationStats) -> None:
        """Add the counters of another operation, except `in_flight` and `peak_in_flight`."""
        self.requests += other.requests
        self.statuses += other.statuses
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out


class Stats(Hook):
    """Counters of a server. Any thread may read them.

    A response is counted before its last byte is sent: when a client has received a response, the
    counters include it. Requests that match no operation are not counted. A request in a batch is
    counted for its own operation.

    Args:
        app: Application whose connections and uploads are counted.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._operations: dict[str, OperationStats] = {}
        self._in_flight = self._peak_in_flight = self._first_connection = 0

    # --- reading -------------------------------------------------------------------------

    def operation(self, name: str) -> OperationStats:
        """Return a copy of the counters of one operation; all are 0 if there was no request.

        Args:
            name: Name of the operation, a key of `operations`. A name without its API adds the
                counters of both APIs: `objects.get` is `storage.objects.get` + `xml.objects.get`.
        """
        operations = self.operations
        if name in operations:
            return operations[name]
        total = OperationStats()
        for operation, entry in operations.items():
            if operation.partition(".")[2] == name:
                total.add(entry)
                total.in_flight += entry.in_flight
                total.peak_in_flight = max(total.peak_in_flight, entry.peak_in_flight)
        return total

    @property
    def operations(self) -> dict[str, OperationStats]:
        """Copy of the counters, by the name of the operation."""
        with self._lock:
            return copy.deepcopy(self._operations)

    @property
    def total(self) -> OperationStats:
        """Sums of the counters of all operations. The peak is that of all requests together."""
        total = OperationStats()
        for entry in self.operations.values():
            total.add(entry)
        with self._lock:
            total.in_flight, total.peak_in_flight = self._in_flight, self._peak_in_flight
        return total

    @property
    def open_uploads(self) -> int:
        """Number of multipart and resumable uploads that are neither completed nor aborted."""
        state = self._app.state
        with state.lock:
            resumable = sum(upload.resource is None for upload in state.resumable_uploads.values())
            return len(state.multipart_uploads) + resumable

    @property
    def connections_opened(self) -> int:
        """Number of connections accepted since the start or the last `reset`."""
        return self._app.num_opened - self._first_connection

    @property
    def connections_open(self) -> int:
        """Number of open connections."""
        return len(self._app.connections)

    def reset(self) -> None:
        """Set all counters to zero, except the requests in flight."""
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
            if entry.in_flight > entry.peak_in_flight:  # max() takes three times as long
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
        return self._operations.setdefault(name, OperationStats())
