"""XML API: listing the objects of a bucket, version 1 and 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._listing import Page, Query, decode_token, encode_token, list_page
from aioflux.testing.gcs_server._messages import Request, Response, timestamp, xml_response
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import (
    check_bucket_query,
    common_prefixes,
    document,
    encoder,
    limit,
    nodes,
)

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._state import State


def list_objects(state: State, request: Request) -> Response:
    """List objects from a marker on: version 1."""
    marker = request.query.get("marker", "")
    page, rows = _page(state, request, marker)
    encode = encoder(request.query)
    content = nodes(Marker=encode(marker), NextMarker=encode(page.last) if page.last else None)
    return xml_response(document("ListBucketResult", _head(request, page), content, *rows))


def list_objects_v2(state: State, request: Request) -> Response:
    """List objects from a token on: version 2."""
    query = request.query
    token, start_after = query.get("continuation-token"), query.get("start-after")
    page, rows = _page(state, request, decode_token(token) if token else start_after or "")
    content = nodes(
        KeyCount=len(page),
        StartAfter=None if start_after is None else encoder(query)(start_after),
        ContinuationToken=token,
        NextContinuationToken=encode_token(page.last) if page.last else None,
    )
    return xml_response(document("ListBucketResult", _head(request, page), content, *rows))


def _page(state: State, request: Request, marker: str) -> tuple[Page, list[str]]:
    """Return the page after a marker, and its rows as XML."""
    check_bucket_query(request)
    query, objects = request.query, state.bucket(request.params["bucket"]).objects
    page = list_page(
        objects.ordered(),
        Query(prefix=query.get("prefix", ""), delimiter=query.get("delimiter", "")),
        size=limit(query, "max-keys"),
        after=marker,
    )
    encode = encoder(query)
    with_owner = "list-type" not in query or query.get("fetch-owner") == "true"
    rows = [
        _describe(record, encode(record.name), with_owner=with_owner)
        for record in objects.get_all(page.names)
    ]
    return page, rows + common_prefixes(page.prefixes, encode)


def _head(request: Request, page: Page) -> str:
    """Write the elements that both versions share."""
    query, encode = request.query, encoder(request.query)
    delimiter = query.get("delimiter")
    return nodes(
        Name=request.params["bucket"],
        Prefix=encode(query.get("prefix", "")),
        Delimiter=encode(delimiter) if delimiter else None,
        EncodingType=query.get("encoding-type"),
        MaxKeys=limit(query, "max-keys"),
        IsTruncated=bool(page.last),
    )


def _describe(record: ObjectRecord, key: str, *, with_owner: bool) -> str:
    content = nodes(
        Key=key,
        Generation=record.generation,
        MetaGeneration=record.metageneration,
        LastModified=timestamp(record.updated_us),
        ETag=record.xml_etag,
        Size=record.size,
        StorageClass=record.attributes.storage_class,
    )
    owner = f"<Owner>{nodes(ID='anonymous')}</Owner>" if with_owner else ""
    return f"<Contents>{content}{owner}</Contents>"


_PATTERN = "/{bucket}"
ROUTES = (
    Route("GET", _PATTERN, "xml.objects.list", list_objects),
    Route("GET", _PATTERN, "xml.objects.list", list_objects_v2, query={"list-type": "2"}),
)
