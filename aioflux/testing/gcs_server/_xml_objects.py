"""XML API: GET, HEAD, PUT and DELETE of an object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._checksums import declared_in
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._preconditions import from_headers, integer
from aioflux.testing.gcs_server._records import Attributes
from aioflux.testing.gcs_server._render import hash_headers, media_response
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml_copy import copy_object, is_copy
from aioflux.testing.gcs_server._xml_subresources import refuse_of_object

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._state import State

_META = "x-goog-meta-"


def get_object(state: State, request: Request) -> Response:
    """Send an object's bytes; the wire leaves them out for HEAD."""
    refuse_of_object(request)
    record = state.get(
        request.params["bucket"],
        request.params["object"],
        generation=integer(request.query, "generation"),
        preconditions=from_headers(request.headers),
    )
    return media_response(request, record)


def put_object(state: State, request: Request) -> Response:
    """Write an object, from the body or, where the headers name one, from another object."""
    refuse_of_object(request)
    if is_copy(request):
        return copy_object(state, request, attributes_of(request))
    record = state.put(
        request.params["bucket"],
        request.params["object"],
        request.pieces,
        attributes_of(request),
        declared=declared_in(request.headers),
        preconditions=from_headers(request.headers),
    )
    return Response(headers=hash_headers(record))


def delete_object(state: State, request: Request) -> Response:
    """Delete an object."""
    refuse_of_object(request)
    state.delete(
        request.params["bucket"],
        request.params["object"],
        generation=integer(request.query, "generation"),
        preconditions=from_headers(request.headers),
    )
    return Response(status=204)


def attributes_of(request: Request) -> Attributes:
    """Read an object's attributes from the headers of a write."""
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


_PATTERN = "/{bucket}/{object*}"
ROUTES = (
    Route(method="GET", pattern=_PATTERN, operation="xml.objects.get", handler=get_object),
    Route(method="HEAD", pattern=_PATTERN, operation="xml.objects.get", handler=get_object),
    Route(method="PUT", pattern=_PATTERN, operation="xml.objects.insert", handler=put_object),
    Route(method="DELETE", pattern=_PATTERN, operation="xml.objects.delete", handler=delete_object),
)
