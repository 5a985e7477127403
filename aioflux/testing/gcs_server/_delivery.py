"""Plans of sending one response: steps of sends, waits and cuts.

The connection runs the steps with `loop.call_later`; nothing here uses a clock or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLICE_BYTES = 16 << 20  # 8 MiB in one slice were sent 1.3 times as fast as in slices of 1 MiB
BEFORE_HEAD = -1
_PACED_SECONDS = 0.01
_LINK_BYTES = 64 << 10  # sent by one response before another goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Delays, pace and cuts of one response. Byte positions count the body only."""

    delay_seconds: float = 0.0
    """Wait before the first byte of the head."""
    stall_at: int | None = None
    """Position before which to wait `stall_seconds`."""
    stall_seconds: float = 0.0
    cut_at: int | None = None
    """Position at which the connection ends early; `BEFORE_HEAD` sends nothing at all."""
    reset: bool = False
    """End the connection with RST rather than FIN."""
    bytes_per_second: float | None = None
    """Pace of the body."""
    link: Callable[[int], float] | None = None
    """Bandwidth shared with other responses: takes a number of bytes, returns the seconds until
    they may be sent."""


@dataclass(frozen=True, slots=True)
class Send:
    """Write the body's bytes `[start, end)`; the head goes before the first of them."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Write nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """End the connection."""

    reset: bool


Step = Send | Wait | Cut
PLAIN = Delivery()


def steps(size: int, delivery: Delivery | None) -> Iterator[Step]:
    """Yield the steps that send a body of `size` bytes; `Send(0, 0)` writes the head alone."""
    plan = delivery or PLAIN
    if plan.delay_seconds > 0:
        yield Wait(plan.delay_seconds)
    if plan.cut_at is not None and plan.cut_at <= BEFORE_HEAD:
        yield Cut(plan.reset)
        return
    end = size if plan.cut_at is None else min(plan.cut_at, size)
    yield Send(0, 0)
    position = 0
    stall_at = None if plan.stall_at is None else min(plan.stall_at, end)
    if stall_at is not None:
        yield from _spread(0, stall_at, plan)
        yield Wait(plan.stall_seconds)
        position = stall_at
    yield from _spread(position, end, plan)
    if plan.cut_at is not None:
        yield Cut(plan.reset)


def _spread(start: int, end: int, plan: Delivery) -> Iterator[Step]:
    """Send a range in slices, with waits between them if there is a pace."""
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
    """Return the delivery of one response of a batch with positions in the whole body.

    The part that holds the response begins at `start`, and the body in it at `body_start`.
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
    """Merge the deliveries of all responses: the longest delay, the first stall and cut."""
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
