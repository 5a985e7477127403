"""Errors for the responses of services, by HTTP status and service code."""

from __future__ import annotations

import math
import time
from typing import Any, TypeVar

from aioflux._auth.redaction import redact, redact_error
from aioflux._services.base import MAX_EMPTY_PAGES
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

E = TypeVar("E", bound=StorageError)

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that are retried for every operation. After any of them a write may have been done: a
gateway also returns 408, 429 or 503 when the backend was only slow."""
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
    404: (NotFoundError, "the object does not exist, ", "list the prefix to see which objects do"),
    412: (PreconditionFailedError, "its generation is not the expected one, ", ""),
}
"""Error type of each status, with the texts before and after the text of the response. `s3` and
`az` replace the texts of some statuses in their `service_error`."""
_MAX_DETAIL = 4096
"""Number of characters of a service's message from which the first 300 are shown."""
_NO_BUCKET = "The specified bucket does not exist"
"""Start of the message of the JSON API of Google Cloud Storage, which has no code for it."""
_DIGEST_CODES = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})


def parse_retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3).

    None if the header is missing or malformed. A date in the header is compared with `now`, a Unix
    time, by default the current time.
    """
    if not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
        return seconds if math.isfinite(seconds) else None
    # Imported here, because email.utils takes 3 ms to import, and few responses have a date.
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # not a date, or a year outside of the calendar
        return None
    return max(0.0, moment - (time.time() if now is None else now))


def response_error(
    error_class: type[E],
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
    """Return an error with the failed action, the response, and advice in its text.

    Args:
        error_class: Class of the error.
        status: HTTP status.
        action: Verb of the message: "could not {action} {uri}".
        uri: Uri of the object.
        code: Error code of the service, such as `NoSuchKey`.
        detail: Error message of the service; the first 300 characters are used.
        before: Text before the status.
        advice: Text at the end.
        fields: Further fields of the error.
    """
    # Redacted before it is truncated, since a part of a secret is harder to recognize.
    message = " ".join(redact(detail[:_MAX_DETAIL]).split())[:300]
    code = redact(code[:100])
    text = f"could not {action} {uri}: {before}HTTP {status}" + (f" {code}" if code else "")
    text += (f" ({message})" if message else "") + (f"; {advice}" if advice else "")
    return error_class(text, uri=uri, status=status, **fields)


def malformed_response(
    action: str, uri: str, why: object, *, status: int | None = None, maybe_done: bool = True
) -> TransientError:
    """Return the error for a success response that is malformed, or not from the service.

    `why` is the defect of the response: a text, or an error, from which secrets are removed.
    `maybe_done` says whether the request may have changed an object.
    """
    return TransientError(
        f"could not {action} {uri}: {_text_of(why)}",
        uri=uri,
        status=status,
        maybe_done=maybe_done,
        is_malformed=True,
    )


def malformed_page(uri: str, exc: ValueError) -> TransientError:
    """Return the error for a page of a listing that cannot be parsed."""
    why = f"the response is not a listing ({_text_of(exc)})"
    return malformed_response("list", uri, why, maybe_done=False)


def unexpected_page(uri: str, why: object) -> StorageError:
    """Return the error for a page of a listing that does not match the request."""
    text = f"could not list {uri}: the service returned a wrong page: {_text_of(why)}"
    return StorageError(text, uri=uri)


def _text_of(why: object) -> str:
    return redact(redact_error(why) if isinstance(why, Exception) else str(why))


class EmptyPageCounter:
    """Counter of consecutive empty pages of one listing; see `MAX_EMPTY_PAGES`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._num_empty = 0

    def count(self, num_entries: int) -> None:
        """Count one page that is not the last page of the listing.

        Raises:
            StorageError: `MAX_EMPTY_PAGES` pages in a row were empty.
        """
        self._num_empty = 0 if num_entries else self._num_empty + 1
        if self._num_empty >= MAX_EMPTY_PAGES:
            why = f"it is the last of {self._num_empty} empty pages in a row, each with a next page"
            raise unexpected_page(self._uri, why)


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
    """Return the error for an error response of any service.

    Args:
        status: HTTP status.
        action: Verb of the message, such as "read" or "compose".
        uri: Uri of the object.
        code: Error code of the service, such as `NoSuchKey`.
        detail: Error message of the service; the first 300 characters are used.
        retry_after: Value of the Retry-After header.
        generation: Generation that a read is pinned to; empty for none.
    """
    texts = {"action": action, "uri": uri, "code": code, "detail": detail}
    if status in TRANSIENT:
        return response_error(
            TransientError,
            status,
            **texts,
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
    elif status == 404 and (code == "NoSuchBucket" or detail.startswith(_NO_BUCKET)):
        before, advice = "the bucket does not exist, ", "check its name in the uri, or create it"
    elif status == 404 and generation:
        before = f"its generation {generation} does not exist, "
        advice = "the object was replaced or deleted since it was listed; list it again"
    elif 300 <= status < 400:
        advice = (
            "redirects are not followed, because the credentials would go to another server; pass "
            "the right address as endpoint_url="
        )
    advice = advice.format(action=action)
    return response_error(error, status, **texts, before=before, advice=advice)
