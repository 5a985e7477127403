"""Choice of the pool for an origin: `Pool`, or `AiohttpPool` if it is reached through a proxy."""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import TYPE_CHECKING, TypeAlias

from aioflux._http.pool import Pool

if TYPE_CHECKING:
    import ssl

    from aioflux._http.aiohttp_pool import AiohttpPool
    from aioflux._http.request import Origin
    from aioflux.options import Timeouts

__all__ = ["RequestPool", "open_pool", "proxy_for"]


RequestPool: TypeAlias = "Pool | AiohttpPool"
"""Pool of connections for the requests of one service."""


def proxy_for(origin: Origin) -> str | None:
    """Return the url of the proxy for an origin, or None.

    Loopback addresses (`localhost`, `127.0.0.0/8`, `::1`) have no proxy, so that an emulator on the
    same machine is reached. If NO_PROXY is set to an empty string, all hosts have a proxy.

    Environment:
        HTTP_PROXY, HTTPS_PROXY: Url of the proxy for the origin's scheme; may contain a user name
            and password.
        NO_PROXY: Comma-separated hosts without a proxy, each with or without a port, or `*` for all
            hosts. `example.com` includes `a.example.com`.

    All names are also read in lower case.
    """
    # Other systems have settings outside of the environment. urllib.request takes 8 ms to import.
    if sys.platform == "linux" and not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from urllib.request import getproxies, proxy_bypass

    proxy = getproxies().get(origin.scheme)
    no_proxy = os.environ.get("no_proxy", os.environ.get("NO_PROXY"))
    if not proxy or (no_proxy != "" and _is_loopback(origin.host)):
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
    """Return a new pool for an origin. It opens no connection before the first request."""
    proxy = proxy_for(origin)
    if proxy is None:
        return Pool(max_connections=max_connections, timeouts=timeouts, ssl_context=ssl_context)
    # Imported here, because aiohttp takes 230 ms to import, and is needed only with a proxy.
    from aioflux._http.aiohttp_pool import AiohttpPool

    return AiohttpPool(
        max_connections=max_connections,
        timeouts=timeouts,
        ssl_context=ssl_context,
        proxy=proxy,
    )
