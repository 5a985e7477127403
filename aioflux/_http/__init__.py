"""HTTP/1.1 client that receives bodies into, and sends bodies from, memory of the caller.

Every service sends requests for object bytes through a pool of `open_pool`. One request is one
attempt. The caller decides on retries, compares checksums, and maps status codes to errors.
"""

from aioflux._http.body import MAX_METADATA_BYTES, HashedMemory
from aioflux._http.codec import FixedHeaders, Headers, Origin, ResponseHead
from aioflux._http.connect import certificate_error_text, default_context
from aioflux._http.connection import Connection, Response, ResponseFuture
from aioflux._http.errors import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    ProxyRefusedError,
    StalledError,
    TransportError,
)
from aioflux._http.pool import Pool, open_pool
from aioflux._http.proxy import Proxy, proxy_for

__all__ = [
    "MAX_METADATA_BYTES",
    "CertificateError",
    "ConnectError",
    "Connection",
    "ConnectionLostError",
    "FixedHeaders",
    "HashedMemory",
    "Headers",
    "Origin",
    "Pool",
    "ProtocolError",
    "Proxy",
    "ProxyRefusedError",
    "Response",
    "ResponseFuture",
    "ResponseHead",
    "StalledError",
    "TransportError",
    "certificate_error_text",
    "default_context",
    "open_pool",
    "proxy_for",
]
