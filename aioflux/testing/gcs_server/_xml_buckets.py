"""XML API: buckets, listings of objects (versions 1 and 2), and listings of open uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._listing import (
    Page,
    Query,
    common_prefix,
    decode_token,
    encode_token,
    list_page,
    position_after,
)
from aioflux.testing.gcs_server._messages import Request, Response, timestamp, xml_response
from aioflux.testing.gcs_server._records import check_bucket_name
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import (
    check_bucket_query,
    common_prefixes,
    document,
    elements,
    encoder,
    parse,
    read_page_size,
)

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import MultipartUpload, ObjectRecord
    from aioflux.testing.gcs_server._state import State


def list_buckets(state: State, request: Request) -> Response:
    buckets = (
        f"<Bucket>{elements(Name=name, CreationDate=timestamp(bucket.time_created_us))}</Bucket>"
        for name, bucket in sorted(state.buckets.items())
    )
    owner = f"<Owner>{elements(ID='anonymous')}</Owner>"
    content = f"{owner}<Buckets>{''.join(buckets)}</Buckets>"
    return xml_response(document("ListAllMyBucketsResult", content))


def head_bucket(state: State, request: Request) -> Response:
    """Return the attributes of a bucket as headers."""
    check_bucket_query(request)
    bucket = state.bucket(request.params["bucket"])
    return Response(
        headers=(
            ("x-goog-metageneration", str(bucket.metageneration)),
            ("x-goog-storage-class", bucket.storage_class),
            ("x-goog-bucket-location", bucket.location),
        )
    )


def create_bucket(state: State, request: Request) -> Response:
    check_bucket_query(request)
    check_bucket_name(request.params["bucket"])
    location = None
    if request.body:
        configuration = parse(request.body, "CreateBucketConfiguration")
        location = configuration.findtext("LocationConstraint")
    state.create_bucket(request.params["bucket"], location=location or "US")
    return Response()


def delete_bucket(state: State, request: Request) -> Response:
    check_bucket_query(request)
    state.delete_bucket(request.params["bucket"])
    return Response(status=204)


def get_location(state: State, request: Request) -> Response:
    bucket = state.bucket(request.params["bucket"])
    return xml_response(document("LocationConstraint", bucket.location))


def get_versioning(state: State, request: Request) -> Response:
    """Return an empty configuration, because the server does not keep old generations."""
    state.bucket(request.params["bucket"])
    return xml_response(document("VersioningConfiguration"))


def put_versioning(state: State, request: Request) -> Response:
    """Reject `PUT ?versioning`. Without this route the request would create a bucket."""
    message = "Buckets keep the live generation only."
    raise APIError(501, "notImplemented", message, code="NotImplemented")


def list_uploads(state: State, request: Request) -> Response:
    """List the open uploads of a bucket by key, and uploads to the same key by age."""
    query, bucket = request.query, state.bucket(request.params["bucket"])
    uploads = sorted(
        (upload for upload in state.multipart_uploads.values() if upload.bucket == bucket.name),
        key=lambda upload: (upload.name, upload.upload_id),
    )
    page, listed = _uploads_page(uploads, query)
    ends_in_upload = bool(listed) and listed[-1].name == page.last
    encode, delimiter = encoder(query), query.get("delimiter")
    content = elements(
        Bucket=bucket.name,
        KeyMarker=encode(query.get("key-marker", "")),
        UploadIdMarker=query.get("upload-id-marker", ""),
        NextKeyMarker=encode(page.last) if page.last else None,
        NextUploadIdMarker=listed[-1].upload_id if ends_in_upload else None,
        Prefix=encode(query.get("prefix", "")),
        Delimiter=encode(delimiter) if delimiter else None,
        EncodingType=query.get("encoding-type"),
        MaxUploads=read_page_size(query, "max-uploads"),
        IsTruncated=bool(page.last),
    )
    rows = [_describe_upload(upload, encode(upload.name)) for upload in listed]
    rows += common_prefixes(page.prefixes, encode)
    return xml_response(document("ListMultipartUploadsResult", content, *rows))


def _uploads_page(
    uploads: Sequence[MultipartUpload], query: Mapping[str, str]
) -> tuple[Page, list[MultipartUpload]]:
    """Return one page of sorted uploads, and the uploads in it.

    The page begins after the upload with `key-marker` and `upload-id-marker`. Several uploads may
    have the same key: without an id, the page begins after all of them.
    """
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names = [upload.name for upload in uploads]
    wanted = Query(prefix=prefix, delimiter=delimiter)
    marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
    start = position_after(names, wanted, marker[0]) if marker[0] else 0
    if marker[1]:
        start = sum((upload.name, upload.upload_id) <= marker for upload in uploads)
    page = list_page(names[start:], wanted, size=read_page_size(query, "max-uploads"))
    listed = (
        upload
        for upload in uploads[start:]
        if upload.name.startswith(prefix) and common_prefix(upload.name, prefix, delimiter) is None
    )
    return page, list(islice(listed, len(page.names)))


def _describe_upload(upload: MultipartUpload, key: str) -> str:
    content = elements(
        Key=key,
        UploadId=upload.upload_id,
        StorageClass=upload.attributes.storage_class,
        Initiated=timestamp(upload.started_us),
    )
    return f"<Upload>{content}</Upload>"


def list_objects(state: State, request: Request) -> Response:
    """List the objects after a marker (version 1 of the listing)."""
    marker = request.query.get("marker", "")
    page, rows = _objects_page(state, request, marker)
    encode = encoder(request.query)
    content = elements(Marker=encode(marker), NextMarker=encode(page.last) if page.last else None)
    return xml_response(document("ListBucketResult", _listing_head(request, page), content, *rows))


def list_objects_v2(state: State, request: Request) -> Response:
    """List the objects after a continuation token (version 2 of the listing)."""
    query = request.query
    token, start_after = query.get("continuation-token"), query.get("start-after")
    page, rows = _objects_page(state, request, decode_token(token) if token else start_after or "")
    content = elements(
        KeyCount=len(page),
        StartAfter=None if start_after is None else encoder(query)(start_after),
        ContinuationToken=token,
        NextContinuationToken=encode_token(page.last) if page.last else None,
    )
    return xml_response(document("ListBucketResult", _listing_head(request, page), content, *rows))


def _objects_page(state: State, request: Request, marker: str) -> tuple[Page, list[str]]:
    """Return the page after a marker, and the XML of its entries."""
    check_bucket_query(request)
    query, objects = request.query, state.bucket(request.params["bucket"]).objects
    page = list_page(
        objects.ordered(),
        Query(prefix=query.get("prefix", ""), delimiter=query.get("delimiter", "")),
        size=read_page_size(query, "max-keys"),
        after=marker,
    )
    encode = encoder(query)
    with_owner = "list-type" not in query or query.get("fetch-owner") == "true"
    rows = [
        _describe_object(record, encode(record.name), with_owner=with_owner)
        for record in objects.get_all(page.names)
    ]
    return page, rows + common_prefixes(page.prefixes, encode)


def _listing_head(request: Request, page: Page) -> str:
    """Encode the elements that both versions of the listing share."""
    query, encode = request.query, encoder(request.query)
    delimiter = query.get("delimiter")
    return elements(
        Name=request.params["bucket"],
        Prefix=encode(query.get("prefix", "")),
        Delimiter=encode(delimiter) if delimiter else None,
        EncodingType=query.get("encoding-type"),
        MaxKeys=read_page_size(query, "max-keys"),
        IsTruncated=bool(page.last),
    )


def _describe_object(record: ObjectRecord, key: str, *, with_owner: bool) -> str:
    content = elements(
        Key=key,
        Generation=record.generation,
        MetaGeneration=record.metageneration,
        LastModified=timestamp(record.updated_us),
        ETag=record.xml_etag,
        Size=record.size,
        StorageClass=record.attributes.storage_class,
    )
    owner = f"<Owner>{elements(ID='anonymous')}</Owner>" if with_owner else ""
    return f"<Contents>{content}{owner}</Contents>"


_PATTERN = "/{bucket}"
ROUTES = (
    Route("GET", "/", "xml.buckets.list", list_buckets),
    Route("HEAD", _PATTERN, "xml.buckets.get", head_bucket),
    Route("PUT", _PATTERN, "xml.buckets.insert", create_bucket),
    Route("DELETE", _PATTERN, "xml.buckets.delete", delete_bucket),
    Route("GET", _PATTERN, "xml.buckets.get", get_location, query={"location": None}),
    Route("GET", _PATTERN, "xml.buckets.get", get_versioning, query={"versioning": None}),
    Route("PUT", _PATTERN, "xml.buckets.patch", put_versioning, query={"versioning": None}),
    Route("GET", _PATTERN, "xml.multipart.list", list_uploads, query={"uploads": None}),
    Route("GET", _PATTERN, "xml.objects.list", list_objects),
    Route("GET", _PATTERN, "xml.objects.list", list_objects_v2, query={"list-type": "2"}),
)
