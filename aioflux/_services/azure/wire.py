"""Encodings of Azure Blob Storage: `x-ms-` headers, ETags, block ids, XML bodies. No I/O.

An ETag identifies a blob's content and metadata: it is the generation.
Source: learn.microsoft.com/rest/api/storageservices/blob-service-rest-api.
"""

from __future__ import annotations

import binascii
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from aioflux._services import headers as _headers
from aioflux._services.headers import DEFAULT_TYPE
from aioflux._services.status import error_from_status, response_error
from aioflux._services.xml_multipart import parse_xml
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioflux._services.base import Precondition, WriteRequest
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "VERSION",
    "BlockList",
    "block_id",
    "block_list",
    "check_name",
    "etag_of",
    "is_directory",
    "match_header",
    "md5_header",
    "md5_of",
    "meta_from_headers",
    "new_upload_id",
    "object_headers",
    "parse_block_id",
    "parse_block_list",
    "parse_error",
    "precondition_headers",
    "query_target",
    "root_path",
    "service_error",
    "upload_initiated",
]

VERSION = b"2023-11-03"
"""API version of requests."""
_USER_PREFIX = b"x-ms-meta-"
_META_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ETAG = re.compile(r"[!#-~]+")
_MAX_NAME = 1024
_MARK = b"aioflux-"
_BLOCK = re.compile(rb"aioflux-([0-9a-f]{32})-([0-9]{7})")

_EXISTS = frozenset({"BlobAlreadyExists", "UnauthorizedBlobOverwrite"})
_UNMET = frozenset(
    {"ConditionNotMet", "SourceConditionNotMet", "TargetConditionNotMet", "InvalidBlockList"}
)
_WRONG_BYTES = frozenset({"Md5Mismatch", "Crc64Mismatch"})
_ROLES = (
    "signed in with an access token, it takes the role 'Storage Blob Data Contributor' (to read: "
    "'Storage Blob Data Reader') on the container or the account; being its owner is not enough"
)
_WHAT_TO_DO = {
    "AuthenticationFailed": (
        "the service does not accept the account key, SAS token or access token: compare them with "
        "the portal's, look whether the SAS token has ended, and set this machine's clock, which "
        "may be off by 15 minutes at most"
    ),
    "AuthorizationFailure": (
        "a firewall or network rule of the storage account keeps this machine out, or the SAS "
        "token is for other addresses: see 'Networking' of the account"
    ),
    "AuthorizationPermissionMismatch": f"the credentials may not do this; {_ROLES}",
    "InsufficientAccountPermissions": f"the credentials may not do this; {_ROLES}",
    "AuthorizationProtocolMismatch": "the SAS token is for https alone",
    "AuthorizationServiceMismatch": "the SAS token is not for blobs: it needs ss=b",
    "AuthorizationResourceTypeMismatch": (
        "the SAS token is not for this: it needs srt=co, containers and objects"
    ),
    "AuthorizationSourceIPMismatch": "the SAS token is for other addresses than this machine's",
    "KeyBasedAuthenticationNotPermitted": (
        "the storage account takes no account keys: sign in with 'az login' and pass no key"
    ),
    "PublicAccessNotPermitted": "the storage account allows no anonymous access: sign in",
    "NoAuthenticationInformation": (
        f"no credentials were sent, and the container is not public; {_ROLES}"
    ),
    "AccountIsDisabled": "the storage account is disabled",
    "BlobArchived": "it is in the archive tier: set another tier and wait until it is back",
    "BlobBeingRehydrated": "it is on its way back from the archive tier: wait",
    "LeaseIdMissing": "it is leased: wait for the end of the lease, or break it",
    "LeaseIdMismatchWithBlobOperation": "it is leased: wait for the end of the lease",
    "SnapshotsPresent": "it has snapshots, which would be lost: delete them first",
    "InvalidBlobType": "it is an append blob or page blob, and not written here: delete it first",
    "InvalidBlobOrBlock": "another program has begun to upload it: its blocks go after a week",
    "BlobImmutableDueToPolicy": "a policy keeps it from being changed",
    "AccountBeingCreated": "the storage account is not ready yet",
    "ContainerBeingDeleted": "the container is being deleted",
}
"""Advice for each code of the service
(learn.microsoft.com/rest/api/storageservices/blob-service-error-codes)."""


