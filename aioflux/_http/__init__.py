"""HTTP/1.1 client: bodies are received into the caller's memory and sent from it.

Every service sends its object bytes through `open_pool`. One request is one attempt; retries,
checksums and status codes are the caller's.
"""

from aioflux._http.codec import Headers, ResponseHead
from aioflux._http.connect import SocketTracker, certificate_error_text, default_context
from aioflux._http.connection import Connection, Response, ResponseFuture
from aioflux._http.errors import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    StalledError,
    TransportError,
)
from aioflux._http.pool import Pool
from aioflux._http.request import FixedHeaders, Origin
from aioflux._http.request_pool import RequestPool, open_pool, proxy_for

__all__ = [
    "CertificateError",
    "ConnectError",
    "Connection",
    "ConnectionLostError",
    "FixedHeaders",
    "Headers",
    "Origin",
    "Pool",
    "ProtocolError",
    "RequestPool",
    "Response",
    "ResponseFuture",
    "ResponseHead",
    "SocketTracker",
    "StalledError",
    "TransportError",
    "certificate_error_text",
    "default_context",
    "open_pool",
    "proxy_for",
]
