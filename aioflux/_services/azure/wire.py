"""Encodings of Azure Blob Storage: `x-ms-` headers, block ids, XML bodies, errors. No I/O.

The generation of a blob is its ETag, which changes with its content and its metadata.
Source: learn.microsoft.com/rest/api/storageservices/blob-service-rest-api.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from aioflux._services import responses as _responses
from aioflux._services.responses import Failure, attribute_headers, error_from_status
from aioflux._services.xml_reader import parse_fields, read_xml
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import Precondition, ReadRequest, WriteRequest
    from aioflux._values.meta import ObjectAttributes, ObjectMeta

VERSION = b"2023-11-03"
"""API version of requests."""
_USER_PREFIX = b"x-ms-meta-"
_TIER = b"x-ms-access-tier"
_META_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
is_etag = re.compile(r"[!#-~]+").fullmatch
_MAX_NAME = 1024
_MAX_BLOCKS = 150_000
"""Largest number of blocks of one key: 50,000 committed and 100,000 uncommitted ones
(learn.microsoft.com/rest/api/storageservices/put-block)."""
_BLOCK_PREFIX = b"aioflux-"
_BLOCK = re.compile(rb"aioflux-([0-9a-f]{32})-([0-9]{7})")

_EXISTS_CODES = frozenset({"BlobAlreadyExists", "UnauthorizedBlobOverwrite"})
_PRECONDITION_CODES = frozenset(
    {"ConditionNotMet", "SourceConditionNotMet", "TargetConditionNotMet", "InvalidBlockList"}
)
_DIGEST_CODES = frozenset({"Md5Mismatch", "Crc64Mismatch"})
_ROLES = (
    "an access token needs the role 'Storage Blob Data Contributor' (to read: 'Storage Blob Data "
    "Reader') on the container or the account; the role 'Owner' is not enough"
)
_ADVICE_BY_CODE = {
    "AuthenticationFailed": (
        "the service does not accept the account key, SAS token or access token: compare it with "
        "the portal, check whether the SAS token has expired, and set the clock of this machine, "
        "which may be wrong by 15 minutes at most"
    ),
    "AuthorizationFailure": (
        "a firewall or network rule of the storage account rejects this machine, or the SAS token "
        "is for other addresses: see 'Networking' of the account"
    ),
    "AuthorizationPermissionMismatch": f"the credentials may not do this; {_ROLES}",
    "InsufficientAccountPermissions": f"the credentials may not do this; {_ROLES}",
    "AuthorizationProtocolMismatch": "the SAS token allows only https",
    "AuthorizationServiceMismatch": "the SAS token is not for blobs: it needs ss=b",
    "AuthorizationResourceTypeMismatch": (
        "the SAS token does not allow this: it needs srt=co, containers and objects"
    ),
    "AuthorizationSourceIPMismatch": "the SAS token does not allow the address of this machine",
    "KeyBasedAuthenticationNotPermitted": (
        "the storage account accepts no account keys: sign in with 'az login' and pass no key"
    ),
    "PublicAccessNotPermitted": "the storage account allows no anonymous access: sign in",
    "NoAuthenticationInformation": (
        f"no credentials were sent, and the container is not public; {_ROLES}"
    ),
    "AccountIsDisabled": "the storage account is disabled",
    "BlobArchived": "it is in the archive tier: set another tier and wait until it is rehydrated",
    "BlobBeingRehydrated": "it is being rehydrated from the archive tier: wait",
    "LeaseIdMissing": "it is leased: wait for the end of the lease, or break the lease",
    "LeaseIdMismatchWithBlobOperation": "it is leased: wait for the end of the lease",
    "SnapshotsPresent": "it has snapshots: delete them first",
    "InvalidBlobType": "it is an append blob or page blob, which cannot be replaced: delete it",
    "InvalidBlobOrBlock": (
        "another program has sent blocks of it without committing them: wait until it commits, or "
        "until Azure deletes the blocks, a week after the last one"
    ),
    "BlobImmutableDueToPolicy": "an immutability policy protects it",
    "AccountBeingCreated": "the storage account is not ready yet",
    "ContainerBeingDeleted": "the container is being deleted",
}
"""Advice by error code of the service
(learn.microsoft.com/rest/api/storageservices/blob-service-error-codes)."""


class BlockList(NamedTuple):
    """Blocks of one key."""

    has_committed: bool
    """The key has committed blocks: the content of a blob."""
    uncommitted: list[str]
    """Ids of uncommitted blocks, which belong to no blob."""


def check_name(name: str, key: str) -> None:
    """Raise ValueError for a name that a blob cannot have, or should not have.

    The service treats a backslash as a slash, and advises against path segments that end with a
    dot: HTTP software may resolve `.` and `..` as steps in a path, even out of the container
    (learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-
    metadata).
    """
    name.encode()  # raises for lone surrogates
    if not 1 <= len(name) <= _MAX_NAME:
        why = f"it has {len(name)} characters, not 1 to {_MAX_NAME}"
    elif "\r" in name or "\n" in name:
        why = "it contains a line break"
    elif "\\" in name:
        why = "the service treats a backslash as a slash"
    elif any(segment.endswith(".") for segment in name.split("/")):
        why = "no path segment may be '.' or '..', or end with a dot"
    else:
        return
    raise ValueError(f"{key!r} is not a valid blob name: {why}")


def root_path(url: str, account: str) -> str:
    """Return the part before the container in the paths of requests to an endpoint.

    If the url has a path, this is that path. Otherwise it is empty if the host name begins with the
    account, as Azure's own hosts do, and `/{account}` if not, as for emulators.
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path or (parts.hostname or "").split(".")[0] == account.lower():
        return path
    return f"/{account}"