class BlockList(NamedTuple):
    """Blocks of a blob."""

    has_committed: bool
    """It has committed blocks."""
    uncommitted: list[str]
    """Ids of blocks that belong to no blob yet."""


def check_name(name: str, key: str) -> None:
    """Raise ValueError for a name that no blob can have, or not reliably.

    The service treats a backslash as a slash, and advises against path segments that end with a
    dot: on the way `.` and `..` may be resolved as steps in a path, even out of the container
    (learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-
    metadata).
    """
    name.encode()  # raises for lone surrogates
    if not 1 <= len(name) <= _MAX_NAME:
        why = f"it has {len(name)} characters, not 1 to {_MAX_NAME}"
    elif "\r" in name or "\n" in name:
        why = "it holds the end of a line"
    elif "\\" in name:
        why = "the service treats a backslash as a slash"
    elif any(segment.endswith(".") for segment in name.split("/")):
        why = "no name between slashes may be '.' or '..', or end with a dot"
    else:
        return
    raise ValueError(f"{key!r} is not a valid blob name: {why}")


def root_path(url: str, account: str) -> str:
    """Return the path before the container.

    It is that of the url, if it has one. Else the account is in the host's name, as for Azure's own
    hosts, or it is the path, as for emulators.
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path or (parts.hostname or "").split(".")[0] == account.lower():
        return path
    return f"/{account}"


def query_target(path: bytes, query: Mapping[str, str]) -> bytes:
    """Return the target of a request: an encoded path, and parameters to encode."""
    return b"%b?%b" % (path, urlencode(query, quote_via=quote).encode())


def etag_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the ETag of a response, without quotes; empty if it has none."""
    return (headers.get(b"etag") or b"").decode("latin-1").strip('"')


