"""JSON API: listing the objects of a bucket."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._errors import invalid
from aioflux.testing.gcs_server._fields import Mask, parse_fields, select
from aioflux.testing.gcs_server._glob import compile_glob, literal_prefix
from aioflux.testing.gcs_server._listing import Query, list_page
from aioflux.testing.gcs_server._messages import Request, Response, json_response
from aioflux.testing.gcs_server._resources import OBJECT_FIELDS, describe
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._tokens import decode_token, encode_token, page_size

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
    """List names in order, and what groups of names have in common up to the delimiter."""
    bucket = state.bucket(request.params["bucket"])
    query = request.query
    mask = parse_fields(query["fields"]) if query.get("fields") else None
    token = query.get("pageToken")
    found = list_page(
        bucket.objects.ordered(),
        _query(query),
        size=page_size(query, default=_DEFAULT_PAGE, most=_MAX_PAGE),
        after=decode_token(token) if token else "",
    )
    page: dict[str, Any] = {"kind": "storage#objects"}
    if found.more:
        page["nextPageToken"] = encode_token(found.more)
    if found.prefixes:
        page["prefixes"] = found.prefixes
    page = select(page, mask)
    if not found.names or not (mask is None or "items" in mask or "*" in mask):
        return json_response(page)
    below = None if mask is None else mask.get("items", mask.get("*"))
    items = b",".join(_items(bucket.objects.take(found.names), request.base_url, below))
    response = json_response(page)
    head = msgspec.json.encode(page)[:-1] + (b"," if page else b"")
    response.body = b"".join((head, b'"items":[', items, b"]}"))
    return response


def _query(query: Mapping[str, str]) -> Query:
    """Read what to list; `versions`, `projection` and filters on other features are ignored.

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
    """Describe objects by the fields that are wanted of each."""
    names = None if mask is None else tuple(sorted(mask))
    fields = _wanted(names)
    is_flat = mask is None or all(below is None for below in mask.values())
    if names is not None and is_flat and _LINKS.isdisjoint(names):
        return _kept(records, ",".join(names), fields)
    nested = None if is_flat else mask
    return (_encode(select(describe(record, base_url, fields), nested)) for record in records)


def _kept(
    records: Sequence[ObjectRecord], key: str, fields: Sequence[tuple[str, Field]]
) -> Iterator[bytes]:
    """Describe objects without links, or take what the last listing by the same fields wrote.

    Describing one takes 5 us, taking what was kept 0.2 us.
    """
    for record in records:
        text = record.described.get(key)
        if text is None:
            record.described.clear()
            text = record.described[key] = _encode(describe(record, "", fields))
        yield text


@lru_cache(maxsize=64)
def _wanted(names: tuple[str, ...] | None) -> tuple[tuple[str, Field], ...]:
    """Return the fields of these names in the order of the table; None stands for all."""
    return tuple(
        (name, field)
        for name, field in OBJECT_FIELDS.items()
        if names is None or name in names or "*" in names
    )


ROUTES = (
    Route(
        method="GET",
        pattern="/storage/v1/b/{bucket}/o",
        operation="storage.objects.list",
        handler=list_objects,
    ),
)
