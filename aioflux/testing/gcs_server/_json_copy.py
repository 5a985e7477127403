"""JSON API: rewriteTo, copyTo and moveTo, which copy or rename an object on the server."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._errors import invalid
from aioflux.testing.gcs_server._fields import resource_response
from aioflux.testing.gcs_server._names import check_object_name
from aioflux.testing.gcs_server._preconditions import from_query, integer
from aioflux.testing.gcs_server._resources import from_resource, object_resource
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request, Response
    from aioflux.testing.gcs_server._records import Attributes, ObjectRecord
    from aioflux.testing.gcs_server._state import State

_MIB = 1 << 20


class _Progress(msgspec.Struct, frozen=True):
    """Progress of a rewrite in several calls: the content of its token."""

    source: tuple[str, str, int]
    destination: tuple[str, str]
    rewritten: int


def rewrite_object(state: State, request: Request) -> Response:
    """Copy an object, in several calls if the caller bounds the bytes of each."""
    source = _find_source(state, request)
    destination = _destination(state, request)
    origin = (source.bucket, source.name, source.generation)
    token = request.query.get("rewriteToken")
    progress = _Progress(origin, destination, 0) if token is None else _decode(token)
    if (progress.source, progress.destination) != (origin, destination):
        raise invalid("Invalid Value: the rewriteToken belongs to another rewrite.")
    rewritten = min(source.size, progress.rewritten + _max_bytes(request, source))
    content = {
        "kind": "storage#rewriteResponse",
        "totalBytesRewritten": str(rewritten),
        "objectSize": str(source.size),
        "done": rewritten == source.size,
    }
    if rewritten == source.size:
        record = state.copy(source, *destination, _attributes(request, source))
        content["resource"] = object_resource(record, request.base_url)
    else:
        content["rewriteToken"] = _encode(_Progress(origin, destination, rewritten))
    return resource_response(request, content)


def copy_object(state: State, request: Request) -> Response:
    """Copy an object in one call."""
    source = _find_source(state, request)
    destination = _destination(state, request)
    record = state.copy(source, *destination, _attributes(request, source))
    return resource_response(request, object_resource(record, request.base_url))


def move_object(state: State, request: Request) -> Response:
    """Rename an object within its bucket, atomically."""
    source = _find_source(state, request)
    bucket, name = _destination(state, request)
    if name == source.name:
        raise invalid("The source and the destination of a move are the same object.")
    record = state.copy(source, bucket, name, source.attributes)
    state.delete(bucket, source.name)
    return resource_response(request, object_resource(record, request.base_url))


def _find_source(state: State, request: Request) -> ObjectRecord:
    """Return the object to copy.

    Raises:
        APIError: 400, 404, 304 or 412.
    """
    query, params = request.query, request.params
    return state.get(
        params["bucket"],
        params["object"],
        generation=integer(query, "sourceGeneration"),
        preconditions=from_query(query, "ifSource"),
    )


def _destination(state: State, request: Request) -> tuple[str, str]:
    """Return the bucket and name to write, whose preconditions hold.

    Raises:
        APIError: 400, 404 or 412.
    """
    params = request.params
    bucket = params.get("destination_bucket", params["bucket"])
    name = params["destination"]
    check_object_name(name)
    from_query(request.query).check(state.find(bucket, name))
    return bucket, name


def _attributes(request: Request, source: ObjectRecord) -> Attributes:
    """Return the attributes of a copy: those of the source, or of the body if it has any.

    Raises:
        APIError: 400.
    """
    body: dict[str, Any] = request.json()
    if not body:
        return source.attributes
    given = from_resource(body)
    return replace(given, content_type=given.content_type or source.attributes.content_type)


def _max_bytes(request: Request, source: ObjectRecord) -> int:
    """Return how many bytes this call may rewrite.

    Raises:
        APIError: 400, the bound is not a positive multiple of 1 MiB.
    """
    bound = integer(request.query, "maxBytesRewrittenPerCall")
    if bound is None:
        return source.size
    if bound <= 0 or bound % _MIB:
        raise invalid("maxBytesRewrittenPerCall must be a positive multiple of 1048576.")
    return bound


def _encode(progress: _Progress) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(progress)).decode()


def _decode(token: str) -> _Progress:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(token), type=_Progress)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise invalid("Invalid Value: rewriteToken") from None


_OBJECT = "/storage/v1/b/{bucket}/o/{object}"
_OTHER = "b/{destination_bucket}/o/{destination}"
ROUTES = (
    Route("POST", f"{_OBJECT}/rewriteTo/{_OTHER}", "storage.objects.rewrite", rewrite_object),
    Route("POST", f"{_OBJECT}/copyTo/{_OTHER}", "storage.objects.copy", copy_object),
    Route("POST", f"{_OBJECT}/moveTo/o/{{destination}}", "storage.objects.move", move_object),
)
