"""Origins of requests, and rules for their methods and headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from aioflux._http.codec import encode_fields

if TYPE_CHECKING:
    from aioflux.options import Timeouts

RESENDABLE: Final = frozenset((b"GET", b"HEAD"))
"""Methods of requests that the pool sends again if the server had closed the idle connection.

PUT and DELETE are idempotent (RFC 9110, 9.2.2), but not listed. If a PUT with a precondition is
sent again after its response was lost, the service may reject it because the first PUT succeeded.
Only a caller that knows of both requests can distinguish this from a conflict with another writer.
"""
BODY_METHODS: Final = frozenset((b"POST", b"PUT", b"PATCH"))
"""Methods whose requests need `Content-Length: 0` if they have no body (RFC 9110, 8.6)."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_POOL_HEADERS: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection"))


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a server."""

    scheme: str
    """`http` or `https`."""
    host: str
    """Host name or address; an IPv6 address without brackets."""
    port: int
    """TCP port."""

    def __post_init__(self) -> None:
        if self.scheme not in _DEFAULT_PORTS:
            raise ValueError(f"scheme must be http or https, not {self.scheme!r}")
        if not self.host or not self.host.isascii() or not self.host.isprintable():
            raise ValueError(f"host must be an ASCII name or address, not {self.host!r}")
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be between 1 and 65535, not {self.port!r}")

    @classmethod
    def from_url(cls, url: str) -> Origin:
        """Return the origin of an http or https url, without its path and query.

        Raises:
            ValueError: The url has another scheme, a user name or a password, or no valid host or
                port.
        """
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("a url must not contain credentials")
        port = _DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
        return cls(parts.scheme, parts.hostname or "", port)

    @property
    def address(self) -> str:
        """Host and port, also if the port is the default; an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authority(self) -> bytes:
        """Value of the Host header, without the default port of the scheme."""
        default = f":{_DEFAULT_PORTS[self.scheme]}"
        return self.address.removesuffix(default).encode("ascii")

    @property
    def url(self) -> str:
        """The origin as a url without a path."""
        return f"{self.scheme}://{self.authority.decode()}"


def default_head_seconds(method: bytes, timeouts: Timeouts) -> float:
    """Return how long to wait for the first byte of a response, in seconds.

    Writes have a limit of their own, because services process a write before they respond.
    """
    return timeouts.progress_seconds if method in RESENDABLE else timeouts.idle_seconds


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Reject headers that the pool sets itself.

    Raises:
        ValueError: `headers` contains such a header.
    """
    for name, _ in headers:
        if name.lower() in _POOL_HEADERS:
            raise ValueError(f"the pool sets the header {name!r} itself; do not pass it")


class FixedHeaders:
    """Headers of many requests, checked and encoded once.

    Attributes:
        items: Names and values, in the order in which they are sent.
        encoded: The encoded header lines.
    """

    __slots__ = ("encoded", "items")

    def __init__(self, items: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Check and encode the headers.

        Raises:
            ValueError: The pool sets one of the headers, or a name or value is invalid.
        """
        self.items = tuple(items)
        check_headers(self.items)
        self.encoded = encode_fields(self.items)
