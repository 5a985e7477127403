"""Meaning of the responses of services: errors by status and code, ranges, sizes, checksums."""

from __future__ import annotations

import binascii
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from aioflux._auth.redaction import redact, redact_error
from aioflux._services.base import MAX_EMPTY_PAGES
from aioflux._values.meta import ATTRIBUTE_NAMES, DEFAULT_TYPE, ObjectMeta
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import ReadRequest, WriteRequest
    from aioflux._values.meta import ObjectAttributes

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


class RequestKind(NamedTuple):
    """Properties of a request that change its headers or its errors."""

    is_read: bool = False
    """The request reads the bytes of an object."""
    generation: str = ""
    """Generation that a read is pinned to; empty for none."""
    is_conditional: bool = False
    """The request is a write with a precondition."""
    is_completion: bool = False
    """The request completes an upload."""


PLAIN: Final = RequestKind()
READ: Final = RequestKind(is_read=True)
CONDITIONAL: Final = RequestKind(is_conditional=True)


class Failure(NamedTuple):
    """An error response to a request."""

    status: int
    """HTTP status."""
    action: str
    """Verb of the message: "could not {action} {uri}"."""
    uri: str
    """Uri of the object."""
    code: str = ""
    """Error code of the service, such as `NoSuchKey`."""
    detail: str = ""
    """Error message of the service; the first 300 characters are used."""
    retry_after: str | None = None
    """Value of the Retry-After header."""
    kind: RequestKind = PLAIN
    """Kind of the request."""

    def error(
        self, error_class: type[E], *, before: str = "", advice: str = "", **fields: Any
    ) -> E:
        """Return an error of a class, with the text `before` the status, and advice at the end."""
        # Redacted before it is truncated, since a part of a secret is harder to recognize.
        message = " ".join(redact(self.detail[:_MAX_DETAIL]).split())[:300]
        code = redact(self.code[:_MAX_DETAIL])[:100]
        text = f"could not {self.action} {self.uri}: {before}HTTP {self.status}"
        text += (f" {code}" if code else "") + (f" ({message})" if message else "")
        text += f"; {advice}" if advice else ""
        return error_class(text, uri=self.uri, status=self.status, **fields)


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


def error_from_status(failure: Failure) -> StorageError:
    """Return the error for an error response of any service, by its status."""
    status, code, generation = failure.status, failure.code, failure.kind.generation
    if status in TRANSIENT:
        return failure.error(
            TransientError,
            before="the service returned ",
            retry_after_seconds=parse_retry_after(failure.retry_after),
            maybe_done=True,
        )
    error, before, advice = _BY_STATUS.get(status, (StorageError, "", ""))
    if code in _DIGEST_CODES:
        error, before, advice = (
            ChecksumError,
            "the service received other bytes than were sent, ",
            "",
        )
    elif status == 404 and (code == "NoSuchBucket" or failure.detail.startswith(_NO_BUCKET)):
        before, advice = "the bucket does not exist, ", "check its name in the uri, or create it"
    elif status == 404 and generation:
        before = f"its generation {generation} does not exist, "
        advice = "the object was replaced or deleted since it was listed; list it again"
    elif 300 <= status < 400:
        advice = (
            "redirects are not followed, because the credentials would go to another server; pass "
            "the right address as endpoint_url="
        )
    return failure.error(error, before=before, advice=advice.format(action=failure.action))


_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)
_UNSATISFIED = re.compile(rb"bytes \*/([0-9]{1,18})", re.IGNORECASE)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def byte_range(start: int, end: int | None) -> bytes:
    """Return the value of a Range header for `[start, end)`; None means the end of the object."""
    return b"bytes=%d-" % start if end is None else b"bytes=%d-%d" % (start, end - 1)


def parse_content_range(headers: Mapping[bytes, bytes]) -> tuple[int, int, int] | None:
    """Return first byte, last byte and object size from Content-Range.

    None if the header is missing, or is not one range with a known size.
    """
    match = _CONTENT_RANGE.fullmatch(headers.get(b"content-range") or b"")
    return (int(match[1]), int(match[2]), int(match[3])) if match is not None else None


