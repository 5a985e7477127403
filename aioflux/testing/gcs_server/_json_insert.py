"""JSON API: uploads in one request (`uploadType=media` and `uploadType=multipart`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._checksums import merge_declared, read_checksum_headers
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._messages import decode_object
from aioflux.testing.gcs_server._mime import split_body
from aioflux.testing.gcs_server._preconditions import from_query
from aioflux.testing.gcs_server._resources import (
    attributes_from_resource,
    check_text,
    object_resource,
    read_checksum_fields,
    resource_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._checksums import DeclaredChecksums
    from aioflux.testing.gcs_server._messages import Buffer, Request, Response
    from aioflux.testing.gcs_server._records import Attributes
    from aioflux.testing.gcs_server._state import State

_DEFAULT_TYPE = "application/octet-stream"


def insert_media(state: State, request: Request) -> Response:
    """Write an object from a body that has only the bytes of the object."""
    attributes = attributes_for(request, {}, request.headers.get("content-type"))
    declared = read_checksum_headers(request.headers)
    name = name_for(request, {})
    return _put(state, request, name, request.pieces, attributes, declared)


def insert_multipart(state: State, request: Request) -> Response:
    """Write an object from a body with two MIME parts: the metadata and the bytes."""
    parts = split_body(request)
    if len(parts) != 2:
        raise APIError(400, "badContent", f"Expected 2 parts in the body, found {len(parts)}.")
    resource = decode_object(parts[0].data)
    attributes = attributes_for(request, resource, parts[1].headers.get("content-type"))
    declared = merge_declared(
        read_checksum_fields(resource), read_checksum_headers(request.headers)
    )
    name = name_for(request, resource)
    return _put(state, request, name, (parts[1].data,), attributes, declared)


def reject_upload(state: State, request: Request) -> Response:
    upload_type = request.query.get("uploadType")
    if upload_type is None:
        raise APIError(400, "required", "Required parameter: uploadType")
    raise invalid(f"Invalid upload type: {upload_type}")


def name_for(request: Request, resource: Mapping[str, Any]) -> str:
    """Return the name of a new object. Raise APIError (400) if it is missing or ambiguous."""
    query_name, body_name = request.query.get("name"), resource.get("name")
    if query_name and body_name and query_name != body_name:
        raise invalid(f"Value '{body_name}' in content does not agree with value '{query_name}'.")
    name = query_name or body_name
    if not name:
        raise APIError(400, "required", "Required")
    if not isinstance(name, str):
        raise invalid("Invalid value for: name is not a string")
    return name


def attributes_for(
    request: Request, resource: Mapping[str, Any], content_type: str | None
) -> Attributes:
    """Return the attributes of a new object.

    The query overrides the content encoding of `resource`. `content_type` is used if `resource` has
    no content type.
    """
    attributes = attributes_from_resource(resource)
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
    declared: DeclaredChecksums,
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
