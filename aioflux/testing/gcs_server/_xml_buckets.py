"""XML API: buckets, and the uploads that are open in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response, xml_response
from aioflux.testing.gcs_server._names import check_bucket_name
from aioflux.testing.gcs_server._pages import Page, after, page
from aioflux.testing.gcs_server._render import timestamp
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import document, encoder, limit, nodes, parse
from aioflux.testing.gcs_server._xml_subresources import refuse_of_bucket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux.testing.gcs_server._records import MultipartUpload
    from aioflux.testing.gcs_server._state import State


def list_buckets(state: State, request: Request) -> Response:
    """List all buckets."""
    buckets = (
        f"<Bucket>{nodes(Name=name, CreationDate=timestamp(bucket.time_created_us))}</Bucket>"
        for name, bucket in sorted(state.buckets.items())
    )
    owner = f"<Owner>{nodes(ID='anonymous')}</Owner>"
    content = f"{owner}<Buckets>{''.join(buckets)}</Buckets>"
    return xml_response(document("ListAllMyBucketsResult", content))


def head_bucket(state: State, request: Request) -> Response:
    """Tell whether a bucket exists."""
    refuse_of_bucket(request)
    bucket = state.bucket(request.params["bucket"])
    return Response(
        headers=(
            ("x-goog-metageneration", str(bucket.metageneration)),
            ("x-goog-storage-class", bucket.storage_class),
            ("x-goog-bucket-location", bucket.location),
        )
    )


def create_bucket(state: State, request: Request) -> Response:
    """Make an empty bucket."""
    refuse_of_bucket(request)
    check_bucket_name(request.params["bucket"])
    location = None
    if request.body:
        configuration = parse(request.body, "CreateBucketConfiguration")
        location = configuration.findtext("LocationConstraint")
    state.create_bucket(request.params["bucket"], location=location or "US")
    return Response()


def delete_bucket(state: State, request: Request) -> Response:
    """Delete an empty bucket."""
    refuse_of_bucket(request)
    state.delete_bucket(request.params["bucket"])
    return Response(status=204)


def get_location(state: State, request: Request) -> Response:
    """Tell where a bucket is."""
    bucket = state.bucket(request.params["bucket"])
    return xml_response(document("LocationConstraint", bucket.location))


def get_versioning(state: State, request: Request) -> Response:
    """Tell that old generations are not kept."""
    state.bucket(request.params["bucket"])
    return xml_response(document("VersioningConfiguration"))


def refuse_versioning(state: State, request: Request) -> Response:
    """Refuse what `PUT ?versioning` asks for; without this it would create a bucket."""
    message = "Buckets keep the live generation only."
    raise APIError(501, "notImplemented", message, code="NotImplemented")


def list_uploads(state: State, request: Request) -> Response:
    """List the open uploads of a bucket, by key and, for one key, by age."""
    query, bucket = request.query, state.bucket(request.params["bucket"])
    uploads = sorted(
        (upload for upload in state.multipart_uploads.values() if upload.bucket == bucket.name),
        key=lambda upload: (upload.name, upload.upload_id),
    )
    found = _uploads_page(uploads, query)
    shown = [uploads[index] for index in found.indices]
    ends_in_upload = bool(shown) and shown[-1].name == found.last
    encode, delimiter = encoder(query), query.get("delimiter")
    content = nodes(
        Bucket=bucket.name,
        KeyMarker=encode(query.get("key-marker", "")),
        UploadIdMarker=query.get("upload-id-marker", ""),
        NextKeyMarker=encode(found.last) if found.is_truncated else None,
        NextUploadIdMarker=shown[-1].upload_id if found.is_truncated and ends_in_upload else None,
        Prefix=encode(query.get("prefix", "")),
        Delimiter=encode(delimiter) if delimiter else None,
        EncodingType=query.get("encoding-type"),
        MaxUploads=limit(query, "max-uploads"),
        IsTruncated=found.is_truncated,
    )
    rows = [_describe(upload, encode(upload.name)) for upload in shown]
    rows += [
        f"<CommonPrefixes>{nodes(Prefix=encode(group))}</CommonPrefixes>"
        for group in found.prefixes
    ]
    return xml_response(document("ListMultipartUploadsResult", content, *rows))


def _uploads_page(uploads: Sequence[MultipartUpload], query: Mapping[str, str]) -> Page:
    """Return the page of sorted uploads behind the two markers; without an id, behind a key."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names = [upload.name for upload in uploads]
    marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
    start = after(names, marker[0], prefix=prefix, delimiter=delimiter)
    if marker[1]:
        start = sum((upload.name, upload.upload_id) <= marker for upload in uploads)
    size = limit(query, "max-uploads")
    return page(names, prefix=prefix, delimiter=delimiter, start=start, size=size)


def _describe(upload: MultipartUpload, key: str) -> str:
    content = nodes(
        Key=key,
        UploadId=upload.upload_id,
        StorageClass=upload.attributes.storage_class,
        Initiated=timestamp(upload.started_us),
    )
    return f"<Upload>{content}</Upload>"


_PATTERN = "/{bucket}"
ROUTES = (
    Route(method="GET", pattern="/", operation="xml.buckets.list", handler=list_buckets),
    Route(method="HEAD", pattern=_PATTERN, operation="xml.buckets.get", handler=head_bucket),
    Route(method="PUT", pattern=_PATTERN, operation="xml.buckets.insert", handler=create_bucket),
    Route(method="DELETE", pattern=_PATTERN, operation="xml.buckets.delete", handler=delete_bucket),
    Route(
        method="GET",
        pattern=_PATTERN,
        operation="xml.buckets.get",
        handler=get_location,
        where={"location": None},
    ),
    Route(
        method="GET",
        pattern=_PATTERN,
        operation="xml.buckets.get",
        handler=get_versioning,
        where={"versioning": None},
    ),
    Route(
        method="PUT",
        pattern=_PATTERN,
        operation="xml.buckets.patch",
        handler=refuse_versioning,
        where={"versioning": None},
    ),
    Route(
        method="GET",
        pattern=_PATTERN,
        operation="xml.multipart.list",
        handler=list_uploads,
        where={"uploads": None},
    ),
)
