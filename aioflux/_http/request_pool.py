"""The transport of an origin: `Pool`, or aiohttp if the environment names a proxy."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, TypeAlias
from urllib.request import getproxies, proxy_bypass

from aioflux._http.pool import Pool

if TYPE_CHECKING:
    import ssl

    from aioflux._http.aiohttp_pool import AiohttpPool
    from aioflux._http.request import Origin
    from aioflux.options import Timeouts

__all__ = ["RequestPool", "open_pool", "proxy_for"]


RequestPool: TypeAlias = "Pool | AiohttpPool"
"""Sends the requests of one service."""


def proxy_for(origin: Origin) -> str | None:
    """Return the url of the proxy for an origin, or None.

    This machine itself (`localhost`, `127.0.0.0/8`, `::1`) is reached directly, as an emulator
    next to a training job has to be, unless NO_PROXY is set and empty: then every host has a proxy.

    Environment:
        HTTP_PROXY, HTTPS_PROXY: Proxy for the origin's scheme; in lower case too. A url with user
            name and password is accepted.
        NO_PROXY: Hosts that are reached directly: names (`example.com` includes
            `a.example.com`), each with or without a port, or `*`; in lower case too. Empty, it
            sends this machine's own traffic through the proxy as well.
    """
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
    """Return the pool for an origin; no connection is opened before the first request."""
    proxy = proxy_for(origin)
    if proxy is None:
        return Pool(max_connections=max_connections, timeouts=timeouts, ssl_context=ssl_context)
    # Imported late: aiohttp takes 230 ms, and few need it here.
    from aioflux._http.aiohttp_pool import AiohttpPool

    return AiohttpPool(
        max_connections=max_connections,
        timeouts=timeouts,
        ssl_context=ssl_context,
        proxy=proxy,
    )