def query_target(path: bytes, query: Mapping[str, str]) -> bytes:
    """Return the target of a request from an encoded path, and parameters that are not encoded."""
    return b"%b?%b" % (path, urlencode(query, quote_via=quote).encode())


def etag_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the ETag of a response, without quotes; empty if the response has none."""
    return (headers.get(b"etag") or b"").decode("latin-1").strip('"')


def is_directory(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a response is for a directory, which is not an object.

    Hierarchical namespaces have directories. In flat namespaces, Hadoop writes marker blobs.
    """
    return (
        headers.get(b"x-ms-resource-type") == b"directory"
        or headers.get(b"x-ms-meta-hdi_isfolder", b"").lower() == b"true"
    )


def match_header(generation: str) -> tuple[bytes, bytes]:
    """Return an If-Match header; ValueError if the generation is not an ETag."""
    if not is_etag(generation):
        raise ValueError(f"{generation!r} is not an ETag; pass ObjectMeta.generation")
    return b"If-Match", b'"%b"' % generation.encode()


def precondition_headers(precondition: Precondition) -> list[tuple[bytes, bytes]]:
    """Return a precondition as headers; ValueError if its generation is not an ETag."""
    if precondition.if_absent:
        return [(b"If-None-Match", b"*")]
    if precondition.if_generation_match is None:
        return []
    return [match_header(precondition.if_generation_match)]


def object_headers(attributes: ObjectAttributes) -> list[tuple[bytes, bytes]]:
    """Return the attributes of a blob as headers.

    Raises:
        ValueError: The service cannot store the metadata.
    """
    headers = attribute_headers(attributes, _TIER, prefix=b"x-ms-blob-")
    for name, value in (attributes.metadata or {}).items():
        if _META_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r} on Azure: use ASCII letters, digits and "
                "_, with no digit at the beginning"
            )
        if value != value.strip() or not (value.isascii() and value.isprintable()):
            raise ValueError(
                f"metadata {name!r} cannot have the value {value!r} on Azure: use printable ASCII "
                "without space at either end"
            )
        headers.append((_USER_PREFIX + name.encode(), value.encode()))
    return headers


