"""JSON API: listing the objects of a bucket."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._errors import invalid
from aioflux.testing.gcs_server._fields import Mask, parse_fields, select
from aioflux.testing.gcs_server._glob import compile_glob, literal_prefix
from aioflux.testing.gcs_server._listing import (
    Query,
    decode_token,
    encode_token,
    list_page,
    page_size,
)
from aioflux.testing.gcs_server._messages import Request, Response, json_response
from aioflux.testing.gcs_server._resources import OBJECT_FIELDS, describe
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._resources import Field
    from aioflux.testing.gcs_server._state import State

_DEFAULT_PAGE = 1000
_MAX_PAGE = 5000
_LINKS = frozenset({"selfLink", "mediaLink", "*"})
_encode = msgspec.json.Encoder().encode


def list_objects(state: State, request: Request) -> Response:
    """List objects by name, and the common prefixes of groups of names."""
    bucket = state.bucket(request.params["bucket"])
    query = request.query
    mask = parse_fields(query["fields"]) if query.get("fields") else None
    token = query.get("pageToken")
    page = list_page(
        bucket.objects.ordered(),
        _query(query),
        size=page_size(query, default=_DEFAULT_PAGE, most=_MAX_PAGE),
        after=decode_token(token) if token else "",
    )
    content: dict[str, Any] = {"kind": "storage#objects"}
    if page.last:
        content["nextPageToken"] = encode_token(page.last)
    if page.prefixes:
        content["prefixes"] = page.prefixes
    content = select(content, mask)
    response = json_response(content)
    if page.names and (mask is None or "items" in mask or "*" in mask):
        below = None if mask is None else mask.get("items", mask.get("*"))
        items = b",".join(_items(bucket.objects.get_all(page.names), request.base_url, below))
        head = msgspec.json.encode(content)[:-1] + (b"," if content else b"")
        response.body = b"".join((head, b'"items":[', items, b"]}"))
    return response


def _query(query: Mapping[str, str]) -> Query:
    """Read the query; `versions`, `projection` and filters on other features are ignored.

    Raises:
        APIError: 400.
    """
    glob, delimiter = query.get("matchGlob", ""), query.get("delimiter", "")
    if glob and delimiter not in ("", "/"):
        raise invalid("matchGlob can only be used with the delimiter '/'.")
    return Query(
        prefix=query.get("prefix", ""),
        delimiter=delimiter,
        start=query.get("startOffset", ""),
        end=query.get("endOffset", ""),
        glob=compile_glob(glob) if glob else None,
        glob_prefix=literal_prefix(glob),
        with_trailing=query.get("includeTrailingDelimiter") == "true",
    )


def _items(records: Sequence[ObjectRecord], base_url: str, mask: Mask | None) -> Iterator[bytes]:
    """Describe objects by the fields in a mask."""
    names = None if mask is None else tuple(sorted(mask))
    fields = _select_fields(names)
    is_flat = mask is None or all(below is None for below in mask.values())
    if names is not None and is_flat and _LINKS.isdisjoint(names):
        return _cached_items(records, ",".join(names), fields)
    nested = None if is_flat else mask
    return (_encode(select(describe(record, base_url, fields), nested)) for record in records)


def _cached_items(
    records: Sequence[ObjectRecord], key: str, fields: Sequence[tuple[str, Field]]
) -> Iterator[bytes]:
    """Describe objects without links, or reuse the items of the last listing by the same fields.

    Describing an object takes 5 us, reusing its item 0.2 us.
    """
    for record in records:
        text = record.described.get(key)
        if text is None:
            record.described.clear()
            text = record.described[key] = _encode(describe(record, "", fields))
        yield text


@lru_cache(maxsize=64)
def _select_fields(names: tuple[str, ...] | None) -> tuple[tuple[str, Field], ...]:
    """Return the fields of these names in the order of the table; None means all."""
    return tuple(
        (name, field)
        for name, field in OBJECT_FIELDS.items()
        if names is None or name in names or "*" in names
    )


ROUTES = (Route("GET", "/storage/v1/b/{bucket}/o", "storage.objects.list", list_objects),)
