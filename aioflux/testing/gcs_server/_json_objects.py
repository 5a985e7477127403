"""JSON API: read, list, change and delete objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._download import media_response
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._glob import compile_glob, literal_prefix
from aioflux.testing.gcs_server._listing import (
    Query,
    decode_token,
    encode_token,
    list_page,
    page_size,
)
from aioflux.testing.gcs_server._messages import Request, Response, json_response
from aioflux.testing.gcs_server._preconditions import from_query, read_integer
from aioflux.testing.gcs_server._resources import (
    OBJECT_FIELDS,
    Mask,
    attributes_from_resource,
    describe,
    object_resource,
    parse_fields,
    patch_attributes,
    resource_response,
    select,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._resources import Field
    from aioflux.testing.gcs_server._state import State

_DEFAULT_PAGE = 1000
_MAX_PAGE = 5000
_LINKS = frozenset({"selfLink", "mediaLink", "*"})
_encode = msgspec.json.Encoder().encode


def get_object(state: State, request: Request) -> Response:
    """Return the resource of an object."""
    record = _find_object(state, request)
    headers = (("ETag", record.etag),)
    return resource_response(request, object_resource(record, request.base_url), headers=headers)


def get_media(state: State, request: Request) -> Response:
    """Return the bytes of an object. Errors are plain text, as on GCS."""
    try:
        return media_response(request, _find_object(state, request))
    except APIError as exc:
        return _text_error(exc)


def patch_object(state: State, request: Request) -> Response:
    """Replace the attributes that the request body has. Null removes an attribute."""
    record = _find_object(state, request)
    changed = state.update(record, patch_attributes(record.attributes, request.json()))
    return resource_response(request, object_resource(changed, request.base_url))


def update_object(state: State, request: Request) -> Response:
    """Replace all attributes with those in the request body. The storage class never changes."""
    record = _find_object(state, request)
    body = request.json() | {"storageClass": record.attributes.storage_class}
    changed = state.update(record, attributes_from_resource(body))
    return resource_response(request, object_resource(changed, request.base_url))


def delete_object(state: State, request: Request) -> Response:
    query = request.query
    state.delete(
        request.params["bucket"],
        request.params["object"],
        generation=read_integer(query, "generation"),
        preconditions=from_query(query),
    )
    return Response(status=204)


def _text_error(error: APIError) -> Response:
    """Build the error response of a download."""
    if error.status == 304:
        return Response(status=304, headers=error.headers)
    content_type = ("Content-Type", "text/html; charset=UTF-8")
    body = error.message.encode()
    return Response(status=error.status, headers=(content_type, *error.headers), body=body)


def _find_object(state: State, request: Request) -> ObjectRecord:
    query = request.query
    return state.get(
        request.params["bucket"],
        request.params["object"],
        generation=read_integer(query, "generation"),
        preconditions=from_query(query),
    )


def list_objects(state: State, request: Request) -> Response:
    """List objects and common prefixes by name."""
    bucket = state.bucket(request.params["bucket"])
    query = request.query
    mask = parse_fields(query["fields"]) if query.get("fields") else None
    token = query.get("pageToken")
    page = list_page(
        bucket.objects.ordered(),
        _query(query),
        size=page_size(query, default=_DEFAULT_PAGE, maximum=_MAX_PAGE),
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
        item_mask = None if mask is None else mask.get("items", mask.get("*"))
        records = bucket.objects.get_all(page.names)
        items = b",".join(_encode_items(records, request.base_url, item_mask))
        head = msgspec.json.encode(content)[:-1] + (b"," if content else b"")
        response.body = b"".join((head, b'"items":[', items, b"]}"))
    return response


def _query(query: Mapping[str, str]) -> Query:
    """Read the query of a listing. Other parameters, such as `versions`, are ignored."""
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


def _encode_items(
    records: Sequence[ObjectRecord], base_url: str, mask: Mask | None
) -> Iterator[bytes]:
    """Encode the items of a listing with the fields that a mask selects."""
    names = None if mask is None else tuple(sorted(mask))
    fields = _select_fields(names)
    is_flat = mask is None or all(submask is None for submask in mask.values())
    if names is not None and is_flat and _LINKS.isdisjoint(names):
        return _encode_cached_items(records, ",".join(names), fields)
    nested = None if is_flat else mask
    return (_encode(select(describe(record, base_url, fields), nested)) for record in records)


def _encode_cached_items(
    records: Sequence[ObjectRecord], key: str, fields: Sequence[tuple[str, Field]]
) -> Iterator[bytes]:
    """Encode items without links, or reuse the items of an earlier listing.

    Only links depend on the request. Encoding an item takes 5 us, reusing an item 0.2 us. A record
    caches its item for one set of fields.
    """
    for record in records:
        text = record.listing_items.get(key)
        if text is None:
            record.listing_items.clear()
            text = record.listing_items[key] = _encode(describe(record, "", fields))
        yield text


@lru_cache(maxsize=64)
def _select_fields(names: tuple[str, ...] | None) -> tuple[tuple[str, Field], ...]:
    """Return the fields with these names in the order of `OBJECT_FIELDS`, or all for None."""
    return tuple(
        (name, field)
        for name, field in OBJECT_FIELDS.items()
        if names is None or name in names or "*" in names
    )


_OBJECTS = "/storage/v1/b/{bucket}/o"
_OBJECT = f"{_OBJECTS}/{{object}}"
_DOWNLOAD = f"/download{_OBJECT}"
_MEDIA = {"alt": "media"}
_GET = "storage.objects.get"
ROUTES = (
    Route("GET", _OBJECTS, "storage.objects.list", list_objects),
    Route("GET", _OBJECT, _GET, get_object),
    Route("GET", _OBJECT, _GET, get_media, query=_MEDIA),
    Route("GET", _DOWNLOAD, _GET, get_object),
    Route("GET", _DOWNLOAD, _GET, get_media, query=_MEDIA),
    Route("PATCH", _OBJECT, "storage.objects.patch", patch_object),
    Route("PUT", _OBJECT, "storage.objects.update", update_object),
    Route("DELETE", _OBJECT, "storage.objects.delete", delete_object),
)
