"""Conditional requests of HTTP (RFC 9110, section 13): `If-Match` and its kin on reads."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import condition_not_met, not_modified

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_MICROSECONDS = 1_000_000


def has_conditions(headers: Mapping[str, str]) -> bool:
    """Judge whether a request is conditional; most are not."""
    return not _NAMES.isdisjoint(headers)


def check_conditions(headers: Mapping[str, str], etag: str, updated_us: int) -> None:
    """Judge the conditions of a read in the order of the RFC; an unreadable date asks nothing.

    Args:
        headers: Of the request, by lower-case name.
        etag: Of the object, as the API that was called writes it.
        updated_us: When the object last changed, in microseconds since 1970.

    Raises:
        APIError: 412, or 304 where what the caller has is current.
    """
    updated = updated_us // _MICROSECONDS
    if "if-match" in headers:
        if not _matches(headers["if-match"], etag):
            raise condition_not_met()
    elif updated > _seconds(headers.get("if-unmodified-since"), otherwise=updated):
        raise condition_not_met()
    if "if-none-match" in headers:
        if _matches(headers["if-none-match"], etag):
            raise not_modified()
    elif updated <= _seconds(headers.get("if-modified-since"), otherwise=updated - 1):
        raise not_modified()


def _matches(value: str, etag: str) -> bool:
    """Look for an etag in a list of them; quotes are optional, as JSON etags have none."""
    tags = {tag.strip().removeprefix("W/").strip('"') for tag in value.split(",")}
    return "*" in tags or etag.strip('"') in tags


def _seconds(date: str | None, *, otherwise: int) -> int:
    if date is None:
        return otherwise
    try:
        return int(parsedate_to_datetime(date).timestamp())
    except (ValueError, OverflowError):
        return otherwise
