"""Policies that travel with a store: how to transfer, how to retry, how long to wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import ssl

    from aioflux._stats import ProgressHook

__all__ = ["MIB", "RetryPolicy", "StoreOptions", "Timeouts", "TransferOptions"]

MIB = 1024 * 1024


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{type(owner).__name__}.{name} must be a number, not {value!r}")
        if not value > 0 or value == math.inf:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be a finite number above 0, not {value!r}"
            )


def _require_whole(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, float):
            raise TypeError(f"{type(owner).__name__}.{name} must be an int, not {value!r}")
    _require_positive(owner, *names)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOptions:
    """How many requests and bytes a store has under way, and how it cuts objects into them."""

    max_in_flight: int = 64
    """Requests under way at once in one store; 64 by default."""
    max_in_flight_bytes: int = 256 * MIB
    """Bytes of bodies under way at once in one store, in bytes; 256 MiB by default. One range or
    part is always let through. It also bounds the memory of each iteration over many objects, such
    as `get_many` or that of a dataset: bytes in flight and objects that wait for the consumer take
    up to this together, plus one object. Each DataLoader worker has a budget of its own."""
    range_size_bytes: int = 16 * MIB
    """Size of the ranges in which a larger object is read, in bytes; 16 MiB by default."""
    part_size_bytes: int = 16 * MIB
    """Size of the parts in which an object is written, in bytes; 16 MiB by default. Services take
    5 MiB to 5 GiB."""
    max_buffered_bytes: int = 64 * MIB
    """Bytes that one writer may hold before `write` waits, in bytes; 64 MiB by default, which is
    four parts."""
    verify: bool = True
    """Checksums of received and sent bytes are compared; True by default."""
    verify_ranges: Literal["auto", "always", "never"] = "auto"
    """How a range is verified that is not a whole object, for which services tell no checksum;
    "auto" by default: over plain http it is read twice at the same time, and a third time where
    the two differ; over TLS, which notices changed bytes itself, and from files once. "always"
    reads twice everywhere, "never" nowhere. Without effect where `verify` is False."""

    def __post_init__(self) -> None:
        _require_whole(
            self,
            "max_in_flight",
            "max_in_flight_bytes",
            "range_size_bytes",
            "part_size_bytes",
            "max_buffered_bytes",
        )
        if self.verify_ranges not in {"auto", "always", "never"}:
            raise ValueError(
                'TransferOptions.verify_ranges must be "auto", "always" or "never", not '
                f"{self.verify_ranges!r}"
            )
        if not 5 * MIB <= self.part_size_bytes <= 5 * 1024 * MIB:
            raise ValueError(
                "TransferOptions.part_size_bytes must be between 5 MiB and 5 GiB, the limits of "
                f"multipart uploads, not {self.part_size_bytes!r}"
            )
        if self.max_buffered_bytes < self.part_size_bytes:
            raise ValueError(
                "TransferOptions.max_buffered_bytes must hold at least one part of "
                f"{self.part_size_bytes} bytes, not {self.max_buffered_bytes!r}; set both"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When a failed request is sent again.

    Delays have full jitter; a Retry-After from the service wins.
    """

    max_attempts: int = 8
    """Attempts of one request, the first included; 8 by default. 1 switches retries off. One that
    moved bytes of a body does not count: the next one goes on from there, until the deadline.
    Three malformed answers in a row end a request, whatever this is: the service sends none."""
    initial_seconds: float = 0.25
    """Upper bound of the first delay, in seconds; 0.25 by default."""
    multiplier: float = 2.0
    """Growth of that bound from one attempt to the next; 2.0 by default."""
    max_seconds: float = 32.0
    """Largest bound of a delay, in seconds; 32 by default."""
    deadline_seconds: float = 300.0
    """Time that all attempts of one request may take together, in seconds; 300 by default."""
    budget_retries: int = 100
    """Retries that all requests of one store may send at once; 100 by default. Every five requests
    that succeed allow one more. A retry above the budget is not dropped, it waits."""
    budget_per_second: float = 10.0
    """Retries in each second that are allowed whatever else happens; 10 by default."""

    def __post_init__(self) -> None:
        _require_whole(self, "max_attempts", "budget_retries")
        _require_positive(
            self,
            "initial_seconds",
            "multiplier",
            "max_seconds",
            "deadline_seconds",
            "budget_per_second",
        )
        if not 1 <= self.multiplier < math.inf:
            raise ValueError(
                f"RetryPolicy.multiplier must be a finite number of 1 or more, not "
                f"{self.multiplier!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long one attempt waits for the network."""

    connect_seconds: float = 10.0
    """Time for name lookup, connection and TLS handshake, in seconds; 10 by default."""
    progress_seconds: float = 5.0
    """Time in which at least one byte of a response body must arrive or of a request body must
    leave, in seconds; 5 by default. On Linux a byte has left when the server's system has received
    it; elsewhere, and through a proxy, when this system has taken it, which it does of some MiB at
    once."""
    idle_seconds: float = 60.0
    """Time that a connection may be silent outside a body, in seconds; 60 by default: while a
    service works on a write before it answers, all of whose body has left, and unused in the pool,
    where it is then closed. The answer to a read must begin within `progress_seconds`."""

    def __post_init__(self) -> None:
        _require_positive(self, "connect_seconds", "progress_seconds", "idle_seconds")


class StoreOptions(TypedDict, total=False):
    """Keywords of `open_store`, for what opens one itself: `**options: Unpack[StoreOptions]`."""

    transfer: TransferOptions | None
    retry: RetryPolicy | None
    timeouts: Timeouts | None
    credentials: Any
    endpoint_url: str | None
    ssl_context: ssl.SSLContext | None
    progress: ProgressHook | None
