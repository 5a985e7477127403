"""XML API: a PUT whose bytes are those of another object (`x-goog-copy-source`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aioflux.testing.gcs_server._conditional import check_conditions
from aioflux.testing.gcs_server._errors import APIError, condition_not_met, invalid
from aioflux.testing.gcs_server._messages import Request, Response, xml_response
from aioflux.testing.gcs_server._preconditions import Preconditions, from_headers, integer
from aioflux.testing.gcs_server._render import hash_headers, timestamp, xml_etag
from aioflux.testing.gcs_server._xml import document, nodes

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import Attributes, ObjectRecord
    from aioflux.testing.gcs_server._state import State

_SOURCE = "x-goog-copy-source"


def is_copy(request: Request) -> bool:
    """Judge whether a PUT names its bytes instead of sending them."""
    return _SOURCE in request.headers


def copy_object(state: State, request: Request, attributes: Attributes) -> Response:
    """Write an object with the bytes of another, and its attributes unless told otherwise.

    Args:
        state: Where both objects are.
        request: A PUT with a copy source.
        attributes: Those that the headers name; they count where the metadata directive is
            REPLACE.
    """
    source = _find_source(state, request)
    directive = request.headers.get("x-goog-metadata-directive", "COPY").upper()
    if directive not in ("COPY", "REPLACE"):
        raise invalid(f"Unknown metadata directive: {directive}")
    if directive == "COPY":
        storage_class = request.headers.get("x-goog-storage-class", "STANDARD")
        attributes = replace(source.attributes, storage_class=storage_class)
    preconditions = from_headers(request.headers)
    preconditions.check(state.find(request.params["bucket"], request.params["object"]))
    record = state.commit(
        request.params["bucket"],
        request.params["object"],
        state.blobs.concat([source.blob]),
        crc32c=source.crc32c,
        md5=source.md5,
        component_count=source.component_count,
        attributes=attributes,
    )
    content = nodes(LastModified=timestamp(record.updated_us), ETag=xml_etag(record))
    return xml_response(document("CopyObjectResult", content), headers=hash_headers(record))


def _find_source(state: State, request: Request) -> ObjectRecord:
    """Return the object to copy.

    Raises:
        APIError: 400, 404 or 412.
    """
    headers = request.headers
    bucket, _, name = unquote(headers[_SOURCE]).removeprefix("/").partition("/")
    if not bucket or not name:
        raise invalid(f"{_SOURCE} must be bucket/object: {headers[_SOURCE]}")
    record = state.get(
        bucket,
        name,
        generation=integer(headers, f"{_SOURCE}-generation"),
        preconditions=Preconditions(
            generation=integer(headers, f"{_SOURCE}-if-generation-match"),
            metageneration=integer(headers, f"{_SOURCE}-if-metageneration-match"),
        ),
    )
    conditions = {
        name.removeprefix(f"{_SOURCE}-"): value
        for name, value in headers.items()
        if name.startswith(f"{_SOURCE}-if-")
    }
    try:
        check_conditions(conditions, xml_etag(record), record.updated_us)
    except APIError as exc:
        raise condition_not_met() from exc
    return record
