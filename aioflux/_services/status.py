"""HTTP statuses and service codes, mapped to errors."""

from __future__ import annotations

import email.utils
import math
import time
from typing import Any, TypeVar

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
    "EmptyPageCounter",
    "error_from_status",
    "malformed_page",
    "malformed_response",
    "parse_retry_after",
    "response_error",
    "unexpected_page",
]

E = TypeVar("E", bound=StorageError)

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a request of any operation is sent again. After each of them the work may
have been done: a gateway also returns 408, 429 or 503 for a backend that was only slow."""
_BY_STATUS: dict[int, tuple[type[StorageError], str, str]] = {
    401: (
        PermissionDeniedError,
        "the service does not accept the credentials, ",
        "run 'gcloud auth application-default login', or pass others as credentials=",
    ),
    403: (
        PermissionDeniedError,
        "",
        "check that the credentials in use may {action} objects there",
    ),
    404: (NotFoundError, "no object of this name exists, ", "list the prefix to see what does"),
    412: (PreconditionFailedError, "its generation is not the expected one, ", ""),
}
"""Error type of each status, with the texts before and after that of the response. The services
`s3` and `az` have their own texts for some of them, in their `service_error`."""
_DIGEST_CODES = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})


def parse_retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3), or None.

    Args:
        value: The header: seconds, or an HTTP date.
        now: Current Unix time, in seconds; that of the clock by default.
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


def response_error(
    kind: type[E],
    status: int,
    *,
    action: str,
    uri: str,
    code: str = "",
    detail: str = "",
    before: str = "",
    advice: str = "",
    **fields: Any,
) -> E:
    """Return an error whose text has what failed, the response, and what to do about it.

    Args:
        kind: Class of the error.
        status: HTTP status.
        action: Verb: "could not {action} {uri}".
        uri: Uri of the object.
        code: Code of the service, such as `NoSuchKey`.
        detail: Message of the service, shortened here.
        before: Text before the response.
        advice: Text after it.
        fields: Further fields of the error.
    """
    message = " ".join(detail.split())[:300]
    text = f"could not {action} {uri}: {before}HTTP {status}" + (f" {code}" if code else "")
    text += (f" ({message})" if message else "") + (f"; {advice}" if advice else "")
    return kind(text, uri=uri, status=status, **fields)


def malformed_response(
    action: str, uri: str, why: object, *, status: int | None = None, maybe_done: bool = True
) -> TransientError:
    """Return the error for a success that cannot be parsed, or is not from the service.

    Args:
        action: Verb: "could not {action} {uri}".
        uri: Uri of the object.
        why: What is wrong with the response.
        status: Its HTTP status.
        maybe_done: The request may have changed something.
    """
    return TransientError(
        f"could not {action} {uri}: {why}",
        uri=uri,
        status=status,
        maybe_done=maybe_done,
        is_malformed=True,
    )


def malformed_page(uri: str, exc: ValueError) -> TransientError:
    """Return the error for a response to a listing that cannot be parsed."""
    why = f"the response is not a listing ({exc})"
    return malformed_response("list", uri, why, maybe_done=False)


def unexpected_page(uri: str, why: object) -> StorageError:
    """Return the error for a page that is not the requested one."""
    return StorageError(f"could not list {uri}: the page is not the requested one, {why}", uri=uri)


class EmptyPageCounter:
    """Counts the pages in a row without an entry; see `MAX_EMPTY_PAGES`."""

    def __init__(self, uri: str) -> None:
        """Initialize with the uri of the listing, for errors."""
        self._uri = uri
        self._num = 0

    def count(self, num_entries: int) -> None:
        """Count one page that is not the last.

        Raises:
            StorageError: Too many in a row had no entry.
        """
        self._num = 0 if num_entries else self._num + 1
        if self._num >= MAX_EMPTY_PAGES:
            raise unexpected_page(
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
    """Return the error for an error response.

    Args:
        status: HTTP status.
        action: Verb: "read", "compose".
        uri: Uri of the object.
        code: Code of the service, such as `NoSuchKey`.
        detail: Message of the service, shortened here.
        retry_after: Retry-After header.
        generation: Generation that a read is pinned to; empty for none.
    """
    what = {"action": action, "uri": uri, "code": code, "detail": detail}
    if status in TRANSIENT:
        return response_error(
            TransientError,
            status,
            **what,
            before="the service returned ",
            retry_after_seconds=parse_retry_after(retry_after),
            maybe_done=True,
        )
    error, before, advice = _BY_STATUS.get(status, (StorageError, "", ""))
    if code in _DIGEST_CODES:
        error, before, advice = (
            ChecksumError,
            "the service received other bytes than were sent, ",
            "",
        )
    elif status == 404 and generation and code != "NoSuchBucket":
        before = f"its generation {generation} does not exist, "
        advice = "the object was replaced or deleted since it was listed, list it again"
    elif 300 <= status < 400:
        advice = (
            "redirects are not followed, because the credentials would be sent along; pass "
            "endpoint_url= with the right address"
        )
    advice = advice.format(action=action)
    return response_error(error, status, **what, before=before, advice=advice)
