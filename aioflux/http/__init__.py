"""HTTP/1.1 client data plane: from the kernel into the caller's buffer, and back.

Every service sends its object bytes through `open_pool`. One request is one attempt; retries,
checksums and status codes are the caller's.
"""

from aioflux.http._codec import Headers, ResponseHead
from aioflux.http._connection import Connection, Response, Waiter
from aioflux.http._origin import Origin
from aioflux.http._pool import Pool
from aioflux.http._request import FixedHeaders
from aioflux.http._select import RequestPool, open_pool, proxy_for
from aioflux.http._sockets import Sockets
from aioflux.http._tls import default_context, distrust
from aioflux.http._transport_errors import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    StalledError,
    TransportError,
)

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
    "ResponseHead",
    "Sockets",
    "StalledError",
    "TransportError",
    "Waiter",
    "default_context",
    "distrust",
    "open_pool",
    "proxy_for",
]
