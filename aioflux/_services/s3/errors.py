"""Errors for the responses of S3 that `_services/status.py` does not cover. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

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
    """Return the error for an error response; see `error_from_status` and `RequestKind`."""
    texts = {"action": action, "uri": uri, "code": code}
    if status == 412 and generation:
        before = f"it was replaced and no longer has generation {generation}, "
        return response_error(NotFoundError, status, **texts, before=before, advice="list it again")
    texts["detail"] = detail
    is_missing = status == 404 and code != "NoSuchBucket" and code != "NoSuchUpload"
    is_conflict = status == 409 and code == "ConditionalRequestConflict" and is_completion
    if is_conditional and (status == 412 or is_missing or is_conflict):
        before = "its generation is not the expected one, "
        return response_error(PreconditionFailedError, status, **texts, before=before)
    if code in _TRANSIENT_CODES and status not in TRANSIENT:
        # 409: S3 rejected this request because of a concurrent one, so this one changed nothing.
        maybe_done = _TRANSIENT_CODES[code] != 409
        before = "the service returned "
        return response_error(TransientError, status, **texts, before=before, maybe_done=maybe_done)
    if status in {401, 403} or (status == 400 and code in EXPIRED_CODES | _WRONG_TOKENS):
        before = "the credentials have expired, " if code in EXPIRED_CODES else ""
        advice = _ADVICE_BY_CODE.get(code, _ADVICE_IF_DENIED)
        return response_error(PermissionDeniedError, status, **texts, before=before, advice=advice)
    if code == _DIGEST_CODE:
        texts["code"] = "BadDigest"
    return error_from_status(status, **texts, retry_after=retry_after)


def deletion_error(code: str, detail: str, *, uri: str) -> StorageError:
    """Return the error for one object that DeleteObjects did not delete."""
    status = _TRANSIENT_CODES.get(code) or _STATUSES.get(code, 400)
    return service_error(
        status, action="delete", uri=uri, code=code, detail=detail, is_conditional=status == 412
    )


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
    return service_error(
        status, action=action, uri=uri, code=code, detail=detail, is_conditional=status == 412
    )
