"""The server that a request goes to: scheme, host and port."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Origin"]

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that a request goes to."""

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
        """Origin of an http or https url; its path and query are left out.

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
        """Value of the Host header: the port is left out where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != _DEFAULT_PORTS[self.scheme]:
            host = f"{host}:{self.port}"
        return host.encode("ascii")
