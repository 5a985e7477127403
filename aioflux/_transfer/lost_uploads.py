"""Uploads that ambiguous attempts to initiate one have left, by time. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from aioflux._values.meta import OpenUpload

__all__ = ["Window", "lost_uploads"]

_TICK = timedelta(seconds=1)
"""Services return the time of an upload in whole seconds; clocks may differ as much."""


class Window(NamedTuple):
    """The time of one attempt, in seconds of this machine's clock, from any beginning."""

    begin: float
    """Time of sending."""
    end: float
    """Time of its response, or of its failure."""


def lost_uploads(
    uploads: Iterable[OpenUpload],
    *,
    key: str,
    known: Collection[str],
    own_id: str,
    lost: Iterable[Window],
    heard: Window,
    now: datetime,
) -> list[str]:
    """Return the ids of uploads that ambiguous attempts have initiated.

    Args:
        uploads: The open uploads.
        key: Key of the upload.
        known: Ids of open uploads of this process.
        own_id: Id that a later attempt returned, which gives the time of the service's clock; empty
            if none did.
        lost: The ambiguous attempts.
        heard: The attempt that returned `own_id`; if none did, the moment `now`.
        now: Time of this machine, used without an `own_id`.
    """
    same = [upload for upload in uploads if upload.key == key]
    own = [upload.initiated for upload in same if upload.upload_id == own_id]
    then = own[0] if own else now
    # No ambiguous attempt came after the successful one.
    latest = then if own else now + _TICK
    spans = [
        (
            then - timedelta(seconds=heard.end - begin) - _TICK,
            min(then - timedelta(seconds=heard.begin - end) + _TICK, latest),
        )
        for begin, end in lost
    ]
    return [
        upload.upload_id
        for upload in same
        if upload.upload_id not in known
        and any(since <= upload.initiated <= until for since, until in spans)
    ]
