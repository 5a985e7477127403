"""Encodings of S3: object names, generations, and headers. No I/O.

The generation of an object is `<ETag>/<size>`. `If-Match` pins a read to the ETag. The size shows
whether a range is the whole object: S3 returns a checksum for a whole object only. A user may also
pass `version:<id>`, to read a version.
Source: docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from aioflux._services import responses as _responses
from aioflux._services.responses import (
    TRANSIENT,
    Failure,
    RequestKind,
    attribute_headers,
    decode_crc32c,
    encode_crc32c,
    error_from_status,
    malformed_response,
)
from aioflux.errors import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import Precondition, ReadRequest
    from aioflux._values.meta import ObjectAttributes, ObjectMeta

_USER_PREFIX = b"x-amz-meta-"
CLASS_HEADER = b"x-amz-storage-class"
_USER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_~.-][A-Za-z0-9_.~/-]{0,1023}")
_DOTS = frozenset({".", ".."})
_MAX_NAME_BYTES = 1024
_VERSION = "version:"
_GENERATION = re.compile(r"([!#-~]+)/([0-9]{1,18})")
is_etag = re.compile(r"[!#-~]+").fullmatch
_MAX_USER_BYTES = 2048
"""Largest sum of the names and values of user metadata, in bytes
(docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html)."""


class Pin(NamedTuple):
    """A parsed generation, which a request is pinned to."""

    etag: str = ""
    """ETag without quotes; empty if any ETag matches."""
    size: int | None = None
    """Size of the object, in bytes; None if it is not known."""
    version: str = ""
    """Id of a version; empty for the current one."""

    @property
    def quoted(self) -> bytes:
        """The ETag in quotes, for headers; empty without an ETag."""
        return f'"{self.etag}"'.encode() if self.etag else b""


_ANY = Pin()


def generation_of(etag: str, size: int) -> str:
    """Return the generation of an object; empty without an ETag."""
    return f"{etag}/{size}" if etag else ""


def version_generation(version: str) -> str:
    """Return the generation that names a version by its id."""
    return _VERSION + version


def parse_pin(generation: str) -> Pin:
    """Parse a generation, `version:<id>`, or an ETag with or without quotes.

    The pin of an empty text matches every object.

    Raises:
        ValueError: The text has none of these forms.
    """
    if not generation:
        return _ANY
    if generation.startswith(_VERSION) and generation != _VERSION:
        return Pin(version=generation.removeprefix(_VERSION))
    match = _GENERATION.fullmatch(generation)
    if match is not None:
        return Pin(match[1], int(match[2]))
    etag = generation.strip('"')
    if not is_etag(etag):
        raise ValueError(f"{generation!r} is not a generation of S3; pass ObjectMeta.generation")
    return Pin(etag)


def require_size(pin: Pin, size: int) -> None:
    """Raise ValueError if the size of an object differs from the size in the pin."""
    if pin.size is not None and size != pin.size:
        raise ValueError(f"the object has {size} bytes, not {pin.size}")


def is_same_generation(one: str, other: str) -> bool:
    """Return whether two generations have the same ETag; the sizes are not compared."""
    return bool(one) and parse_pin(one).etag == parse_pin(other).etag != ""


def read_headers(pin: Pin, byte_range: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Return the headers of a read; an empty `byte_range` reads the whole object."""
    headers = [(b"x-amz-checksum-mode", b"ENABLED")]
    if pin.etag:
        headers.append((b"If-Match", pin.quoted))
    if byte_range:
        headers.append((b"Range", byte_range))
    return headers


def version_query(pin: Pin) -> bytes:
    """Return the query that selects the version of a pin; empty without a version."""
    return b"versionId=" + quote(pin.version, safe="").encode() if pin.version else b""


