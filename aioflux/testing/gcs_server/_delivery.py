"""Delivery of one response: a pure plan of sends, waits and disconnects.

The connection runs the steps with `loop.call_later`. This module uses no clock and no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

# Most bodies are one slice: 8 MiB were sent 1.3 times as fast in one as in slices of 1 MiB.
SLICE_BYTES = 16 << 20
BEFORE_HEAD = -1  # value of `Delivery.cut_at` for no bytes at all
_PACED_SECONDS = 0.01  # time of one slice at a limited bandwidth
_LINK_BYTES = 64 << 10  # slice size if responses share the bandwidth, so that they alternate


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Delays, bandwidth and disconnects of one response. Positions are offsets in the body."""

    delay_seconds: float = 0.0
    """Delay before the first byte of the response."""
    stall_at: int | None = None
    """Position in the body before which the server waits `stall_seconds`."""
    stall_seconds: float = 0.0
    cut_at: int | None = None
    """Position in the body after which the connection is closed. With -1 nothing is sent."""
    reset: bool = False
    """Whether `cut_at` resets the connection (RST) instead of closing it (FIN)."""
    bytes_per_second: float | None = None
    """Bandwidth of the body. None means no limit."""
    link: Callable[[int], float] | None = None
    """Bandwidth that responses share: a function from a number of bytes to the seconds to wait
    before sending them."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the bytes `[start, end)` of the body. The first `Send` also sends the head."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Send nothing for some time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection, or reset it."""

    reset: bool


Step = Send | Wait | Cut
PLAIN = Delivery()


def steps(size: int, delivery: Delivery | None) -> Iterator[Step]:
    """Yield the steps that send a response whose body has `size` bytes."""
    plan = delivery or PLAIN
    if plan.delay_seconds > 0:
        yield Wait(plan.delay_seconds)
    if plan.cut_at is not None and plan.cut_at <= BEFORE_HEAD:
        yield Cut(plan.reset)
        return
    end = size if plan.cut_at is None else min(plan.cut_at, size)
    yield Send(0, 0)  # the head
    position = 0
    stall_at = None if plan.stall_at is None else min(plan.stall_at, end)
    if stall_at is not None:
        yield from _send_range(0, stall_at, plan)
        yield Wait(plan.stall_seconds)
        position = stall_at
    yield from _send_range(position, end, plan)
    if plan.cut_at is not None:
        yield Cut(plan.reset)


def _send_range(start: int, end: int, plan: Delivery) -> Iterator[Step]:
    """Yield the steps that send a range of the body in slices."""
    pace, link = plan.bytes_per_second, plan.link
    size = SLICE_BYTES if link is None else _LINK_BYTES
    if pace is not None:
        size = min(size, max(1, int(pace * _PACED_SECONDS)))
    for position in range(start, end, size):
        stop = min(position + size, end)
        if link is not None:
            wait = link(stop - position)
            if wait > 0:
                yield Wait(wait)
        yield Send(position, stop)
        if pace is not None:
            yield Wait((stop - position) / pace)


def shift_delivery(plan: Delivery, start: int, body_start: int) -> Delivery:
    """Convert the delivery of a response in a batch to positions in the body of the batch.

    Args:
        plan: Delivery of the response.
        start: Position of the MIME part of the response in the body of the batch.
        body_start: Position of the body of the response in the body of the batch.
    """
    cut_at, stall_at = plan.cut_at, plan.stall_at
    if cut_at is not None and cut_at <= BEFORE_HEAD:
        cut_at = start or BEFORE_HEAD
    elif cut_at is not None:
        cut_at += body_start
    return replace(
        plan, cut_at=cut_at, stall_at=None if stall_at is None else stall_at + body_start
    )


def merge_deliveries(plans: list[Delivery]) -> Delivery | None:
    """Merge the deliveries of a batch: the longest delay, the first stall, the first disconnect."""
    if not plans:
        return None
    merged = replace(PLAIN, delay_seconds=max(plan.delay_seconds for plan in plans))
    cut = min(
        (plan for plan in plans if plan.cut_at is not None),
        key=lambda plan: plan.cut_at or 0,
        default=PLAIN,
    )
    stall = next((plan for plan in plans if plan.stall_at is not None), PLAIN)
    if cut.cut_at is None or (stall.stall_at or 0) < cut.cut_at:
        merged = replace(merged, stall_at=stall.stall_at, stall_seconds=stall.stall_seconds)
    return replace(merged, cut_at=cut.cut_at, reset=cut.reset)
