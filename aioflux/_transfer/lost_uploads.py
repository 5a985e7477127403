"""Search for the uploads of ambiguous attempts, by the time of their initiation. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from aioflux._values.meta import OpenUpload

_TICK = timedelta(seconds=1)
"""Tolerance of times: services return the time of an upload in whole seconds."""


class Window(NamedTuple):
    """The time of one attempt, on the monotonic clock of this machine, in seconds."""

    start: float
    """Time at which the request was sent."""
    end: float
    """Time at which the response or the failure arrived."""


def lost_uploads(
    uploads: Iterable[OpenUpload],
    *,
    key: str,
    known_ids: Collection[str],
    own_id: str,
    ambiguous: Iterable[Window],
    succeeded: Window,
    now: datetime,
) -> list[str]:
    """Return the ids of uploads that ambiguous attempts can have initiated.

    The times of the attempts are converted to the service's clock. The time of the successful
    attempt is known on both clocks. Without a successful attempt, the clocks are taken as equal.

    Args:
        uploads: The open uploads.
        key: Key of the upload.
        known_ids: Ids of open uploads of this process.
        own_id: Id that the successful attempt returned; empty if there is none.
        ambiguous: Times of the ambiguous attempts.
        succeeded: Time of the successful attempt; if there is none, of the listing.
        now: Date and time of the listing, on the clock of this machine.
    """
    same = [upload for upload in uploads if upload.key == key]
    own = [upload.initiated for upload in same if upload.upload_id == own_id]
    reference = own[0] if own else now
    # All ambiguous attempts were sent before the successful one.
    latest = reference if own else now + _TICK
    spans = [
        (
            reference - timedelta(seconds=succeeded.end - start) - _TICK,
            min(reference - timedelta(seconds=succeeded.start - end) + _TICK, latest),
        )
        for start, end in ambiguous
    ]
    return [
        upload.upload_id
        for upload in same
        if upload.upload_id not in known_ids
        and any(since <= upload.initiated <= until for since, until in spans)
    ]