def etag_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the ETag of a response, without quotes; empty if it has none."""
    return headers.get(b"etag", b"").decode("latin-1").strip('"')


def check_name(name: str) -> None:
    """Raise ValueError for a name that no object of S3 can have."""
    size = len(name.encode())  # raises for lone surrogates
    if not 1 <= size <= _MAX_NAME_BYTES:
        why = f"it has {size} bytes of UTF-8, not 1 to {_MAX_NAME_BYTES}"
    elif name in _DOTS:
        why = "HTTP clients remove it from the path of a url"
    else:
        return
    raise ValueError(f"{name!r} is not a valid object name: {why}")


def quote_name(name: str) -> bytes:
    """Return a slash and the name of an object, percent-encoded as the signature requires.

    Raises:
        ValueError: No object can have the name.
    """
    if _PLAIN_NAME.fullmatch(name) is None or name in _DOTS:
        check_name(name)
        name = quote(name, safe="/")
    return b"/" + name.encode()


def precondition_headers(
    precondition: Precondition, *, is_quoted: bool = True
) -> list[tuple[bytes, bytes]]:
    """Return a precondition as headers, with quotes around the ETag (RFC 9110) if `is_quoted`.

    Raises:
        ValueError: `if_generation_match` is not a generation of S3, or it is a version, which S3
            does not compare in writes.
    """
    if precondition.if_absent:
        return [(b"If-None-Match", b"*")]
    generation = precondition.if_generation_match
    if generation is None:
        return []
    pin = parse_pin(generation)
    if not pin.etag:
        raise ValueError(
            f"{generation!r} cannot be a condition of a write: S3 compares ETags; pass "
            "ObjectMeta.generation"
        )
    return [(b"If-Match", pin.quoted if is_quoted else pin.etag.encode())]


def encryption_headers(kms_key: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of SSE-KMS for a new object; none without a key."""
    if not kms_key:
        return []
    name = b"x-amz-server-side-encryption"
    return [(name, b"aws:kms"), (name + b"-aws-kms-key-id", kms_key.encode())]


def object_headers(attributes: ObjectAttributes) -> list[tuple[bytes, bytes]]:
    """Return the attributes of an object as headers.

    Raises:
        ValueError: A header cannot represent the metadata.
    """
    headers = attribute_headers(attributes, CLASS_HEADER)
    num_bytes = 0
    for name, value in (attributes.metadata or {}).items():
        if _USER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r}: it is sent as a header, so use ASCII "
                "letters, digits and -_.!#$%&'*+^`|~"
            )
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ValueError(
                f"metadata {name!r} cannot have the value {value!r}: S3 stores printable ASCII "
                "without space at either end; encode the value, as with urllib.parse.quote"
            )
        num_bytes += len(name) + len(value)
        headers.append((_USER_PREFIX + name.encode(), value.encode()))
    if num_bytes > _MAX_USER_BYTES:
        raise ValueError(f"metadata has {num_bytes} bytes, but S3 stores at most {_MAX_USER_BYTES}")
    return headers


def hash_headers(crc32c: int | None) -> list[tuple[bytes, bytes]]:
    """Return the header with the crc32c of the body, which the service compares."""
    if crc32c is None:
        return []
    return [(b"x-amz-checksum-crc32c", encode_crc32c(crc32c).encode())]


