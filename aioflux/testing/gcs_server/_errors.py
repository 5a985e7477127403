"""The errors of the server, and the JSON and XML bodies in which GCS sends them."""

from __future__ import annotations

from xml.sax.saxutils import escape

import msgspec

_XML_CODES = {
    400: "InvalidArgument",
    403: "AccessDenied",
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    409: "Conflict",
    411: "MissingContentLength",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "SlowDown",
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
    """A refusal that is sent to the caller; any layer of the server raises it.

    Args:
        status: HTTP status.
        reason: Machine-readable word of the JSON API (`notFound`, `conditionNotMet`, ...).
        message: Sentence for people.
        code: Error code of the XML API; by default the usual one of `status`.
        headers: Extra response headers, such as the `Content-Range` of a 416.
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
        """Render the body that the JSON API sends."""
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        error = {"code": self.status, "message": self.message, "errors": [detail]}
        return msgspec.json.encode({"error": error})

    def xml_body(self) -> bytes:
        """Render the body that the XML API sends."""
        message = _XML_MESSAGES.get(self.code, self.message)
        return (
            "<?xml version='1.0' encoding='UTF-8'?>"
            f"<Error><Code>{escape(self.code)}</Code><Message>{escape(message)}</Message>"
            f"<Details>{escape(self.message)}</Details></Error>"
        ).encode()


def no_such_bucket(bucket: str) -> APIError:
    """Build the 404 for a bucket that does not exist."""
    return APIError(404, "notFound", "The specified bucket does not exist.", code="NoSuchBucket")


def no_such_object(bucket: str, name: str) -> APIError:
    """Build the 404 for an object, or a generation of it, that does not exist."""
    return APIError(404, "notFound", f"No such object: {bucket}/{name}", code="NoSuchKey")


def invalid(message: str) -> APIError:
    """Build the 400 for a request that cannot be understood."""
    return APIError(400, "invalid", message)


def condition_not_met() -> APIError:
    """Build the 412 for a precondition that does not hold."""
    message = "At least one of the pre-conditions you specified did not hold."
    return APIError(412, "conditionNotMet", message)


def not_modified() -> APIError:
    """Build the 304 for a request whose `NotMatch` precondition does not hold; it has no body."""
    return APIError(304, "notModified", "Not Modified")
