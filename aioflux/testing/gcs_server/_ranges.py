"""The Range header: which bytes of an object it asks for."""

from __future__ import annotations

import re

from aioflux.testing.gcs_server._errors import APIError

_FORM = re.compile(r"bytes=(\d{0,4000})-(\d{0,4000})", re.ASCII | re.IGNORECASE)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Resolve a Range header against an object's size.

    Args:
        header: Value of the header; None where it was not sent.
        size: Size of the object in bytes.

    Returns:
        The range `[start, end)`, clipped to the object, or None for the whole object: no header,
        or one that HTTP says to ignore (malformed, or of several ranges).

    Raises:
        APIError: 416, no byte of the object is in the range.
    """
    form = _FORM.fullmatch(header.strip()) if header else None
    if form is None or not any(form.groups()):
        return None
    first, last = form.groups()
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        message = "The requested range cannot be satisfied."
        content_range = ("Content-Range", f"bytes */{size}")
        raise APIError(416, "requestedRangeNotSatisfiable", message, headers=(content_range,))
    return start, end