def size_from_response(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a 2xx response to a read.

    Raises:
        ValueError: The response does not have the requested bytes.
    """
    num_bytes, start, end = response.num_bytes, request.start, request.end
    if response.status == 200:
        if start or (end is not None and num_bytes > end):
            raise ValueError("the service ignored the range")
        return num_bytes
    if response.status != 206:
        raise ValueError(f"HTTP {response.status} is not a response to a read")
    content_range = response.headers.get(b"content-range")
    if (
        not start
        and end is not None
        and 0 < num_bytes <= end
        and content_range == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
    ):
        # Fast path for the most frequent response, a whole object; the checks below accept it, too.
        return num_bytes
    part = parse_content_range(response.headers)
    if part is None:
        # The response is, for example, multipart/byteranges, which has the ranges in the body.
        raise ValueError(f"the Content-Range {content_range!r} is not one range with a known size")
    first, last, size = part
    if not start == first <= last < size or last - first + 1 != num_bytes:
        raise ValueError(
            f"the response is not the range from byte {start} on: it has {num_bytes} bytes, and "
            f"its Content-Range is {content_range!r}"
        )
    if end is not None and last >= end:
        raise ValueError(
            f"the response is longer than the requested {end - start} bytes: its Content-Range is "
            f"{content_range!r}"
        )
    return size


def size_from_unsatisfied(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the object size from a 416 response; None if it has none, or one above `start`."""
    match = _UNSATISFIED.fullmatch(headers.get(b"content-range") or b"")
    if match is None or int(match[1]) > start:
        return None
    return int(match[1])


def parse_http_date(text: str) -> datetime | None:
    """Parse an HTTP date in the preferred format (IMF-fixdate); None for other formats.

    Faster than `email.utils.parsedate_to_datetime`, which parses all date formats of email.
    """
    try:
        month = _MONTHS.index(text[8:11]) + 1
        day, year, clock = int(text[5:7]), int(text[12:16]), text[17:25]
        hour, minute, second = int(clock[:2]), int(clock[3:5]), int(clock[6:8])
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None


def meta_from_headers(
    headers: Mapping[bytes, bytes],
    *,
    key: str,
    uri: str,
    size: int,
    generation: str,
    user_prefix: bytes,
    class_header: bytes,
    crc32c: int | None = None,
    cache_header: bytes = b"cache-control",
    content_encoding: str = "",
    written: WriteRequest | None = None,
) -> ObjectMeta:
    """Build the metadata of an object from the headers of a response.

    The names of `headers` and of user metadata are in lower case. Headers with `user_prefix` are
    user metadata; their values are decoded as UTF-8, or as Latin-1 if they are not UTF-8. The
    storage class is in `class_header`. After a write, the attributes are those of its request,
    `written`, since the headers describe the body of the response.
    """
    get = headers.get
    changed = get(b"last-modified", b"").decode("latin-1")
    storage_class = get(class_header, b"").decode("latin-1")
    if written is None:
        num_cut = len(user_prefix)
        fields: dict[str, Any] = {
            "content_type": get(b"content-type", b"").decode("latin-1"),
            "content_encoding": content_encoding,
            "content_disposition": _as_text(get(b"content-disposition", b"")),
            "cache_control": get(cache_header, b"").decode("latin-1"),
            "storage_class": storage_class,
            "metadata": {
                name[num_cut:].decode("ascii"): _as_text(value)
                for name, value in headers.items()
                if name.startswith(user_prefix)
            },
        }
    else:
        fields = written_fields(written.attributes)
        fields["storage_class"] = storage_class or fields["storage_class"]
    return ObjectMeta(
        key=key,
        uri=uri,
        size=size,
        etag=get(b"etag", b"").decode("latin-1").strip('"'),
        generation=generation,
        crc32c=crc32c,
        updated=parse_http_date(changed) if changed else None,
        **fields,
    )


def attribute_headers(
    attributes: ObjectAttributes, class_header: bytes, *, prefix: bytes = b""
) -> list[tuple[bytes, bytes]]:
    """Return the attributes, without metadata, as headers; `prefix` is not for the class."""
    headers = []
    for name, text in (
        (prefix + b"content-type", attributes.content_type or DEFAULT_TYPE),
        (prefix + b"content-encoding", attributes.content_encoding),
        (prefix + b"content-disposition", attributes.content_disposition),
        (prefix + b"cache-control", attributes.cache_control),
        (class_header, attributes.storage_class),
    ):
        if text:
            headers.append((name, text.encode()))
    return headers


def written_fields(attributes: ObjectAttributes) -> dict[str, Any]:
    """Return the fields of the metadata of an object that was written with these attributes."""
    fields: dict[str, Any] = {}
    for name in ATTRIBUTE_NAMES:
        fields[name] = getattr(attributes, name)
    fields["content_type"] = attributes.content_type or DEFAULT_TYPE
    fields["metadata"] = dict(attributes.metadata or {})
    return fields


def _as_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def encode_crc32c(value: int) -> str:
    """Encode a crc32c as base64 of 4 big-endian bytes."""
    return binascii.b2a_base64(value.to_bytes(4, "big"), newline=False).decode()


def decode_crc32c(text: str | bytes) -> int | None:
    """Decode a base64 crc32c; None for an empty text.

    Raises:
        ValueError: The text is not base64 of 4 bytes.
    """
    if not text:
        return None
    value = binascii.a2b_base64(text, strict_mode=True)
    if len(value) != 4:
        raise ValueError(f"a crc32c has 4 bytes, not {len(value)}")
    return int.from_bytes(value, "big")
