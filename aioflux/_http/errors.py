"""Errors of requests on the data plane.

    TransportError(Exception)
    ├── ConnectError          name lookup, TCP or TLS failed; nothing was sent
    │   └── CertificateError  the server's certificate was rejected
    ├── ConnectionLostError   closed or reset before the response was complete
    ├── StalledError          no progress for as long as the timeouts allow
    └── ProtocolError         the response is not valid HTTP/1.1, or larger than allowed

Services map them to the errors that users see. A status code is not an error here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux._http.codec import ResponseHead

__all__ = [
    "CertificateError",
    "ConnectError",
    "ConnectionLostError",
    "ProtocolError",
    "StalledError",
    "TransportError",
]


class TransportError(Exception):
    """A request failed without a complete response.

    Attributes:
        message: The operation, its server and the failure.
        num_bytes_received: Leading bytes of the body that are in the caller's memory; 0 if it
            passed none, or if the status is not 2xx: such a body never goes there.
        head: Head of the response, if received; pins the rest of a broken body to its etag.
        request_sent: Whether the server may have seen the request.
    """

    def __init__(
        self,
        message: str = "",
        *,
        num_bytes_received: int = 0,
        head: ResponseHead | None = None,
        request_sent: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.num_bytes_received = num_bytes_received
        self.head = head
        self.request_sent = request_sent

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), self.__dict__.copy()


class ConnectError(TransportError):
    """No connection could be opened: name lookup, TCP or TLS failed, or took too long."""


class CertificateError(ConnectError):
    """The server's certificate was rejected: another attempt would meet the same one."""


class ConnectionLostError(TransportError):
    """The connection ended before the response was complete."""


class StalledError(TransportError):
    """There was no progress for longer than the timeouts allow."""


class ProtocolError(TransportError):
    """The response is not HTTP/1.1 as the codec accepts it, or larger than the caller allows."""
