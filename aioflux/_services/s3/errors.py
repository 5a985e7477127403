"""Errors for the error responses of S3, as far as they differ from `status`. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services.status import (
    TRANSIENT,
    error_from_status,
    malformed_response,
    response_error,
)
from aioflux.errors import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXPIRED_CODES", "SKEWED_CODE", "deletion_error", "error_in_success", "service_error"]

EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
"""Codes for expired keys."""
SKEWED_CODE = "RequestTimeTooSkewed"
"""Code for a clock of this machine that is more than 15 minutes off."""

_TRANSIENT_CODES = {
    "InternalError": 500,
    "OperationAborted": 409,
    "ConditionalRequestConflict": 409,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
}
"""Codes that are retried, with their status; the response may have another one."""
_STATUSES = {"AccessDenied": 403, "NoSuchKey": 404, "PreconditionFailed": 412}
_WRONG_TOKENS = frozenset({"InvalidToken"})
_DIGEST_CODE = "XAmzContentSHA256Mismatch"
_HINTS = {
    **dict.fromkeys(EXPIRED_CODES, "sign in again, as with 'aws sso login'"),
    "InvalidAccessKeyId": "no such access key exists; sign in again, or choose another profile",
    "SignatureDoesNotMatch": (
        "the secret key does not belong to the access key, or a proxy in between changes requests"
    ),
    SKEWED_CODE: "this machine's clock is wrong; set it",
    "InvalidToken": "the session token does not belong to the access key; sign in again",
    "AllAccessDisabled": "the bucket is disabled",
    "AccountProblem": "the account has a problem; contact AWS support",
}
_DENIED = (
    "check that the credentials in use may do it (s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:ListBucket; for encrypted objects also the KMS key), and whether the requester pays; "
    "without s3:ListBucket, S3 returns this for objects that do not exist, too"
)


def service_error(
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
    """Return the error for an error response."""
    what = {"action": action, "uri": uri, "code": code}
    if status == 412 and generation:
        before = f"it was replaced since it was listed in generation {generation}, "
        return response_error(NotFoundError, status, **what, before=before, advice="list it again")
    what["detail"] = detail
    is_gone = status == 404 and code != "NoSuchBucket" and code != "NoSuchUpload"
    is_conflict = status == 409 and code == "ConditionalRequestConflict" and is_completion
    if is_conditional and (status == 412 or is_gone or is_conflict):
        before = "its generation is not the expected one, "
        return response_error(PreconditionFailedError, status, **what, before=before)
    if code in _TRANSIENT_CODES and status not in TRANSIENT:
        # 409 means that another request won.
        maybe_done = _TRANSIENT_CODES[code] != 409
        before = "the service returned "
        return response_error(TransientError, status, **what, before=before, maybe_done=maybe_done)
    if status in {401, 403} or (status == 400 and code in EXPIRED_CODES | _WRONG_TOKENS):
        before = "the credentials have expired, " if code in EXPIRED_CODES else ""
        advice = _HINTS.get(code, _DENIED)
        return response_error(PermissionDeniedError, status, **what, before=before, advice=advice)
    if code == _DIGEST_CODE:
        what["code"] = "BadDigest"
    return error_from_status(status, **what, retry_after=retry_after)


def deletion_error(code: str, detail: str, *, uri: str) -> StorageError:
    """Return the error of one object that DeleteObjects did not delete."""
    status = _TRANSIENT_CODES.get(code) or _STATUSES.get(code, 400)
    return service_error(
        status, action="delete", uri=uri, code=code, detail=detail, is_conditional=status == 412
    )


def error_in_success(fields: Mapping[str, str], *, action: str, uri: str) -> StorageError:
    """Return the error in the body of a response with status 200.

    S3 starts the response to a completion or a copy before the operation is done.
    Source: docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html.
    """
    code, detail = fields.get("Code", ""), fields.get("Message", "")
    if not code:
        why = "the response has neither a result nor an error"
        return malformed_response(action, uri, why, status=200)
    status = _TRANSIENT_CODES.get(code) or _STATUSES.get(code, 400)
    return service_error(
        status, action=action, uri=uri, code=code, detail=detail, is_conditional=status == 412
    )
