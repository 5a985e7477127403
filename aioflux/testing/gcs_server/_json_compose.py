"""JSON API: write an object from other objects (`compose`, `rewriteTo`, `copyTo`, `moveTo`)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._checksums import combine_crc32c
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import Preconditions, from_query, read_integer
from aioflux.testing.gcs_server._records import check_object_name
from aioflux.testing.gcs_server._resources import (
    attributes_from_resource,
    object_resource,
    read_checksum_fields,
    resource_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request, Response
    from aioflux.testing.gcs_server._records import Attributes, ObjectRecord
    from aioflux.testing.gcs_server._state import State

_MAX_SOURCES = 32
_MIB = 1 << 20


def compose_object(state: State, request: Request) -> Response:
    """Write the concatenation of up to 32 objects. The destination may be one of the sources."""
    body = request.json()
    bucket, name = request.params["bucket"], request.params["object"]
    check_object_name(name)
    preconditions = from_query(request.query)
    preconditions.check(state.find(bucket, name))
    items = body.get("sourceObjects")
    if not isinstance(items, list) or not items:
        raise APIError(400, "required", "You must provide at least one source component.")
    if len(items) > _MAX_SOURCES:
        message = (
            "The number of source components provided "
            f"({len(items)}) exceeds the maximum ({_MAX_SOURCES})"
        )
        raise invalid(message)
    sources = [_find_component(state, bucket, item) for item in items]
    destination = _read_object(body, "destination")
    crc32c = combine_crc32c((source.crc32c, source.size) for source in sources)
    declared = read_checksum_fields(destination).crc32c
    if declared not in (None, crc32c):
        raise invalid("Provided CRC32C doesn't match calculated CRC32C.")
    record = state.commit(
        bucket,
        name,
        state.blobs.concat([source.blob for source in sources]),
        crc32c=crc32c,
        md5=None,
        component_count=sum(source.component_count or 1 for source in sources),
        attributes=attributes_from_resource(destination),
    )
    if body.get("deleteSourceObjects"):
        for source_name in {source.name for source in sources} - {name}:
            state.delete(bucket, source_name)
    return resource_response(request, object_resource(record, request.base_url))


def _find_component(state: State, bucket: str, item: Any) -> ObjectRecord:
    """Return the source in one item of `sourceObjects`. Raise APIError (400, 404 or 412)."""
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or not name:
        raise APIError(400, "required", "Required: name of each source component")
    conditions = _read_object(item, "objectPreconditions")
    return state.get(
        bucket,
        name,
        generation=_read_integer(item, "generation"),
        preconditions=Preconditions(generation=_read_integer(conditions, "ifGenerationMatch")),
    )


def _read_object(resource: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is a JSON object. If the field is null or missing, return {}."""
    value = resource.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"Invalid value for: {name} is not an object")
    return value or {}


def _read_integer(resource: Mapping[str, Any], name: str) -> int | None:
    """Return a field that is a number or a string of digits; None if it is null or missing."""
    value = resource.get(name)
    return None if value is None else read_integer({name: str(value)}, name)


class _Progress(msgspec.Struct, frozen=True):
    """Progress of a rewrite that takes several calls, encoded in the `rewriteToken`."""

    source: tuple[str, str, int]
    """Bucket, name and generation of the source."""
    destination: tuple[str, str]
    """Bucket and name of the destination."""
    rewritten: int
    """Bytes copied so far."""


def rewrite_object(state: State, request: Request) -> Response:
    """Copy an object, in several calls if it is larger than `maxBytesRewrittenPerCall`."""
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
    """Return the object to copy. Raise APIError (400, 404, 412 or 304)."""
    query, params = request.query, request.params
    return state.get(
        params["bucket"],
        params["object"],
        generation=read_integer(query, "sourceGeneration"),
        preconditions=from_query(query, "ifSource"),
    )


def _destination(state: State, request: Request) -> tuple[str, str]:
    """Return bucket and name of the destination. Raise APIError (400, 404, 412 or 304)."""
    params = request.params
    bucket = params.get("destination_bucket", params["bucket"])
    name = params["destination"]
    check_object_name(name)
    from_query(request.query).check(state.find(bucket, name))
    return bucket, name


def _attributes(request: Request, source: ObjectRecord) -> Attributes:
    """Return the attributes in the request body; those of the source if the body is empty.

    If the body has no content type, the content type is that of the source.
    """
    body: dict[str, Any] = request.json()
    if not body:
        return source.attributes
    attributes = attributes_from_resource(body)
    content_type = attributes.content_type or source.attributes.content_type
    return replace(attributes, content_type=content_type)


def _max_bytes(request: Request, source: ObjectRecord) -> int:
    """Return the number of bytes that this call may copy, by default all bytes of the source."""
    max_bytes = read_integer(request.query, "maxBytesRewrittenPerCall")
    if max_bytes is None:
        return source.size
    if max_bytes <= 0 or max_bytes % _MIB:
        raise invalid("maxBytesRewrittenPerCall must be a positive multiple of 1048576.")
    return max_bytes


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
    Route("POST", f"{_OBJECT}/compose", "storage.objects.compose", compose_object),
    Route("POST", f"{_OBJECT}/rewriteTo/{_OTHER}", "storage.objects.rewrite", rewrite_object),
    Route("POST", f"{_OBJECT}/copyTo/{_OTHER}", "storage.objects.copy", copy_object),
    Route("POST", f"{_OBJECT}/moveTo/o/{{destination}}", "storage.objects.move", move_object),
)
