"""XML API: listing the objects of a bucket, version 1 and 2."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import invalid
from aioflux.testing.gcs_server._messages import Request, Response, xml_response
from aioflux.testing.gcs_server._pages import Page, after, page
from aioflux.testing.gcs_server._render import timestamp, xml_etag
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import document, encoder, limit, nodes
from aioflux.testing.gcs_server._xml_subresources import refuse_of_bucket

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._state import State


def list_objects(state: State, request: Request) -> Response:
    """List objects from a marker on: version 1."""
    marker = request.query.get("marker", "")
    found, rows = _page(state, request, marker)
    encode = encoder(request.query)
    content = nodes(
        Marker=encode(marker),
        NextMarker=encode(found.last) if found.is_truncated else None,
    )
    return xml_response(document("ListBucketResult", _head(request, found), content, *rows))


def list_objects_v2(state: State, request: Request) -> Response:
    """List objects from a token on: version 2."""
    query = request.query
    token, start_after = query.get("continuation-token"), query.get("start-after")
    found, rows = _page(state, request, _decode(token) if token else start_after or "")
    content = nodes(
        KeyCount=len(found),
        StartAfter=None if start_after is None else encoder(query)(start_after),
        ContinuationToken=token,
        NextContinuationToken=_encode(found.last) if found.is_truncated else None,
    )
    return xml_response(document("ListBucketResult", _head(request, found), content, *rows))


def _page(state: State, request: Request, marker: str) -> tuple[Page, list[str]]:
    """Return the page behind a marker, and its rows as XML."""
    refuse_of_bucket(request)
    query, objects = request.query, state.bucket(request.params["bucket"]).objects
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names = objects.ordered()
    start = after(names, marker, prefix=prefix, delimiter=delimiter)
    size = limit(query, "max-keys")
    found = page(names, prefix=prefix, delimiter=delimiter, start=start, size=size)
    encode = encoder(query)
    with_owner = "list-type" not in query or query.get("fetch-owner") == "true"
    records = (objects.get(names[index]) for index in found.indices)
    rows = [
        _describe(record, encode(record.name), with_owner=with_owner)
        for record in records
        if record is not None
    ]
    rows += [
        f"<CommonPrefixes>{nodes(Prefix=encode(group))}</CommonPrefixes>"
        for group in found.prefixes
    ]
    return found, rows


def _head(request: Request, found: Page) -> str:
    """Write what both versions say of the request."""
    query, encode = request.query, encoder(request.query)
    delimiter = query.get("delimiter")
    return nodes(
        Name=request.params["bucket"],
        Prefix=encode(query.get("prefix", "")),
        Delimiter=encode(delimiter) if delimiter else None,
        EncodingType=query.get("encoding-type"),
        MaxKeys=limit(query, "max-keys"),
        IsTruncated=found.is_truncated,
    )


def _describe(record: ObjectRecord, key: str, *, with_owner: bool) -> str:
    content = nodes(
        Key=key,
        Generation=record.generation,
        MetaGeneration=record.metageneration,
        LastModified=timestamp(record.updated_us),
        ETag=xml_etag(record),
        Size=record.size,
        StorageClass=record.attributes.storage_class,
    )
    owner = f"<Owner>{nodes(ID='anonymous')}</Owner>" if with_owner else ""
    return f"<Contents>{content}{owner}</Contents>"


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decode(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except (binascii.Error, UnicodeError):
        raise invalid("The continuation token is not one of this server.") from None


_PATTERN = "/{bucket}"
ROUTES = (
    Route(method="GET", pattern=_PATTERN, operation="xml.objects.list", handler=list_objects),
    Route(
        method="GET",
        pattern=_PATTERN,
        operation="xml.objects.list",
        handler=list_objects_v2,
        where={"list-type": "2"},
    ),
)