def tier_headers(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the access tier for a copy of a blob, from the headers of a response to HEAD.

    Empty if the tier was not set, and so is that of the account, or if the blob is archived: a copy
    of it must be in another tier.
    """
    tier = headers.get(_TIER, b"")
    is_inferred = headers.get(b"x-ms-access-tier-inferred", b"") == b"true"
    return [] if is_inferred or tier in {b"", b"Archive"} else [(_TIER, tier)]


def md5_header(digest: bytes) -> tuple[bytes, bytes]:
    """Return the header with the MD5 of the body, which the service compares."""
    return b"Content-MD5", binascii.b2a_base64(digest, newline=False)


def md5_of(headers: Mapping[bytes, bytes], *, is_part: bool) -> bytes | None:
    """Return the MD5 of the whole blob from a response; None if the response has none.

    Args:
        headers: Headers of the response, names in lower case.
        is_part: The body is a range; `Content-MD5` would be the MD5 of the range.

    Raises:
        ValueError: The MD5 is malformed.
    """
    text = headers.get(b"x-ms-blob-content-md5" if is_part else b"content-md5")
    if not text:
        return None
    value = binascii.a2b_base64(text, strict_mode=True)
    if len(value) != 16:
        raise ValueError(f"an MD5 has 16 bytes, not {len(value)}")
    return value


def meta_from_headers(
    headers: Mapping[bytes, bytes],
    *,
    key: str,
    uri: str,
    size: int,
    written: WriteRequest | None = None,
) -> ObjectMeta:
    """Build the metadata of an object from the headers of a response."""
    return _responses.meta_from_headers(
        headers,
        key=key,
        uri=uri,
        size=size,
        generation=etag_of(headers),
        user_prefix=_USER_PREFIX,
        class_header=_TIER,
        content_encoding=headers.get(b"content-encoding", b"").decode("latin-1"),
        written=written,
    )


# --- reads -----------------------------------------------------------------------------


def range_header(start: int, end: int | None) -> tuple[bytes, bytes]:
    """Return the header for the range `[start, end)`; `end=None`: to the end of the object."""
    return b"x-ms-range", _responses.byte_range(start, end)


def object_size(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: The response does not match the request.
    """
    generation = request.generation
    etag = etag_of(response.headers)
    if not etag or b"x-ms-request-id" not in response.headers:
        # The response is, for example, the login page of a public network.
        raise ValueError("the response has no ETag or request id: it is not from Azure")
    if generation and etag != generation:
        raise ValueError(f"the response is of generation {etag}")
    if response.status == 206 and not request.start and request.end is None:
        raise ValueError("the service returned a range in place of the whole object")
    return _responses.size_from_response(request, response)


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the object size from a response without bytes; None if missing or above `start`."""
    part = _responses.parse_content_range(headers)
    if part is None:
        return _responses.size_from_unsatisfied(headers, start=start)
    first, last, size = part
    # An emulator returns 206 without bytes for a range that starts at the end.
    return size if first == last + 1 and size <= start else None


# --- uploads ---------------------------------------------------------------------------


def new_upload_id(now: float, random: bytes) -> str:
    """Return the id of a new upload: the Unix time `now`, and 12 random bytes, as hex."""
    return f"{int(now):08x}{random.hex()}"


def upload_initiated(upload_id: str) -> datetime:
    """Return the time at which an upload was initiated, from its id."""
    return datetime.fromtimestamp(int(upload_id[:8], 16), UTC)


def block_id(upload_id: str, number: int) -> str:
    """Return the id of one block, which contains the id of the upload.

    The service requires block ids of equal length, and has no upload ids of its own.
    """
    text = b"%b%b-%07d" % (_BLOCK_PREFIX, upload_id.encode(), number)
    return binascii.b2a_base64(text, newline=False).decode()


def parse_block_id(text: str) -> tuple[str, int] | None:
    """Return upload id and number from a block id; None for a block of another program."""
    try:
        match = _BLOCK.fullmatch(binascii.a2b_base64(text, strict_mode=True))
    except ValueError:
        return None
    return (match[1].decode(), int(match[2])) if match else None


def block_list(ids: Iterable[str]) -> bytes:
    """Return the body of a request that commits blocks as a blob."""
    rows = "".join(f"<Latest>{block}</Latest>" for block in ids)
    return f'<?xml version="1.0" encoding="utf-8"?><BlockList>{rows}</BlockList>'.encode()


def parse_block_list(data: bytes | bytearray | memoryview) -> BlockList:
    """Parse the blocks of one key; ValueError if the body is not a block list."""
    committed: list[object] = []
    names: list[str] = []
    root, _ = read_xml(
        data,
        {
            "CommittedBlocks/Block": committed.append,
            "UncommittedBlocks/Block": lambda texts: names.append(texts.get("Name", "")),
        },
        max_entries=_MAX_BLOCKS,
    )
    if root != "BlockList":
        raise ValueError(f"the response is <{root}>, not a block list")
    return BlockList(bool(committed), names)


# --- errors ----------------------------------------------------------------------------


def parse_error(
    headers: Mapping[bytes, bytes], data: bytes | bytearray | memoryview
) -> tuple[str, str]:
    """Return (code, message) of an error response; empty strings if it has none.

    The code is also in a header, since responses to HEAD have no body. No other field of the body
    is used: some of them contain the signature of the request.
    """
    code = headers.get(b"x-ms-error-code", b"").decode("latin-1")
    try:
        fields = parse_fields(data)
    except ValueError:
        return code, ""
    message = fields.get("Message", "").partition("\nRequestId:")[0]
    return code or fields.get("Code", ""), message


def service_error(failure: Failure) -> StorageError:
    """Return the error for an error response."""
    status, code, is_conditional = failure.status, failure.code, failure.kind.is_conditional
    short = failure._replace(detail="")
    if code == "InvalidBlockList":
        before = (
            "the parts of the upload no longer exist (another write of this object deletes them), "
        )
        return short.error(PreconditionFailedError, before=before, advice="write it again")
    if code == "ContainerNotFound":
        before = "no such container exists, "
        advice = "create it, with 'az storage container create'"
        return short.error(NotFoundError, before=before, advice=advice)
    if code in _DIGEST_CODES:
        before = "the service received other bytes than were sent, "
        return failure.error(ChecksumError, before=before)
    is_missing = is_conditional and status == 404 and code in {"", "BlobNotFound"}
    if code in _EXISTS_CODES | _PRECONDITION_CODES or is_missing or (status == 412 and not code):
        before = "its generation is not the expected one, "
        return failure.error(PreconditionFailedError, before=before)
    advice = _ADVICE_BY_CODE.get(code, "")
    if status in {401, 403} or code == "PublicAccessNotPermitted":
        may = f"check that the credentials in use may {failure.action} objects there; {_ROLES}"
        return failure.error(PermissionDeniedError, advice=advice or may)
    if advice or status == 412:
        return failure.error(StorageError, advice=advice)
    return error_from_status(failure)
