"""JSON API: compose, which concatenates up to 32 objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._checksums import combine_crc32c
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._fields import resource_response
from aioflux.testing.gcs_server._names import check_object_name
from aioflux.testing.gcs_server._preconditions import Preconditions, from_query, integer
from aioflux.testing.gcs_server._resources import (
    declared_in_resource,
    from_resource,
    object_resource,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._messages import Request, Response
    from aioflux.testing.gcs_server._records import ObjectRecord
    from aioflux.testing.gcs_server._state import State

_MAX_SOURCES = 32


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
    sources = [_find_source(state, bucket, row) for row in rows]
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


def _find_source(state: State, bucket: str, row: Any) -> ObjectRecord:
    """Return a source in the body.

    Raises:
        APIError: 400, 404 or 412.
    """
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
    """Read an object in the body; null, like nothing, is an empty one.

    Raises:
        APIError: 400, it is something else.
    """
    value = holder.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"Invalid value for: {name} is not an object")
    return value or {}


def _integer_in(holder: Mapping[str, Any], name: str) -> int | None:
    """Read a number, or a number as text; null, like nothing, is None.

    Raises:
        APIError: 400, it is something else.
    """
    value = holder.get(name)
    return None if value is None else integer({name: str(value)}, name)


def _delete_sources(state: State, record: ObjectRecord, sources: list[ObjectRecord]) -> None:
    for name in {source.name for source in sources} - {record.name}:
        state.delete(record.bucket, name)


ROUTES = (
    Route(
        "POST",
        "/storage/v1/b/{bucket}/o/{object}/compose",
        "storage.objects.compose",
        compose_object,
    ),
)