def upload_headers(*, has_checksums: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers that ask for a crc32c of the whole object of a new multipart upload.

    There are none if the server does not support checksums.
    """
    if not has_checksums:
        return []
    return [(b"x-amz-checksum-algorithm", b"CRC32C"), (b"x-amz-checksum-type", b"FULL_OBJECT")]


def full_crc32c(checksum: bytes | None, kind: bytes | None = None) -> int | None:
    """Decode the crc32c of a whole object.

    Returns None if there is none, or if it is a checksum of the checksums of parts.

    Raises:
        ValueError: The crc32c is malformed.
    """
    if not checksum or kind == b"COMPOSITE" or b"-" in checksum:
        return None
    return decode_crc32c(checksum)


def meta_from_headers(
    headers: Mapping[bytes, bytes], *, key: str, uri: str, size: int, crc32c: int | None
) -> ObjectMeta:
    """Build the metadata of an object from the headers of a response to a read or a HEAD."""
    coding = headers.get(b"content-encoding", b"").decode("latin-1")
    return _responses.meta_from_headers(
        headers,
        key=key,
        uri=uri,
        size=size,
        generation=generation_of(etag_of(headers), size),
        user_prefix=_USER_PREFIX,
        class_header=CLASS_HEADER,
        crc32c=crc32c,
        # SDKs send `aws-chunked` with a chunked body; it is not an encoding of the object.
        content_encoding=coding.replace("aws-chunked", "").strip(" ,"),
    )


_ACTUAL_SIZE = re.compile(rb"<ActualObjectSize>([0-9]{1,18})</ActualObjectSize>")
_MD5 = re.compile(r"[0-9a-f]{32}")
_MAX_GUESSED_BYTES: Final = 4 * 1024 * 1024
"""Longest range that `WholeObjectGuesses` omits."""
_NUM_AFTER_WRONG_GUESS: Final = 1000
"""Number of reads after a wrong guess of which only the last omits its Range again."""


def byte_range(start: int, end: int | None, pin: Pin) -> bytes:
    """Return the value of a Range header for `[start, end)`; empty for the whole object."""
    if start == 0 and (end is None or (pin.size is not None and end >= pin.size)):
        return b""
    return _responses.byte_range(start, end)


def object_size(request: ReadRequest, response: Response, etag: str) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: The response does not match the request.
    """
    if not etag:
        # The response is, for example, the login page of a public network.
        raise ValueError("the response has no ETag: it is not from S3")
    size = _responses.size_from_response(request, response)
    generation = request.generation
    if generation and generation != generation_of(etag, size):
        pin = parse_pin(generation)
        if pin.etag and etag != pin.etag:
            raise ValueError(f"the response has the ETag {etag!r}, not {pin.etag!r}")
        if pin.size is not None and size != pin.size:
            raise ValueError(f"the object has {size} bytes now, not {pin.size}")
    return size


def generation_from_head(headers: Mapping[bytes, bytes]) -> str:
    """Return the generation from the headers of a response to a read; empty if they have none."""
    part = _responses.parse_content_range(headers)
    if part is not None:
        return generation_of(etag_of(headers), part[2])
    length = headers.get(b"content-length", b"")
    return generation_of(etag_of(headers), int(length)) if length.isdigit() else ""


def size_past_the_end(headers: Mapping[bytes, bytes], body: Any, *, start: int) -> int | None:
    """Return the object size from a 416 response; None if it is missing, or larger than `start`."""
    if b"content-range" in headers:
        return _responses.size_from_unsatisfied(headers, start=start)
    match = _ACTUAL_SIZE.search(bytes(body))
    return int(match[1]) if match is not None and int(match[1]) <= start else None


def is_same_content(headers: Mapping[bytes, bytes], data: Any, *, uses_md5: bool) -> bool | None:
    """Compare the bytes of a whole object with a checksum of the response other than crc32c.

    Args:
        headers: Headers of the response, names in lower case.
        data: The bytes.
        uses_md5: If there is no other checksum, compare the MD5, which takes 1.6 ms per MiB.

    Returns:
        Whether they match; None if the response has no checksum that can be computed here.
    """
    get = headers.get
    if get(b"x-amz-checksum-type") != b"COMPOSITE":
        for name, digest in _DIGESTS.items():
            expected = get(name)
            if expected is None or b"-" in expected:
                continue
            actual = digest(data)
            if actual is not None:
                return base64.b64encode(actual) == expected
    if not uses_md5 or not has_md5(headers):
        return None
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == etag_of(headers)


def has_md5(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the ETag is the MD5 of the bytes: one part, not encrypted by a KMS key.

    Source: docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html.
    """
    get = headers.get
    if get(b"x-amz-server-side-encryption", b"AES256") != b"AES256":
        return False
    if b"x-amz-server-side-encryption-customer-algorithm" in headers:
        return False
    return _MD5.fullmatch(etag_of(headers)) is not None


def _crc32(data: Any) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _crc64nvme(data: Any) -> bytes | None:
    """Return the CRC64NVME; None if awscrt is not installed."""
    try:
        from awscrt.checksums import crc64nvme  # type: ignore[import-not-found]
    except ImportError:
        return None
    value: int = crc64nvme(data)
    return value.to_bytes(8, "big")


_DIGESTS: dict[bytes, Callable[[Any], bytes | None]] = {
    b"x-amz-checksum-crc64nvme": _crc64nvme,
    b"x-amz-checksum-crc32": _crc32,
    b"x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    b"x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
}


class WholeObjectGuesses:
    """Decisions on which reads omit their Range and request the whole object, of unknown size.

    S3 returns a checksum only for a whole object. Most reads of small objects by key have a range
    that includes the whole object, so they omit the Range. If the object is larger than the range,
    the connection must be closed. Of the next such reads, beginning with the repeated one, 999 send
    their Range.
    """

    def __init__(self) -> None:
        self._num_ranges_left = 0

    def omits_range(self, end: int | None) -> bool:
        """Return whether to send a read of `[0, end)` without a Range."""
        if end is None or end > _MAX_GUESSED_BYTES:
            return False
        if self._num_ranges_left:
            self._num_ranges_left -= 1
        return not self._num_ranges_left

    def note_wrong(self) -> None:
        """Record that an object was larger than the omitted Range."""
        self._num_ranges_left = _NUM_AFTER_WRONG_GUESS


EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
"""Codes for expired credentials."""
SKEWED_CODE = "RequestTimeTooSkewed"
"""Code for a local clock that is wrong by more than 15 minutes."""

_TRANSIENT_CODES = {
    "InternalError": 500,
    "OperationAborted": 409,
    "ConditionalRequestConflict": 409,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
}
"""Codes that are retried, with the status that AWS sends; other servers may send another status."""
_STATUSES = {"AccessDenied": 403, "NoSuchKey": 404, "PreconditionFailed": 412}
_WRONG_TOKENS = frozenset({"InvalidToken"})
_DIGEST_CODE = "XAmzContentSHA256Mismatch"
_ADVICE_BY_CODE = {
    **dict.fromkeys(EXPIRED_CODES, "sign in again, as with 'aws sso login'"),
    "InvalidAccessKeyId": "no such access key exists; sign in again, or choose another profile",
    "SignatureDoesNotMatch": (
        "the secret key does not belong to the access key, or a proxy in between changes requests"
    ),
    SKEWED_CODE: "the clock of this machine is wrong; set it",
    "InvalidToken": "the session token does not belong to the access key; sign in again",
    "AllAccessDisabled": "the bucket is disabled",
    "AccountProblem": "the account has a problem; contact AWS support",
}
_ADVICE_IF_DENIED = (
    "check that the credentials in use have the permission (s3:GetObject, s3:PutObject, "
    "s3:DeleteObject, s3:ListBucket; for encrypted objects also the KMS key), and whether the "
    "requester pays; without s3:ListBucket, S3 also returns 403 for objects that do not exist"
)


def service_error(failure: Failure) -> StorageError:
    """Return the error for an error response."""
    status, code, kind = failure.status, failure.code, failure.kind
    if status == 412 and kind.generation:
        before = f"it was replaced and no longer has generation {kind.generation}, "
        short = failure._replace(detail="")
        return short.error(NotFoundError, before=before, advice="list it again")
    is_missing = status == 404 and code != "NoSuchBucket" and code != "NoSuchUpload"
    is_conflict = status == 409 and code == "ConditionalRequestConflict" and kind.is_completion
    if kind.is_conditional and (status == 412 or is_missing or is_conflict):
        before = "its generation is not the expected one, "
        return failure.error(PreconditionFailedError, before=before)
    if code in _TRANSIENT_CODES and status not in TRANSIENT:
        # 409: S3 rejected this request because of a concurrent one, so this one changed nothing.
        maybe_done = _TRANSIENT_CODES[code] != 409
        return failure.error(TransientError, before="the service returned ", maybe_done=maybe_done)
    if status in {401, 403} or (status == 400 and code in EXPIRED_CODES | _WRONG_TOKENS):
        before = "the credentials have expired, " if code in EXPIRED_CODES else ""
        advice = _ADVICE_BY_CODE.get(code, _ADVICE_IF_DENIED)
        return failure.error(PermissionDeniedError, before=before, advice=advice)
    return error_from_status(
        failure._replace(code="BadDigest") if code == _DIGEST_CODE else failure
    )


def deletion_error(code: str, detail: str, *, uri: str) -> StorageError:
    """Return the error for one object that DeleteObjects did not delete."""
    status = _TRANSIENT_CODES.get(code) or _STATUSES.get(code, 400)
    kind = RequestKind(is_conditional=status == 412)
    return service_error(Failure(status, "delete", uri, code, detail, kind=kind))


def error_in_success(fields: Mapping[str, str], *, action: str, uri: str) -> StorageError:
    """Return the error for an error body in a response with status 200.

    S3 may send the status of a copy or of a CompleteMultipartUpload before the operation fails.
    Source: docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html.
    """
    code, detail = fields.get("Code", ""), fields.get("Message", "")
    if not code:
        why = "the response has neither a result nor an error"
        return malformed_response(action, uri, why, status=200)
    status = _TRANSIENT_CODES.get(code) or _STATUSES.get(code, 400)
    kind = RequestKind(is_conditional=status == 412)
    return service_error(Failure(status, action, uri, code, detail, kind=kind))
