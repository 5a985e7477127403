"""Which client speaks to an origin: the data plane, or the stand-in where a proxy applies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from urllib.request import getproxies, proxy_bypass

from aioflux.http._pool import Pool

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from aioflux._policy import Timeouts
    from aioflux.http._body import Buffer, Destination
    from aioflux.http._connection import Response
    from aioflux.http._origin import Origin

__all__ = ["RequestPool", "open_pool"]


class RequestPool(Protocol):
    """What services need of a client; `Pool.request` says what each argument means."""

    async def request(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        body: Sequence[Buffer] | Buffer | None = None,
        into: Destination | None = None,
        max_body_bytes: int | None = None,
        head_seconds: float | None = None,
    ) -> Response:
        """Send one request and receive its whole response."""

    async def aclose(self) -> None:
        """Fail what is under way and close every connection."""


def open_pool(
    origin: Origin,
    *,
    max_connections: int,
    timeouts: Timeouts,
    ssl_context: ssl.SSLContext | None = None,
) -> RequestPool:
    """Choose the client for an origin; nothing is opened before its first request.

    Environment:
        HTTP_PROXY, HTTPS_PROXY: Proxy for the origin's scheme; in lower case too.
        NO_PROXY: Hosts that are reached without one.

    Args:
        origin: The server that the pool is meant for.
        max_connections: Most connections to it.
        timeouts: How long one attempt waits for the network.
        ssl_context: How the server is verified; by default the system's authorities.
    """
    if origin.scheme in getproxies() and not proxy_bypass(origin.host):
        # Imported late: aiohttp takes 230 ms, and few need it here.
        from aioflux.http._standin import AiohttpPool

        return AiohttpPool(
            max_connections=max_connections, timeouts=timeouts, ssl_context=ssl_context
        )
    return Pool(max_connections=max_connections, timeouts=timeouts, ssl_context=ssl_context)
