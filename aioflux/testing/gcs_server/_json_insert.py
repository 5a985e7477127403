"""JSON API: writing objects in one request (`uploadType=media` and `multipart`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._checksums import declared_in, merge_declared
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._messages import decode_object
from aioflux.testing.gcs_server._mime import split_body
from aioflux.testing.gcs_server._preconditions import from_query
from aioflux.testing.gcs_server._resources import (
    check_text,
    declared_in_resource,
    from_resource,
    object_resource,
    resource_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioflux.testing.gcs_server._checksums import Declared
    from aioflux.testing.gcs_server._messages import Buffer, Request, Response
    from aioflux.testing.gcs_server._records import Attributes
    from aioflux.testing.gcs_server._state import State

_DEFAULT_TYPE = "application/octet-stream"


def insert_media(state: State, request: Request) -> Response:
    """Write an object from a body of its bytes."""
    attributes = attributes_for(request, {}, request.headers.get("content-type"))
    declared = declared_in(request.headers)
    name = name_for(request, {})
    return _put(state, request, name, request.pieces, attributes, declared)


def insert_multipart(state: State, request: Request) -> Response:
    """Write an object from a body of two parts: its metadata and its bytes."""
    parts = split_body(request)
    if len(parts) != 2:
        raise APIError(400, "badContent", f"Expected 2 parts in the body, found {len(parts)}.")
    resource = decode_object(parts[0].data)
    attributes = attributes_for(request, resource, parts[1].headers.get("content-type"))
    declared = merge_declared(declared_in_resource(resource), declared_in(request.headers))
    name = name_for(request, resource)
    return _put(state, request, name, (parts[1].data,), attributes, declared)


def reject_upload(state: State, request: Request) -> Response:
    """Reject an upload without a known type."""
    given = request.query.get("uploadType")
    if given is None:
        raise APIError(400, "required", "Required parameter: uploadType")
    raise invalid(f"Invalid upload type: {given}")


def name_for(request: Request, resource: Mapping[str, Any]) -> str:
    """Return the name of the object to write, from the query or the metadata; both must agree."""
    queried, described = request.query.get("name"), resource.get("name")
    if queried and described and queried != described:
        raise invalid(f"Value '{described}' in content does not agree with value '{queried}'.")
    name = queried or described
    if not name:
        raise APIError(400, "required", "Required")
    if not isinstance(name, str):
        raise invalid("Invalid value for: name is not a string")
    return name


def attributes_for(
    request: Request, resource: Mapping[str, Any], content_type: str | None
) -> Attributes:
    """Return the attributes of the object to write.

    The content encoding in the query takes precedence over that in the metadata; the content type
    in the metadata takes precedence over that of the bytes.
    """
    attributes = from_resource(resource)
    content_encoding = check_text("contentEncoding", request.query.get("contentEncoding"))
    return replace(
        attributes,
        content_type=attributes.content_type
        or check_text("contentType", content_type)
        or _DEFAULT_TYPE,
        content_encoding=content_encoding or attributes.content_encoding,
    )


def _put(
    state: State,
    request: Request,
    name: str,
    pieces: Iterable[Buffer],
    attributes: Attributes,
    declared: Declared,
) -> Response:
    record = state.put(
        request.params["bucket"],
        name,
        pieces,
        attributes,
        declared=declared,
        preconditions=from_query(request.query),
    )
    return resource_response(request, object_resource(record, request.base_url))


_UPLOADS = "/upload/storage/v1/b/{bucket}/o"
_INSERT = "storage.objects.insert"
ROUTES = (
    Route("POST", _UPLOADS, _INSERT, insert_media, query={"uploadType": "media"}),
    Route("POST", _UPLOADS, _INSERT, insert_multipart, query={"uploadType": "multipart"}),
    Route("POST", _UPLOADS, _INSERT, reject_upload),
)
