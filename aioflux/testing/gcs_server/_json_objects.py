"""JSON API: reading, describing and deleting objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._download import media_response
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._fields import resource_response
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._preconditions import from_query, integer
from aioflux.testing.gcs_server._resources import from_resource, object_resource, patch_attributes
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._state import State


def get_object(state: State, request: Request) -> Response:
    """Describe an object."""
    record = _find(state, request)
    headers = (("ETag", record.etag),)
    return resource_response(request, object_resource(record, request.base_url), headers=headers)


def get_media(state: State, request: Request) -> Response:
    """Send an object's bytes; errors are plain text, as on GCS."""
    try:
        return media_response(request, _find(state, request))
    except APIError as exc:
        return _text_error(exc)


def patch_object(state: State, request: Request) -> Response:
    """Replace the attributes in the body; null removes one."""
    record = _find(state, request)
    changed = state.update(record, patch_attributes(record.attributes, request.json()))
    return resource_response(request, object_resource(changed, request.base_url))


def update_object(state: State, request: Request) -> Response:
    """Replace all attributes by those in the body, except for the storage class."""
    record = _find(state, request)
    body = request.json() | {"storageClass": record.attributes.storage_class}
    changed = state.update(record, from_resource(body))
    return resource_response(request, object_resource(changed, request.base_url))


def delete_object(state: State, request: Request) -> Response:
    """Delete an object."""
    query = request.query
    state.delete(
        request.params["bucket"],
        request.params["object"],
        generation=integer(query, "generation"),
        preconditions=from_query(query),
    )
    return Response(status=204)


def _text_error(error: APIError) -> Response:
    """Build the response with an error of a download."""
    if error.status == 304:
        return Response(status=304, headers=error.headers)
    content_type = ("Content-Type", "text/html; charset=UTF-8")
    body = error.message.encode()
    return Response(status=error.status, headers=(content_type, *error.headers), body=body)


def _find(state: State, request: Request) -> ObjectRecord:
    query = request.query
    return state.get(
        request.params["bucket"],
        request.params["object"],
        generation=integer(query, "generation"),
        preconditions=from_query(query),
    )


_OBJECT = "/storage/v1/b/{bucket}/o/{object}"
_DOWNLOAD = f"/download{_OBJECT}"
_MEDIA = {"alt": "media"}
_GET = "storage.objects.get"
ROUTES = (
    Route("GET", _OBJECT, _GET, get_object),
    Route("GET", _OBJECT, _GET, get_media, query=_MEDIA),
    Route("GET", _DOWNLOAD, _GET, get_object),
    Route("GET", _DOWNLOAD, _GET, get_media, query=_MEDIA),
    Route("PATCH", _OBJECT, "storage.objects.patch", patch_object),
    Route("PUT", _OBJECT, "storage.objects.update", update_object),
    Route("DELETE", _OBJECT, "storage.objects.delete", delete_object),
)
