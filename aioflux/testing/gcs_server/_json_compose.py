"""JSON API: compose (up to 32 objects), rewriteTo, copyTo and moveTo, all on the server."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._checksums import combine_crc32c
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import Preconditions, from_query, integer
from aioflux.testing.gcs_server._records import check_object_name
from aioflux.testing.gcs_server._resources import (
    declared_in_resource,
    from_resource,
    object_resource,
    resource_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._messages import Request, Response
    from aioflux.testing.gcs_server._records import Attributes, ObjectRecord
    from aioflux.testing.gcs_server._state import State

_MAX_SOURCES = 32
_MIB = 1 << 20


def compose_object(state: State, request: Request) -> Response:
    """Write an object with the bytes of others, which may include the destination."""
    body = request.json()
    bucket, name = request.params["bucket"], request.params["object"]
    check_object_name(name)
    preconditions = from_query(request.query)
    preconditions.check(state.find(bucket, name))
    rows = body.get("sourceObjects")
    if not isinstance(rows, list) or not rows:
        raise APIError(400, "required", "You must provide at least one source component.")
    if len(rows) > _MAX_SOURCES:
        message = (
            "The number of source components provided "
            f"({len(rows)}) exceeds the maximum ({_MAX_SOURCES})"
        )
        raise invalid(message)
    sources = [_component(state, bucket, row) for row in rows]
    destination = _object_in(body, "destination")
    crc32c = combine_crc32c((source.crc32c, source.size) for source in sources)
    declared = declared_in_resource(destination).crc32c
    if declared not in (None, crc32c):
        raise invalid("Provided CRC32C doesn't match calculated CRC32C.")
    record = state.commit(
        bucket,
        name,
        state.blobs.concat([source.blob for source in sources]),
        crc32c=crc32c,
        md5=None,
        component_count=sum(source.component_count or 1 for source in sources),
        attributes=from_resource(destination),
    )
    if body.get("deleteSourceObjects"):
        _delete_sources(state, record, sources)
    return resource_response(request, object_resource(record, request.base_url))


def _component(state: State, bucket: str, row: Any) -> ObjectRecord:
    """Return a source that the body names, or raise 400, 404 or 412."""
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(name, str) or not name:
        raise APIError(400, "required", "Required: name of each source component")
    conditions = _object_in(row, "objectPreconditions")
    return state.get(
        bucket,
        name,
        generation=_integer_in(row, "generation"),
        preconditions=Preconditions(generation=_integer_in(conditions, "ifGenerationMatch")),
    )


def _object_in(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a JSON object in the body; null or a missing one is empty."""
    value = holder.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"Invalid value for: {name} is not an object")
    return value or {}


def _integer_in(holder: Mapping[str, Any], name: str) -> int | None:
    """Return a number, which may be text; null or a missing one is None."""
    value = holder.get(name)
    return None if value is None else integer({name: str(value)}, name)


def _delete_sources(state: State, record: ObjectRecord, sources: list[ObjectRecord]) -> None:
    for name in {source.name for source in sources} - {record.name}:
        state.delete(record.bucket, name)


class _Progress(msgspec.Struct, frozen=True):
    """Progress of a rewrite in several calls: the content of its token."""

    source: tuple[str, str, int]
    destination: tuple[str, str]
    rewritten: int


def rewrite_object(state: State, request: Request) -> Response:
    """Copy an object, in several calls if the caller bounds the bytes of each."""
    source = _copied(state, request)
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
    source = _copied(state, request)
    destination = _destination(state, request)
    record = state.copy(source, *destination, _attributes(request, source))
    return resource_response(request, object_resource(record, request.base_url))


def move_object(state: State, request: Request) -> Response:
    """Rename an object within its bucket, atomically."""
    source = _copied(state, request)
    bucket, name = _destination(state, request)
    if name == source.name:
        raise invalid("The source and the destination of a move are the same object.")
    record = state.copy(source, bucket, name, source.attributes)
    state.delete(bucket, source.name)
    return resource_response(request, object_resource(record, request.base_url))


def _copied(state: State, request: Request) -> ObjectRecord:
    """Return the object to copy, or raise 400, 404, 304 or 412."""
    query, params = request.query, request.params
    return state.get(
        params["bucket"],
        params["object"],
        generation=integer(query, "sourceGeneration"),
        preconditions=from_query(query, "ifSource"),
    )


def _destination(state: State, request: Request) -> tuple[str, str]:
    """Return the bucket and name to write; raise 400, 404 or 412, also for preconditions."""
    params = request.params
    bucket = params.get("destination_bucket", params["bucket"])
    name = params["destination"]
    check_object_name(name)
    from_query(request.query).check(state.find(bucket, name))
    return bucket, name


def _attributes(request: Request, source: ObjectRecord) -> Attributes:
    """Return the attributes of a copy: those of the source, or of the body if it has any."""
    body: dict[str, Any] = request.json()
    if not body:
        return source.attributes
    given = from_resource(body)
    return replace(given, content_type=given.content_type or source.attributes.content_type)


def _max_bytes(request: Request, source: ObjectRecord) -> int:
    """Return how many bytes this call may rewrite: a positive multiple of 1 MiB, or all."""
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
    Route("POST", f"{_OBJECT}/compose", "storage.objects.compose", compose_object),
    Route("POST", f"{_OBJECT}/rewriteTo/{_OTHER}", "storage.objects.rewrite", rewrite_object),
    Route("POST", f"{_OBJECT}/copyTo/{_OTHER}", "storage.objects.copy", copy_object),
    Route("POST", f"{_OBJECT}/moveTo/o/{{destination}}", "storage.objects.move", move_object),
)
