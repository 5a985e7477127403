"""Preconditions on generations, and conditional requests of HTTP (RFC 9110, section 13)."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import condition_not_met, invalid, not_modified

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._records import Bucket, ObjectRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Preconditions:
    """Conditions on the object or bucket that a request names; None is no condition."""

    generation: int | None = None
    """Generation that it must have; 0: no object of this name."""
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, record: ObjectRecord | Bucket | None) -> None:
        """Check the preconditions on the live object or bucket, or None; raise 412 or 304.

        A `NotMatch` that fails is 304 whatever the method
        (cloud.google.com/storage/docs/request-preconditions).
        """
        generation = record.generation if record else 0
        metageneration = record.metageneration if record else 0
        if self.generation not in (None, generation):
            raise condition_not_met()
        if self.metageneration not in (None, metageneration):
            raise condition_not_met()
        if self.generation_not == generation or self.metageneration_not == metageneration:
            raise not_modified()


NONE = Preconditions()
_HEADERS = frozenset({"x-goog-if-generation-match", "x-goog-if-metageneration-match"})
_HTTP_HEADERS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})


def integer(values: Mapping[str, str], name: str) -> int | None:
    """Read a number from a query or headers; anything else is a 400."""
    text = values.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise invalid(f"Invalid value for {name}: {text}") from None


def from_query(query: Mapping[str, str], prefix: str = "if") -> Preconditions:
    """Read preconditions from a query; `ifSource` is the prefix for the source of a copy."""
    if not any(name.startswith(prefix) for name in query):
        return NONE
    return Preconditions(
        generation=integer(query, f"{prefix}GenerationMatch"),
        generation_not=integer(query, f"{prefix}GenerationNotMatch"),
        metageneration=integer(query, f"{prefix}MetagenerationMatch"),
        metageneration_not=integer(query, f"{prefix}MetagenerationNotMatch"),
    )


def from_headers(headers: Mapping[str, str]) -> Preconditions:
    """Read the preconditions of an XML request."""
    if _HEADERS.isdisjoint(headers):
        return NONE
    return Preconditions(
        generation=integer(headers, "x-goog-if-generation-match"),
        metageneration=integer(headers, "x-goog-if-metageneration-match"),
    )


def has_http_conditions(headers: Mapping[str, str]) -> bool:
    """Return whether a request is conditional; most are not."""
    return not _HTTP_HEADERS.isdisjoint(headers)


def check_http_conditions(headers: Mapping[str, str], etag: str, updated_us: int) -> None:
    """Check the conditions of a read in the order of the RFC; an unreadable date is ignored.

    Raises 304 if the copy of the caller is current, and 412 if another condition fails. ETags
    differ between the APIs; `etag` is that of the called one.
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
    """Return whether a list of ETags has one; quotes are optional, as JSON ETags have none."""
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in value.split(",")}
    return "*" in tags or etag.strip('"') in tags


def _seconds(date: str | None, *, default: int) -> int:
    if date is None:
        return default
    try:
        return int(parsedate_to_datetime(date).timestamp())
    except (ValueError, OverflowError):
        return default