def is_directory(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a response is about a directory, which is not an object.

    Hierarchical namespaces have directories; Hadoop marks them in flat namespaces, too.
    """
    return (
        headers.get(b"x-ms-resource-type") == b"directory"
        or headers.get(b"x-ms-meta-hdi_isfolder", b"").lower() == b"true"
    )


def match_header(generation: str) -> tuple[bytes, bytes]:
    """Return an If-Match header, or raise ValueError if the generation is not an ETag."""
    if _ETAG.fullmatch(generation) is None:
        raise ValueError(f"{generation!r} is not an ETag; pass ObjectMeta.generation")
    return b"If-Match", b'"%b"' % generation.encode()


def precondition_headers(precondition: Precondition) -> list[tuple[bytes, bytes]]:
    """Return a precondition as headers, or raise ValueError if it is not an ETag."""
    if precondition.if_absent:
        return [(b"If-None-Match", b"*")]
    if precondition.if_generation_match is None:
        return []
    return [match_header(precondition.if_generation_match)]


def object_headers(
    content_type: str, metadata: Mapping[str, str] | None
) -> list[tuple[bytes, bytes]]:
    """Return content type and metadata as headers.

    Raises:
        ValueError: The service cannot store it.
    """
    headers = [(b"x-ms-blob-content-type", (content_type or DEFAULT_TYPE).encode())]
    for name, value in (metadata or {}).items():
        if _META_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r} on Azure: it is ASCII letters, digits and "
                "_, and does not begin with a digit"
            )
        if value != value.strip() or not (value.isascii() and value.isprintable()):
            raise ValueError(
                f"metadata {name!r} cannot have the value {value!r} on Azure: it is printable "
                "ASCII without space around it"
            )
        headers.append((_USER_PREFIX + name.encode(), value.encode()))
    return headers


def md5_header(digest: bytes) -> tuple[bytes, bytes]:
    """Return the header by which the service checks the bytes that it receives."""
    return b"Content-MD5", binascii.b2a_base64(digest, newline=False)


def md5_of(headers: Mapping[bytes, bytes], *, is_part: bool) -> bytes | None:
    """Return the MD5 of the whole blob from a response, or None.

    Args:
        headers: Headers of the response, names in lower case.
        is_part: It is the response to a range, whose MD5 `Content-MD5` would be.

    Raises:
        ValueError: It is malformed.
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
    return _headers.meta_from_headers(
        headers,
        key=key,
        uri=uri,
        size=size,
        generation=etag_of(headers),
        user_prefix=_USER_PREFIX,
        class_header=b"x-ms-access-tier",
        content_encoding=headers.get(b"content-encoding", b"").decode("latin-1"),
        written=written,
    )


# --- uploads ---------------------------------------------------------------------------


def new_upload_id(now: float, random: bytes) -> str:
    """Return the id of a new upload: Unix time of its initiation, and 12 random bytes."""
    return f"{int(now):08x}{random.hex()}"


def upload_initiated(upload_id: str) -> datetime:
    """Return the time when an upload was initiated."""
    return datetime.fromtimestamp(int(upload_id[:8], 16), UTC)


def block_id(upload_id: str, number: int) -> str:
    """Return the id of one block; the service requires one length for all.

    It has the id of the upload, since the service itself has no uploads.
    """
    text = b"%b%b-%07d" % (_MARK, upload_id.encode(), number)
    return binascii.b2a_base64(text, newline=False).decode()


def parse_block_id(text: str) -> tuple[str, int] | None:
    """Return upload and number of a block; None for a block of another program."""
    try:
        found = _BLOCK.fullmatch(binascii.a2b_base64(text, strict_mode=True))
    except ValueError:
        return None
    return (found[1].decode(), int(found[2])) if found else None


def block_list(ids: Iterable[str]) -> bytes:
    """Return the body of a request that commits blocks as a blob."""
    rows = "".join(f"<Latest>{each}</Latest>" for each in ids)
    return f'<?xml version="1.0" encoding="utf-8"?><BlockList>{rows}</BlockList>'.encode()


def parse_block_list(data: bytes | bytearray | memoryview) -> BlockList:
    """Parse the blocks of a blob, or raise ValueError if the body is not a block list."""
    root = parse_xml(data)
    if root.tag != "BlockList":
        raise ValueError(f"the response is <{root.tag}>, not a block list")
    names = [each.text or "" for each in root.iterfind("UncommittedBlocks/Block/Name")]
    return BlockList(root.find("CommittedBlocks/Block") is not None, names)


# --- errors ----------------------------------------------------------------------------


def parse_error(
    headers: Mapping[bytes, bytes], data: bytes | bytearray | memoryview
) -> tuple[str, str]:
    """Return (code, message) of an error; empty strings if it has none.

    The code is a header, too, since responses to HEAD have no body. Other fields of the body than
    the message may repeat the signature of the request.
    """
    code = headers.get(b"x-ms-error-code", b"").decode("latin-1")
    try:
        root = parse_xml(data)
    except ValueError:
        return code, ""
    message = (root.findtext("Message") or "").partition("\nRequestId:")[0]
    return code or root.findtext("Code") or "", message


def service_error(
    status: int,
    *,
    action: str,
    uri: str,
    code: str,
    detail: str,
    retry_after: str | None,
    is_conditional: bool = False,
) -> StorageError:
    """Return the error for an error response."""
    what = {"action": action, "uri": uri, "code": code}
    if code == "InvalidBlockList":
        before = "another writer wrote it while its parts were sent, which deletes them on Azure, "
        advice = "write it again"
        return response_error(PreconditionFailedError, status, **what, before=before, advice=advice)
    if code == "ContainerNotFound":
        before = "there is no such container, "
        advice = "make it first, with 'az storage container create'"
        return response_error(NotFoundError, status, **what, before=before, advice=advice)
    what["detail"] = detail
    if code in _WRONG_BYTES:
        before = "the service received other bytes than were sent, "
        return response_error(ChecksumError, status, **what, before=before)
    is_missing = is_conditional and status == 404 and code in {"", "BlobNotFound"}
    if code in _EXISTS | _UNMET or is_missing or (status == 412 and not code):
        before = "its generation is not the expected one, "
        return response_error(PreconditionFailedError, status, **what, before=before)
    advice = _WHAT_TO_DO.get(code, "")
    if status in {401, 403} or code == "PublicAccessNotPermitted":
        advice = advice or f"check that the credentials in use may {action} objects there; {_ROLES}"
        return response_error(PermissionDeniedError, status, **what, advice=advice)
    if advice or status == 412:
        return response_error(StorageError, status, **what, advice=advice)
    return error_from_status(status, **what, retry_after=retry_after)
