"""Proxies: the address of a proxy, and which origins are reached through one."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote_to_bytes, urlsplit

from aioflux._http.codec import Origin, encode_fields

_WITH_PORT = re.compile(r"(\[.*\]|[^:]*):(\d+)")


@dataclass(frozen=True, slots=True)
class Proxy:
    """Address of a proxy, and the credentials that are sent to it."""

    origin: Origin
    """Scheme, host and port. If the scheme is `https`, the proxy is reached over TLS."""
    credentials: bytes = field(default=b"", repr=False)
    """User name and password as in the header Proxy-Authorization, or empty."""

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the proxy of an http or https url, which may contain a user name and a password.

        Raises:
            ValueError: The url has another scheme, or no valid host or port. The message may
                contain parts of the url.
        """
        parts = urlsplit(url)
        address = parts.netloc.rpartition("@")[2]
        origin = Origin.from_url(f"{parts.scheme}://{address}")
        if parts.username is None:
            return cls(origin)
        names = (parts.username, parts.password or "")
        return cls(origin, b64encode(b":".join(map(unquote_to_bytes, names))))

    @property
    def header_line(self) -> bytes:
        """Encoded header line with the credentials; empty without credentials."""
        if not self.credentials:
            return b""
        return encode_fields([(b"Proxy-Authorization", b"Basic " + self.credentials)])


def proxy_for(origin: Origin) -> str | None:
    """Return the url of the proxy for an origin, or None.

    Loopback addresses (`localhost`, `127.0.0.0/8`, `::1`) have no proxy, so that an emulator on the
    same machine is reached. If NO_PROXY is set to an empty string, all hosts have a proxy.

    Environment:
        HTTP_PROXY, HTTPS_PROXY: Url of the proxy for the origin's scheme, `http://host:port` or
            `https://host:port`; may contain a user name and password, percent-encoded.
        ALL_PROXY: Url of the proxy for origins whose scheme has no proxy of its own.
        NO_PROXY: Hosts without a proxy, separated by commas or spaces, or `*` for all hosts. A host
            is a name, an address or a network in CIDR notation (`10.0.0.0/8`); names and addresses
            may have a port. `example.com`, `.example.com` and `*.example.com` all mean this host
            and the hosts below it. A dot at the end of a name is ignored.

    All names are also read in lower case.

    Raises:
        ValueError: The variable does not contain the url of an http or https proxy.
    """
    # Other systems have settings outside of the environment. urllib.request takes 8 ms to import.
    if sys.platform == "linux" and not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    name = origin.scheme if proxies.get(origin.scheme) else "all"
    proxy = proxies.get(name)
    no_proxy = os.environ.get("no_proxy", os.environ.get("NO_PROXY"))
    if not proxy or (no_proxy != "" and _is_loopback(origin.host)):
        return None
    entries = (no_proxy or "").replace(",", " ").split()
    if any(_matches(entry, origin) for entry in entries) or proxy_bypass(origin.address):
        return None
    url = proxy if "://" in proxy else f"http://{proxy}"
    try:
        Proxy.from_url(url)
    except ValueError:
        # Without the url and the cause, which may contain a password.
        raise ValueError(
            f"{name.upper()}_PROXY must be the url of a proxy, http://host:port or "
            "https://host:port; proxies of other kinds, such as SOCKS, are not supported"
        ) from None
    return url


def _matches(entry: str, origin: Origin) -> bool:
    """Return whether an entry of NO_PROXY includes an origin."""
    host = origin.host.lower().rstrip(".")
    with_port = _WITH_PORT.fullmatch(entry)
    name, port = with_port.groups() if with_port else (entry, "")
    if port and int(port) != origin.port:
        return False
    name = name.lower().removeprefix("*.").strip("[].")
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
    except ValueError:  # a name
        return bool(name) and (host == name or host.endswith(f".{name}"))


def _is_loopback(host: str) -> bool:
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
