"""JSON API: buckets."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._fields import resource_response
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._names import check_bucket_name
from aioflux.testing.gcs_server._preconditions import from_query
from aioflux.testing.gcs_server._resources import bucket_resource
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._tokens import decode_token, encode_token, page_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._records import Bucket
    from aioflux.testing.gcs_server._state import State

_MAX_PAGE = 1000


def insert_bucket(state: State, request: Request) -> Response:
    """Create a bucket."""
    body = request.json()
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise APIError(400, "required", "Required parameter: name")
    check_bucket_name(name)
    labels, storage_class = _settings({}, "STANDARD", body)
    location = _text(body, "location") or "US"
    bucket = state.create_bucket(name, location=location.upper())
    if (labels, storage_class) != (bucket.labels, bucket.storage_class):
        bucket.labels, bucket.storage_class = labels, storage_class
        state.journal.put_bucket(bucket)
    return _described(request, bucket)


def get_bucket(state: State, request: Request) -> Response:
    """Describe a bucket."""
    bucket = state.bucket(request.params["bucket"])
    from_query(request.query).check(bucket)
    return _described(request, bucket)


def list_buckets(state: State, request: Request) -> Response:
    """List the buckets in order of their names; there is but one project."""
    query = request.query
    prefix = query.get("prefix", "")
    size = page_size(query, default=_MAX_PAGE, most=_MAX_PAGE)
    names = sorted(name for name in state.buckets if name.startswith(prefix))
    start = bisect_right(names, decode_token(query["pageToken"])) if "pageToken" in query else 0
    taken = names[start : start + size]
    items = [bucket_resource(state.buckets[name], request.base_url) for name in taken]
    page: dict[str, Any] = {"kind": "storage#buckets"}
    if items:
        page["items"] = items
    if start + size < len(names):
        page["nextPageToken"] = encode_token(taken[-1])
    return resource_response(request, page)


def patch_bucket(state: State, request: Request) -> Response:
    """Change labels and storage class; other settings are accepted and not kept."""
    bucket = state.bucket(request.params["bucket"])
    from_query(request.query).check(bucket)
    labels, storage_class = _settings(bucket.labels, bucket.storage_class, request.json())
    changed = state.update_bucket(bucket, labels=labels, storage_class=storage_class)
    return _described(request, changed)


def update_bucket(state: State, request: Request) -> Response:
    """Replace all labels, and the storage class where one is named."""
    bucket = state.bucket(request.params["bucket"])
    from_query(request.query).check(bucket)
    labels, storage_class = _settings({}, bucket.storage_class, request.json())
    changed = state.update_bucket(bucket, labels=labels, storage_class=storage_class)
    return _described(request, changed)


def delete_bucket(state: State, request: Request) -> Response:
    """Delete an empty bucket."""
    bucket = state.bucket(request.params["bucket"])
    from_query(request.query).check(bucket)
    state.delete_bucket(bucket.name)
    return Response(status=204)


def test_permissions(state: State, request: Request) -> Response:
    """Grant every permission that is asked for, except those that a test has denied.

    The server knows no identities.
    """
    state.bucket(request.params["bucket"])
    permissions = request.query_list("permissions")
    if not permissions:
        raise APIError(400, "required", "Required parameter: permissions")
    answer: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
    # As on GCS, the field is left out where it would be empty.
    if granted := [each for each in permissions if each not in state.denied_permissions]:
        answer["permissions"] = granted
    return resource_response(request, answer)


def _described(request: Request, bucket: Bucket) -> Response:
    return resource_response(request, bucket_resource(bucket, request.base_url))


def _settings(
    labels: Mapping[str, str], storage_class: str, body: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Return the labels and storage class of a bucket after a patch; null removes a label.

    Raises:
        APIError: 400, a value has the wrong type.
    """
    changes = body.get("labels", {})
    if changes is not None and not isinstance(changes, dict):
        raise invalid("Invalid value for: labels is not an object")
    merged = {} if changes is None else {**labels, **changes}
    kept = {name: text for name in merged if (text := _text(merged, name)) is not None}
    return kept, _text(body, "storageClass") or storage_class


def _text(holder: Mapping[str, Any], name: str) -> str | None:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"Invalid value for: {name} is not a string")
    return value


_BUCKETS = "/storage/v1/b"
_BUCKET = "/storage/v1/b/{bucket}"
ROUTES = (
    Route(
        method="POST",
        pattern=_BUCKETS,
        operation="storage.buckets.insert",
        handler=insert_bucket,
    ),
    Route(
        method="GET",
        pattern=_BUCKETS,
        operation="storage.buckets.list",
        handler=list_buckets,
    ),
    Route(
        method="GET",
        pattern=_BUCKET,
        operation="storage.buckets.get",
        handler=get_bucket,
    ),
    Route(
        method="PATCH",
        pattern=_BUCKET,
        operation="storage.buckets.patch",
        handler=patch_bucket,
    ),
    Route(
        method="PUT",
        pattern=_BUCKET,
        operation="storage.buckets.update",
        handler=update_bucket,
    ),
    Route(
        method="DELETE",
        pattern=_BUCKET,
        operation="storage.buckets.delete",
        handler=delete_bucket,
    ),
    Route(
        method="GET",
        pattern=f"{_BUCKET}/iam/testPermissions",
        operation="storage.buckets.testIamPermissions",
        handler=test_permissions,
    ),
)
