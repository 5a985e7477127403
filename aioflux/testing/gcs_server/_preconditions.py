"""Preconditions of requests: generations (GCS), ETags and dates (RFC 9110, section 13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import condition_not_met, invalid, not_modified

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import Bucket, ObjectRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Preconditions:
    """Conditions on the object or bucket of a request. None means no condition."""

    generation: int | None = None
    """Required generation. 0 means that the object must not exist."""
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, record: ObjectRecord | Bucket | None) -> None:
        """Check the conditions on an object or bucket. `record` is None if it does not exist.

        Raises:
            APIError: 412 if a `Match` does not hold; 304 if a `NotMatch` does not hold, even for a
                write (cloud.google.com/storage/docs/request-preconditions).
        """
        generation = record.generation if record else 0
        metageneration = record.metageneration if record else 0
        if self.generation not in (None, generation):
            raise condition_not_met()
        if self.metageneration not in (None, metageneration):
            raise condition_not_met()
        if self.generation_not == generation or self.metageneration_not == metageneration:
            raise not_modified()


NO_PRECONDITIONS = Preconditions()
_HEADERS = frozenset({"x-goog-if-generation-match", "x-goog-if-metageneration-match"})
_HTTP_HEADERS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})


def read_integer(values: Mapping[str, str], name: str) -> int | None:
    """Read a number from a query or headers. Raise APIError (400) if it is malformed."""
    text = values.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise invalid(f"Invalid value for {name}: {text}") from None


def from_query(query: Mapping[str, str], prefix: str = "if") -> Preconditions:
    """Read the preconditions in a query. For the source of a copy, `prefix` is `ifSource`."""
    if not any(name.startswith(prefix) for name in query):
        return NO_PRECONDITIONS
    return Preconditions(
        generation=read_integer(query, f"{prefix}GenerationMatch"),
        generation_not=read_integer(query, f"{prefix}GenerationNotMatch"),
        metageneration=read_integer(query, f"{prefix}MetagenerationMatch"),
        metageneration_not=read_integer(query, f"{prefix}MetagenerationNotMatch"),
    )


def from_headers(headers: Mapping[str, str]) -> Preconditions:
    """Read the preconditions in the headers of a request to the XML API."""
    if _HEADERS.isdisjoint(headers):
        return NO_PRECONDITIONS
    return Preconditions(
        generation=read_integer(headers, "x-goog-if-generation-match"),
        metageneration=read_integer(headers, "x-goog-if-metageneration-match"),
    )


def has_http_conditions(headers: Mapping[str, str]) -> bool:
    """Return whether a request has `If-Match` or one of the other conditions of HTTP."""
    return not _HTTP_HEADERS.isdisjoint(headers)


def check_http_conditions(headers: Mapping[str, str], etag: str, updated_us: int) -> None:
    """Check the HTTP conditions of a read in the order of the RFC. Malformed dates are ignored.

    Raises:
        APIError: 304 if the client has the current object, 412 if another condition does not hold.
    """
    updated = updated_us // 1_000_000
    if "if-match" in headers:
        if not _matches_etag(headers["if-match"], etag):
            raise condition_not_met()
    elif updated > _seconds(headers.get("if-unmodified-since"), default=updated):
        raise condition_not_met()
    if "if-none-match" in headers:
        if _matches_etag(headers["if-none-match"], etag):
            raise not_modified()
    elif updated <= _seconds(headers.get("if-modified-since"), default=updated - 1):
        raise not_modified()


def _matches_etag(value: str, etag: str) -> bool:
    """Return whether a header lists `etag` or `*`. ETags of the JSON API have no quotes."""
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in value.split(",")}
    return "*" in tags or etag.strip('"') in tags


def _seconds(date: str | None, *, default: int) -> int:
    if date is None:
        return default
    try:
        return int(parsedate_to_datetime(date).timestamp())
    except (ValueError, OverflowError):
        return default
