"""JSON API: create, read, list, change and delete buckets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._listing import decode_token, encode_token, page_size
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._preconditions import from_query
from aioflux.testing.gcs_server._records import check_bucket_name
from aioflux.testing.gcs_server._resources import bucket_resource, read_text, resource_response
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import Bucket
    from aioflux.testing.gcs_server._state import State

_MAX_PAGE = 1000


def insert_bucket(state: State, request: Request) -> Response:
    body = request.json()
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise APIError(400, "required", "Required parameter: name")
    check_bucket_name(name)
    labels, storage_class = _settings({}, "STANDARD", body)
    location = read_text(body, "location") or "US"
    bucket = state.create_bucket(name, location=location.upper())
    if (labels, storage_class) != (bucket.labels, bucket.storage_class):
        bucket.labels, bucket.storage_class = labels, storage_class
        state.journal.put_bucket(bucket)
    return _bucket_response(request, bucket)


def get_bucket(state: State, request: Request) -> Response:
    """Return the resource of a bucket."""
    return _bucket_response(request, _bucket(state, request))


def list_buckets(state: State, request: Request) -> Response:
    """List all buckets by name. The server has one project."""
    query = request.query
    prefix = query.get("prefix", "")
    size = page_size(query, default=_MAX_PAGE, maximum=_MAX_PAGE)
    names = sorted(name for name in state.buckets if name.startswith(prefix))
    start = bisect_right(names, decode_token(query["pageToken"])) if "pageToken" in query else 0
    listed = names[start : start + size]
    items = [bucket_resource(state.buckets[name], request.base_url) for name in listed]
    page: dict[str, Any] = {"kind": "storage#buckets"}
    if items:
        page["items"] = items
    if start + size < len(names):
        page["nextPageToken"] = encode_token(listed[-1])
    return resource_response(request, page)


def patch_bucket(state: State, request: Request) -> Response:
    """Change labels and storage class of a bucket. Other settings are ignored."""
    return _change_bucket(state, request, keeps_labels=True)


def update_bucket(state: State, request: Request) -> Response:
    """Replace all labels of a bucket, and the storage class if the request has one."""
    return _change_bucket(state, request, keeps_labels=False)


def _change_bucket(state: State, request: Request, *, keeps_labels: bool) -> Response:
    bucket = _bucket(state, request)
    old = bucket.labels if keeps_labels else {}
    labels, storage_class = _settings(old, bucket.storage_class, request.json())
    changed = state.update_bucket(bucket, labels=labels, storage_class=storage_class)
    return _bucket_response(request, changed)


def delete_bucket(state: State, request: Request) -> Response:
    state.delete_bucket(_bucket(state, request).name)
    return Response(status=204)


def test_permissions(state: State, request: Request) -> Response:
    """Return the requested permissions, without `State.denied_permissions`."""
    state.bucket(request.params["bucket"])
    permissions = request.query_list("permissions")
    if not permissions:
        raise APIError(400, "required", "Required parameter: permissions")
    content: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
    # GCS leaves out an empty field.
    if granted := [name for name in permissions if name not in state.denied_permissions]:
        content["permissions"] = granted
    return resource_response(request, content)


def _bucket(state: State, request: Request) -> Bucket:
    """Return the bucket of a request.

    Raises:
        APIError: There is no such bucket (404), or a precondition does not hold (412 or 304).
    """
    bucket = state.bucket(request.params["bucket"])
    from_query(request.query).check(bucket)
    return bucket


def _bucket_response(request: Request, bucket: Bucket) -> Response:
    return resource_response(request, bucket_resource(bucket, request.base_url))


def _settings(
    labels: Mapping[str, str], storage_class: str, body: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Return the labels and storage class of a bucket after a patch. Null removes a label."""
    changes = body.get("labels", {})
    if changes is not None and not isinstance(changes, dict):
        raise invalid("Invalid value for: labels is not an object")
    merged = {} if changes is None else {**labels, **changes}
    new_labels = {name: text for name in merged if (text := read_text(merged, name)) is not None}
    return new_labels, read_text(body, "storageClass") or storage_class


_BUCKETS = "/storage/v1/b"
_BUCKET = "/storage/v1/b/{bucket}"
ROUTES = (
    Route("POST", _BUCKETS, "storage.buckets.insert", insert_bucket),
    Route("GET", _BUCKETS, "storage.buckets.list", list_buckets),
    Route("GET", _BUCKET, "storage.buckets.get", get_bucket),
    Route("PATCH", _BUCKET, "storage.buckets.patch", patch_bucket),
    Route("PUT", _BUCKET, "storage.buckets.update", update_bucket),
    Route("DELETE", _BUCKET, "storage.buckets.delete", delete_bucket),
    Route(
        "GET",
        f"{_BUCKET}/iam/testPermissions",
        "storage.buckets.testIamPermissions",
        test_permissions,
    ),
)
