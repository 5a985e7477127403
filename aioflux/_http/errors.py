"""Errors of HTTP requests, before services map them to the errors that users see.

    TransportError(Exception)
    ├── ConnectError          name lookup, TCP, proxy or TLS failed; nothing was sent
    │   ├── CertificateError  the server's certificate was rejected
    │   └── ProxyRefusedError the proxy rejected the request for a tunnel
    ├── ConnectionLostError   closed or reset before the response was complete
    ├── StalledError          no progress within the timeout
    └── ProtocolError         the response is not valid HTTP/1.1, or larger than allowed

A response with an error status is a complete response, and raises none of these errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from aioflux._http.codec import ResponseHead

Unconnected: TypeAlias = Literal["", "unreachable", "unknown host"]


class TransportError(Exception):
    """A request failed without a complete response.

    Attributes:
        message: Text that names the operation, the server and the failure.
        num_bytes_received: Number of leading bytes of the body that were written to memory of the
            caller. 0 if the caller passed no memory, or if the status is not 2xx.
        head: Head of the response, if it was received. Its etag allows the next attempt to request
            the rest of the same body.
        request_sent: Whether the server may have received the request.
        unconnected: As in `TransientError`.
    """

    unconnected: Unconnected = ""

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
    """No connection could be opened: name lookup, TCP, proxy or TLS failed, or took too long."""

    unconnected: Unconnected = "unreachable"


class CertificateError(ConnectError):
    """The server's certificate was rejected. Another attempt cannot succeed."""


class ProxyRefusedError(ConnectError):
    """The proxy returned 403 or 407 to CONNECT. Another attempt cannot succeed."""


class ConnectionLostError(TransportError):
    """The connection was closed or reset before the response was complete."""


class StalledError(TransportError):
    """The request made no progress within its timeout."""


class ProtocolError(TransportError):
    """The response is not valid HTTP/1.1, or larger than the caller allows."""
