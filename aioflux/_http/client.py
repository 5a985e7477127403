"""Which client speaks to an origin: the data plane, or the stand-in where a proxy applies."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, Protocol
from urllib.request import getproxies, proxy_bypass

from aioflux._http.pool import Pool

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from aioflux._http.body import Buffer, Destination
    from aioflux._http.connection import Connection, Response, Waiter
    from aioflux._http.origin import Origin
    from aioflux._http.request import FixedHeaders
    from aioflux.options import Timeouts

__all__ = ["RequestPool", "open_pool", "proxy_for"]


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
        fixed: FixedHeaders = ...,
    ) -> Response:
        """Send one request and receive its whole response."""

    def start(
        self,
        origin: Origin,
        target: bytes,
        fields: bytes,
        waiter: Waiter,
        *,
        into: Destination | None,
        max_body_bytes: int | None,
    ) -> Connection | None:
        """Send a GET without a task, if that is possible at once; None where it is not."""

    def end(self, origin: Origin, connection: Connection) -> None:
        """Take back a connection that `start` gave out."""

    async def aclose(self) -> None:
        """Fail what is under way and close every connection."""


def proxy_for(origin: Origin) -> str | None:
    """Return the url of the proxy that an origin is reached through, or None.

    This machine itself (`localhost`, `127.0.0.0/8`, `::1`) is reached without one, as an emulator
    beside a training job has to be, unless NO_PROXY is there and empty: nothing is left out then.

    Environment:
        HTTP_PROXY, HTTPS_PROXY: Proxy for the origin's scheme; in lower case too. A url with user
            name and password is taken.
        NO_PROXY: Hosts that are reached without one: names (`example.com` stands for
            `a.example.com` too), each with or without a port, or `*`; in lower case too. Empty, it
            sends this machine's own traffic through the proxy as well.
    """
    proxy = getproxies().get(origin.scheme)
    left_out = os.environ.get("no_proxy", os.environ.get("NO_PROXY"))
    if not proxy or (left_out != "" and _is_loopback(origin.host)):
        return None
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    if proxy_bypass(f"{host}:{origin.port}"):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_loopback(host: str) -> bool:
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def open_pool(
    origin: Origin,
    *,
    max_connections: int,
    timeouts: Timeouts,
    ssl_context: ssl.SSLContext | None = None,
) -> RequestPool:
    """Choose the client for an origin; nothing is opened before its first request.

    Args:
        origin: The server that the pool is meant for.
        max_connections: Most connections to it.
        timeouts: How long one attempt waits for the network.
        ssl_context: How the server is verified; `default_context()` by default.
    """
    proxy = proxy_for(origin)
    if proxy is not None:
        # Imported late: aiohttp takes 230 ms, and few need it here.
        from aioflux._http.proxy import AiohttpPool

        return AiohttpPool(
            max_connections=max_connections,
            timeouts=timeouts,
            ssl_context=ssl_context,
            proxy=proxy,
        )
    return Pool(max_connections=max_connections, timeouts=timeouts, ssl_context=ssl_context)
