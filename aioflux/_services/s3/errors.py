"""What a refusal of S3 means, beside what `status` knows of all services. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services.status import TRANSIENT, error_from_status, words_of
from aioflux.errors import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXPIRED_CODES", "SKEWED_CODE", "deletion_error", "error_in_success", "refusal"]

EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
"""The keys have ended: others are to be found."""
SKEWED_CODE = "RequestTimeTooSkewed"
"""This machine's clock is more than 15 minutes off."""

_PASSING = {
    "InternalError": 500,
    "OperationAborted": 409,
    "ConditionalRequestConflict": 409,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
}
"""Codes that ask for another attempt, with their status, whatever that of the answer is."""
_STATUSES = {"AccessDenied": 403, "NoSuchKey": 404, "PreconditionFailed": 412}
_WRONG_TOKENS = frozenset({"InvalidToken"})
_DIGEST_CODE = "XAmzContentSHA256Mismatch"
_HINTS = {
    "InvalidAccessKeyId": "no such access key exists; sign in again, or choose another profile",
    "SignatureDoesNotMatch": (
        "the secret key does not belong to the access key, or something between here and there "
        "changes requests"
    ),
    SKEWED_CODE: "this machine's clock is wrong; set it",
    "InvalidToken": "the session token does not belong to the access key; sign in again",
    "AllAccessDisabled": "the bucket is disabled",
    "AccountProblem": "the account is not in order",
}
_DENIED = (
    "check that the credentials in use may do it (s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:ListBucket; for encrypted objects also the key of KMS), and whether the requester pays; "
    "without s3:ListBucket, S3 says this of objects that do not exist, too"
)


def refusal(
    status: int,
    *,
    action: str,
    uri: str,
    code: str = "",
    detail: str = "",
    retry_after: str | None = None,
    generation: str = "",
    is_conditional: bool = False,
    is_completion: bool = False,
) -> StorageError:
    """Return the error for an answer that is not a success.

    Args:
        status: HTTP status.
        action: What was asked, as a verb.
        uri: Of what.
        code: The service's own code, such as `NoSuchKey`; a HEAD has none.
        detail: The service's own words.
        retry_after: Retry-After header.
        generation: Content that a read was pinned to; empty for any.
        is_conditional: A write had a condition.
        is_completion: It was the completion of an upload.
    """
    said, tail = words_of(status, code, detail)
    if status == 412 and generation:
        return NotFoundError(
            f"could not {action} {uri}: it was replaced since it was seen in generation "
            f"{generation}, {said}; list it again",
            uri=uri,
            status=status,
        )
    is_gone = status == 404 and code != "NoSuchBucket" and code != "NoSuchUpload"
    is_conflict = status == 409 and code == "ConditionalRequestConflict" and is_completion
    if is_conditional and (status == 412 or is_gone or is_conflict):
        return PreconditionFailedError(
            f"could not {action} {uri}: it is not what was expected there, {said}{tail}",
            uri=uri,
            status=status,
        )
    if code in _PASSING and status not in TRANSIENT:
        return TransientError(
            f"could not {action} {uri}: the service answered {said}{tail}",
            uri=uri,
            status=status,
            # A conflict is S3's own word that this request lost to another one.
            maybe_done=_PASSING[code] != 409,
        )
    if code == _DIGEST_CODE:
        code = "BadDigest"
    if status in {401, 403} or (status == 400 and code in EXPIRED_CODES | _WRONG_TOKENS):
        return _denial(status, said, tail, action=action, uri=uri, code=code)
    return error_from_status(
        status, action=action, uri=uri, code=code, detail=detail, retry_after=retry_after
    )


def _denial(
    status: int, said: str, tail: str, *, action: str, uri: str, code: str
) -> PermissionDeniedError:
    """Return the error for keys that may not do it, or no longer."""
    if code in EXPIRED_CODES:
        what = "the session of the credentials has ended"
        text = f"{what}, {said}; sign in again, as with 'aws sso login'"
    else:
        text = f"{said}{tail}; {_HINTS.get(code, _DENIED)}"
    return PermissionDeniedError(f"could not {action} {uri}: {text}", uri=uri, status=status)


def deletion_error(code: str, detail: str, *, uri: str) -> StorageError:
    """Return the error of one object that a request for many could not delete."""
    status = _PASSING.get(code) or _STATUSES.get(code, 400)
    return refusal(
        status, action="delete", uri=uri, code=code, detail=detail, is_conditional=status == 412
    )


def error_in_success(fields: Mapping[str, str], *, action: str, uri: str) -> StorageError:
    """Return the error that an answer with status 200 tells in its body.

    A completion and a copy begin their answer before they are done.
    Source: docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html.
    """
    code, detail = fields.get("Code", ""), fields.get("Message", "")
    if not code:
        return TransientError(
            f"could not {action} {uri}: the answer does not tell what became of it",
            uri=uri,
            status=200,
            maybe_done=True,
            is_malformed=True,
        )
    status = _PASSING.get(code) or _STATUSES.get(code, 400)
    return refusal(
        status, action=action, uri=uri, code=code, detail=detail, is_conditional=status == 412
    )
