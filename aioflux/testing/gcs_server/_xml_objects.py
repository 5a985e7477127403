"""XML API: read, write, copy and delete objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aioflux.testing.gcs_server._checksums import read_checksum_headers
from aioflux.testing.gcs_server._download import hash_headers, media_response
from aioflux.testing.gcs_server._errors import APIError, condition_not_met, invalid
from aioflux.testing.gcs_server._messages import Request, Response, timestamp, xml_response
from aioflux.testing.gcs_server._preconditions import (
    Preconditions,
    check_http_conditions,
    from_headers,
    read_integer,
)
from aioflux.testing.gcs_server._records import Attributes
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import check_object_query, document, elements

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._state import State

_META = "x-goog-meta-"
_SOURCE = "x-goog-copy-source"


def get_object(state: State, request: Request) -> Response:
    """Return an object. For HEAD the connection does not send the body."""
    check_object_query(request)
    record = state.get(
        request.params["bucket"],
        request.params["object"],
        generation=read_integer(request.query, "generation"),
        preconditions=from_headers(request.headers),
    )
    return media_response(request, record)


def put_object(state: State, request: Request) -> Response:
    """Write an object from the body, or from another object if the headers name a copy source."""
    check_object_query(request)
    if _SOURCE in request.headers:
        return _copy_object(state, request)
    record = state.put(
        request.params["bucket"],
        request.params["object"],
        request.pieces,
        attributes_of(request),
        declared=read_checksum_headers(request.headers),
        preconditions=from_headers(request.headers),
    )
    return Response(headers=hash_headers(record))


def delete_object(state: State, request: Request) -> Response:
    check_object_query(request)
    state.delete(
        request.params["bucket"],
        request.params["object"],
        generation=read_integer(request.query, "generation"),
        preconditions=from_headers(request.headers),
    )
    return Response(status=204)


def attributes_of(request: Request) -> Attributes:
    """Return the attributes of a new object from the headers of a request."""
    headers = request.headers
    return Attributes(
        content_type=headers.get("content-type"),
        content_encoding=headers.get("content-encoding"),
        content_disposition=headers.get("content-disposition"),
        content_language=headers.get("content-language"),
        cache_control=headers.get("cache-control"),
        custom_time=headers.get("x-goog-custom-time"),
        storage_class=headers.get("x-goog-storage-class", "STANDARD"),
        metadata={
            name.removeprefix(_META): value
            for name, value in headers.items()
            if name.startswith(_META)
        },
    )


def _copy_object(state: State, request: Request) -> Response:
    """Copy an object, with its attributes unless the metadata directive is REPLACE."""
    source = _find_source(state, request)
    attributes = attributes_of(request)
    directive = request.headers.get("x-goog-metadata-directive", "COPY").upper()
    if directive not in ("COPY", "REPLACE"):
        raise invalid(f"Unknown metadata directive: {directive}")
    if directive == "COPY":
        attributes = replace(source.attributes, storage_class=attributes.storage_class)
    bucket, name = request.params["bucket"], request.params["object"]
    from_headers(request.headers).check(state.find(bucket, name))
    record = state.copy(source, bucket, name, attributes)
    content = elements(LastModified=timestamp(record.updated_us), ETag=record.xml_etag)
    return xml_response(document("CopyObjectResult", content), headers=hash_headers(record))


def _find_source(state: State, request: Request) -> ObjectRecord:
    """Return the object to copy.

    Raises:
        APIError: 400, the header is invalid; 404, there is no such object; 412, a condition does
            not hold.
    """
    headers = request.headers
    bucket, _, name = unquote(headers[_SOURCE]).removeprefix("/").partition("/")
    if not bucket or not name:
        raise invalid(f"{_SOURCE} must be bucket/object: {headers[_SOURCE]}")
    record = state.get(
        bucket,
        name,
        generation=read_integer(headers, f"{_SOURCE}-generation"),
        preconditions=Preconditions(
            generation=read_integer(headers, f"{_SOURCE}-if-generation-match"),
            metageneration=read_integer(headers, f"{_SOURCE}-if-metageneration-match"),
        ),
    )
    conditions = {
        name.removeprefix(f"{_SOURCE}-"): value
        for name, value in headers.items()
        if name.startswith(f"{_SOURCE}-if-")
    }
    try:
        check_http_conditions(conditions, record.xml_etag, record.updated_us)
    except APIError as exc:
        raise condition_not_met() from exc
    return record


_PATTERN = "/{bucket}/{object*}"
ROUTES = (
    Route("GET", _PATTERN, "xml.objects.get", get_object),
    Route("HEAD", _PATTERN, "xml.objects.get", get_object),
    Route("PUT", _PATTERN, "xml.objects.insert", put_object),
    Route("DELETE", _PATTERN, "xml.objects.delete", delete_object),
)
