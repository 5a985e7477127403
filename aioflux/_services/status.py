"""What an answer means: HTTP statuses and service codes mapped to errors.

`error_from_status` is over 60 lines as the one table of these rules, a message to each.
"""

from __future__ import annotations

import email.utils
import math
import time

from aioflux._services.base import MAX_EMPTY_PAGES
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

__all__ = [
    "TRANSIENT",
    "EmptyPages",
    "error_from_status",
    "not_a_listing",
    "parse_retry_after",
    "words_of",
    "wrong_page",
]

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the request is sent again. None of them says that nothing was done: a
gateway answers 408, 429 or 503 for a busy backend, too, which may have done the work by then."""
_DIGEST_CODES = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})


def parse_retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for (RFC 9110, 10.2.3), or None.

    Args:
        value: The header: seconds, or an HTTP date.
        now: Current Unix time, in seconds; the clock's where it is not given.
    """
    if not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
        return seconds if math.isfinite(seconds) else None
    try:
        moment = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # no date, or one of a year that no calendar has
        return None
    return max(0.0, moment - (time.time() if now is None else now))


def words_of(status: int, code: str, detail: str) -> tuple[str, str]:
    """Return what an answer said, and the service's own words, shortened, to stand behind it."""
    words = " ".join(detail.split())[:300]
    return f"HTTP {status}" + (f" {code}" if code else ""), f" ({words})" if words else ""


def not_a_listing(uri: str, why: ValueError) -> TransientError:
    """Return the error for an answer to a listing that cannot be read."""
    return TransientError(
        f"could not list {uri}: the answer is not a listing ({why})", uri=uri, is_malformed=True
    )


def wrong_page(uri: str, why: object) -> StorageError:
    """Return the error for a page that is another one than the one that was asked for."""
    return StorageError(f"could not list {uri}: the page is not what was asked for, {why}", uri=uri)


class EmptyPages:
    """Counts the pages in a row without an entry; see `MAX_EMPTY_PAGES`."""

    def __init__(self, uri: str) -> None:
        """Take the uri of what is listed, for errors."""
        self._uri = uri
        self._num = 0

    def count(self, num_entries: int) -> None:
        """Count one page that is not the last.

        Raises:
            StorageError: Too many in a row had no entry.
        """
        self._num = 0 if num_entries else self._num + 1
        if self._num >= MAX_EMPTY_PAGES:
            raise wrong_page(
                self._uri, f"{self._num} empty pages came in a row, each with a new next page"
            )


def error_from_status(
    status: int,
    *,
    action: str,
    uri: str,
    code: str = "",
    detail: str = "",
    retry_after: str | None = None,
    generation: str = "",
) -> StorageError:
    """Return the error for an answer that is not a success.

    Args:
        status: HTTP status.
        action: What was asked, as a verb: "read", "compose".
        uri: Of what.
        code: The service's own code, such as `NoSuchKey`.
        detail: The service's own words, shortened here.
        retry_after: Retry-After header.
        generation: Generation that a read asked for; empty for any.
    """
    said, tail = words_of(status, code, detail)
    if status in TRANSIENT:
        return TransientError(
            f"could not {action} {uri}: the service answered {said}{tail}",
            uri=uri,
            status=status,
            retry_after_seconds=parse_retry_after(retry_after),
            maybe_done=True,
        )
    if code in _DIGEST_CODES:
        return ChecksumError(
            f"could not {action} {uri}: the service received other bytes than were sent, "
            f"{said}{tail}",
            uri=uri,
            status=status,
        )
    if status == 404 and generation and code != "NoSuchBucket":
        return NotFoundError(
            f"could not {action} {uri}: its generation {generation} is not there, {said}{tail}; "
            "the object was replaced or deleted since it was seen, list it again",
            uri=uri,
            status=status,
        )
    if status == 404:
        return NotFoundError(
            f"could not {action} {uri}: nothing of this name exists, {said}{tail}; list the prefix "
            "to see what does",
            uri=uri,
            status=status,
        )
    if 300 <= status < 400:
        return StorageError(
            f"could not {action} {uri}: {said}{tail}; a redirect is not followed, because the "
            "credentials would go with it; pass endpoint_url= with the address that is meant",
            uri=uri,
            status=status,
        )
    if status == 401:
        return PermissionDeniedError(
            f"could not {action} {uri}: the service does not accept the credentials, {said}{tail}; "
            "run 'gcloud auth application-default login', or pass others as credentials=",
            uri=uri,
            status=status,
        )
    if status == 403:
        return PermissionDeniedError(
            f"could not {action} {uri}: {said}{tail}; check that the credentials in use may "
            f"{action} objects there",
            uri=uri,
            status=status,
        )
    if status == 412:
        return PreconditionFailedError(
            f"could not {action} {uri}: its generation is not the expected one, {said}{tail}",
            uri=uri,
            status=status,
        )
    return StorageError(f"could not {action} {uri}: {said}{tail}", uri=uri, status=status)
