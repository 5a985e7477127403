"""HTTP/1.1 client data plane: from the kernel into the caller's buffer, and back.

Every service sends its object bytes through `open_pool`. One request is one attempt; retries,
checksums and status codes are the caller's.
"""

from aioflux._http.client import RequestPool, open_pool, proxy_for
from aioflux._http.codec import Headers, ResponseHead
from aioflux._http.connection import Connection, Response, Waiter
from aioflux._http.errors import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    StalledError,
    TransportError,
)
from aioflux._http.origin import Origin
from aioflux._http.pool import Pool
from aioflux._http.proxy_sockets import Sockets
from aioflux._http.request import FixedHeaders
from aioflux._http.tls import default_context, distrust

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
