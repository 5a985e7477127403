"""Errors of the server, with the JSON and XML bodies of GCS."""

from __future__ import annotations

from http import HTTPStatus
from xml.sax.saxutils import escape

import msgspec

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_JSON_REASONS = {
    401: "authError",
    403: "forbidden",
    404: "notFound",
    405: "methodNotAllowed",
    408: "requestTimeout",
    411: "required",
    412: "conditionNotMet",
    413: "uploadTooLarge",
    429: "rateLimitExceeded",
    431: "headersTooLarge",
    503: "backendError",
}
_XML_CODES = {
    400: "InvalidArgument",
    403: "AccessDenied",
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    409: "Conflict",
    411: "MissingContentLength",
    412: "PreconditionFailed",
    413: "EntityTooLarge",
    416: "InvalidRange",
    429: "SlowDown",
    431: "MetadataTooLarge",
    500: "InternalError",
    501: "NotImplemented",
    503: "ServiceUnavailable",
}
_XML_MESSAGES = {
    "NoSuchBucket": "The specified bucket does not exist.",
    "NoSuchKey": "The specified key does not exist.",
    "NoSuchUpload": "The requested upload was not found.",
    "PreconditionFailed": "At least one of the pre-conditions you specified did not hold.",
}


class APIError(Exception):
    """Error that the server sends to the client. The handler of a request raises it.

    Args:
        status: HTTP status.
        reason: Reason in the JSON API, for example `notFound` or `conditionNotMet`.
        message: Message in both APIs.
        code: Error code in the XML API. The default depends on `status`.
        headers: Additional response headers, for example the `Content-Range` of a 416.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.code = code or _XML_CODES.get(status, "InvalidArgument")
        self.headers = headers

    def json_body(self) -> bytes:
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        error = {"code": self.status, "message": self.message, "errors": [detail]}
        return msgspec.json.encode({"error": error})

    def xml_body(self) -> bytes:
        message = _XML_MESSAGES.get(self.code, self.message)
        return (
            "<?xml version='1.0' encoding='UTF-8'?>"
            f"<Error><Code>{escape(self.code)}</Code><Message>{escape(message)}</Message>"
            f"<Details>{escape(self.message)}</Details></Error>"
        ).encode()


def status_error(status: int, headers: tuple[tuple[str, str], ...] = ()) -> APIError:
    """Build the error that GCS sends with a status. Any status from 200 to 999 is allowed."""
    reason = _JSON_REASONS.get(status, "internalError" if status >= 500 else "invalid")
    return APIError(status, reason, _PHRASES.get(status, "Unknown"), headers=headers)


def no_such_bucket(bucket: str) -> APIError:
    return APIError(404, "notFound", "The specified bucket does not exist.", code="NoSuchBucket")


def no_such_object(bucket: str, name: str) -> APIError:
    """Build the 404 for an object or a generation that does not exist."""
    return APIError(404, "notFound", f"No such object: {bucket}/{name}", code="NoSuchKey")


def invalid(message: str) -> APIError:
    """Build the 400 for a malformed request."""
    return APIError(400, "invalid", message)


def condition_not_met() -> APIError:
    """Build the 412 for a precondition that does not hold."""
    message = "At least one of the pre-conditions you specified did not hold."
    return APIError(412, "conditionNotMet", message)


def not_modified() -> APIError:
    """Build the 304 for a `NotMatch` precondition that does not hold. A 304 has no body."""
    return APIError(304, "notModified", "Not Modified")
