"""Parts of a request before it is sent: its origin, and the rules on its headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from aioflux._http.codec import encode_fields

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.options import Timeouts

__all__ = [
    "BODY_METHODS",
    "RESENDABLE",
    "FixedHeaders",
    "Origin",
    "check_headers",
    "default_head_seconds",
]

RESENDABLE: Final = frozenset((b"GET", b"HEAD"))
"""Methods that are sent again if a kept-alive connection turns out to be closed.

Not PUT and DELETE, although they are idempotent (RFC 9110, 9.2.2): under a precondition, a second
one that follows a first whose response was lost is rejected, and only the caller, who knows that
there were two, can distinguish that from a conflict.
"""
BODY_METHODS: Final = frozenset((b"POST", b"PUT", b"PATCH"))
"""Methods that need `Content-Length: 0` if they have no body (RFC 9110, 8.6)."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_POOL_HEADERS: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection"))


@dataclass(frozen=True, slots=True)
class Origin:
    """The server of a request: scheme, host and port."""

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
            ValueError: The url has another scheme, no host, or a user name in it.
        """
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("a url with credentials in it is not accepted")
        port = _DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
        return cls(parts.scheme, parts.hostname or "", port)

    @property
    def authority(self) -> bytes:
        """Value of the Host header, without the port if it is the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != _DEFAULT_PORTS[self.scheme]:
            host = f"{host}:{self.port}"
        return host.encode("ascii")

    @property
    def url(self) -> str:
        """The url without a path."""
        return f"{self.scheme}://{self.authority.decode()}"


def default_head_seconds(method: bytes, timeouts: Timeouts) -> float:
    """Return the time for a response to start: reads are served from storage, writes take work."""
    return timeouts.progress_seconds if method in RESENDABLE else timeouts.idle_seconds


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Reject the headers that the pool itself sets.

    Raises:
        ValueError: One of them is among `headers`.
    """
    for name, _ in headers:
        if name.lower() in _POOL_HEADERS:
            raise ValueError(f"the header {name!r} is set by the pool")


class FixedHeaders:
    """Headers that many requests have in common, checked and encoded once.

    Attributes:
        items: Names and values, in the order in which they are sent.
        encoded: Their lines.
    """

    __slots__ = ("encoded", "items")

    def __init__(self, items: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Check and encode the headers.

        Raises:
            ValueError: One is set by the pool, or could end its line early.
        """
        self.items = tuple(items)
        check_headers(self.items)
        self.encoded = encode_fields(self.items)
