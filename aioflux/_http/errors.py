"""Every error that a request on the data plane raises.

    TransportError(Exception)
    ├── ConnectError          name lookup, TCP or TLS failed; nothing was sent
    │   └── CertificateError  the server's certificate was refused
    ├── ConnectionLostError   closed or reset before the response was whole
    ├── StalledError          nothing moved for as long as the timeouts allow
    └── ProtocolError         the answer is not valid HTTP/1.1, or larger than the caller allows

They are mapped to the errors that users see by the services; status codes are no errors here.
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
    """A request failed below HTTP: no whole response exists.

    Attributes:
        message: What was asked of whom, and what happened.
        num_bytes_received: Leading bytes of the body that are in the caller's memory; 0 where it
            gave none, or where the body is that of a refusal, which never goes there.
        head: Head of the response, where it arrived; pins the rest of a broken body to its etag.
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
    """The server's certificate was refused: another attempt meets the same one."""


class ConnectionLostError(TransportError):
    """The connection ended before the response was whole."""


class StalledError(TransportError):
    """The connection stood still for longer than the timeouts allow."""


class ProtocolError(TransportError):
    """The answer is not HTTP/1.1 as this plane accepts it, or larger than the caller allows."""
