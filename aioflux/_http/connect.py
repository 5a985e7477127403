"""Opening of connections over TCP, TLS and proxies, and closing of them after a cancellation.

Through a proxy, requests to an http origin are sent to the proxy itself. For an https origin, the
proxy opens a tunnel (CONNECT), and TLS with the origin starts inside of the tunnel.

asyncio leaks the socket of a TLS handshake that is cancelled: closing the transport has no effect
before the handshake, and waits for the peer during the handshake. When a caller is cancelled, a
`Connector` therefore does not cancel the connect task, and closes the connection when it is open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, cast

from aioflux._http.codec import MAX_HEAD_BYTES, encode_head, parse_head
from aioflux._http.connection import Connection
from aioflux._http.errors import (
    CertificateError,
    ConnectError,
    ProtocolError,
    ProxyRefusedError,
)

if TYPE_CHECKING:
    from aioflux._http.codec import Origin
    from aioflux._http.proxy import Proxy
    from aioflux.options import Timeouts

_NO_SUCH_HOST: Final = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
"""Answers of a resolver. If the resolver itself does not answer, the error is EAI_AGAIN."""
_CLOSE_SECONDS: Final = 1.0
"""Time that closing a pool waits for its connect tasks, in seconds."""


def default_context(ca_file: str = "") -> ssl.SSLContext:
    """Return a TLS context that verifies certificates and host names.

    All pools of a process share the context of the same files, because reading the authorities of
    a system takes 10 to 30 ms of CPU time. A replaced file is read again.

    Args:
        ca_file: File of the authorities that are trusted instead of the system's; an empty string
            means the system's.

    Environment:
        SSL_CERT_FILE, SSL_CERT_DIR: File and directory of the authorities that are trusted instead
            of the system's. OpenSSL reads both variables.

    Raises:
        OSError: The file cannot be read, or contains no certificates.
    """
    files = (ca_file, os.environ.get("SSL_CERT_FILE"))
    versions = tuple(map(_version, files))
    return _context(ca_file, *files, os.environ.get("SSL_CERT_DIR"), versions)


def _version(file: str | None) -> tuple[int, ...]:
    """Return values that change when a file is replaced; an empty tuple if there is no file."""
    try:
        status = os.stat(file or "")
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _context(ca_file: str, *_settings: object) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    return context


def certificate_error_text(server: str, exc: BaseException) -> str:
    """Return the message for a rejected certificate: the reason, and advice."""
    reason = getattr(exc, "verify_message", "") or str(exc)
    return (
        f"the certificate of {server} was rejected ({reason}); pass ssl_context= with the "
        "authority that signed it, or name that authority's file in SSL_CERT_FILE"
    )


class Connector:
    """Opener of the connections of one pool. Each connection has its own connect task."""

    def __init__(
        self,
        *,
        timeouts: Timeouts,
        ssl_context: ssl.SSLContext | None,
        proxy: Proxy | None,
        on_lost: Callable[[Connection], None],
        on_abandoned: Callable[[Connection], None],
    ) -> None:
        """Initialize without opening a connection.

        Args:
            timeouts: `connect_seconds` limits the time for name lookup, TCP, proxy and TLS in all.
            ssl_context: TLS settings; `default_context()` if None.
            proxy: Proxy that opens the connections to all origins; None for direct connections.
            on_lost: Called with each connection when its transport is closed.
            on_abandoned: Called with a new connection whose caller was cancelled. The function must
                close it.
        """
        self._connect_seconds = timeouts.connect_seconds
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._on_lost = on_lost
        self._on_abandoned = on_abandoned
        self._tasks: set[asyncio.Task[Connection]] = set()

    async def connect(self, origin: Origin) -> Connection:
        """Open a connection.

        Raises:
            ConnectError: Name lookup, TCP, proxy or TLS failed, or took too long.
        """
        task = asyncio.create_task(self._connect(origin))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._abandon)
            raise

    async def aclose(self) -> None:
        """Wait for the connect tasks, for one second at most, then cancel those still running."""
        if not self._tasks:
            return
        _, pending = await asyncio.wait(tuple(self._tasks), timeout=_CLOSE_SECONDS)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _abandon(self, task: asyncio.Task[Connection]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._on_abandoned(task.result())

    async def _connect(self, origin: Origin) -> Connection:
        proxy = self._proxy
        server = origin if proxy is None else proxy.origin
        is_tls = "https" in (origin.scheme, server.scheme)
        connection = Connection(on_lost=self._on_lost, is_tls=is_tls)
        via = "" if proxy is None else f" through the proxy {server.url}"
        try:
            async with asyncio.timeout(self._connect_seconds):
                if proxy is None or origin.scheme == "http":
                    await self._open(server, connection)
                else:
                    transport = await self._open_tunnel(proxy, origin)
                    server = origin
                    await self._start_tls(transport, connection, origin)
        except TimeoutError as exc:
            limit = self._connect_seconds
            raise ConnectError(f"no connection to {origin.url}{via} within {limit:g} s") from exc
        except ssl.SSLCertVerificationError as exc:
            raise CertificateError(certificate_error_text(server.url, exc)) from exc
        except (OSError, ssl.SSLError, ProtocolError, ProxyRefusedError) as exc:
            is_refused = isinstance(exc, ProxyRefusedError)
            error_class = ProxyRefusedError if is_refused else ConnectError
            error = error_class(f"no connection to {origin.url}{via}: {exc}")
            if isinstance(exc, socket.gaierror) and exc.errno in _NO_SUCH_HOST:
                error.unconnected = "unknown host"
            raise error from exc
        return connection

    async def _open(self, server: Origin, protocol: asyncio.BaseProtocol) -> asyncio.Transport:
        """Connect a protocol to a server, over TLS if the scheme is https."""
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: protocol,
            server.host,
            server.port,
            ssl=self._tls() if server.scheme == "https" else None,
        )
        return transport

    async def _open_tunnel(self, proxy: Proxy, origin: Origin) -> asyncio.Transport:
        """Connect to a proxy, and let it connect to an origin (CONNECT, RFC 9110, 9.3.6)."""
        request = _ConnectRequest(proxy, origin)
        transport = await self._open(proxy.origin, request)
        try:
            _check_connect_response(await request.response)
        except BaseException:
            transport.abort()
            raise
        return transport

    async def _start_tls(
        self, transport: asyncio.Transport, connection: Connection, origin: Origin
    ) -> None:
        """Start TLS with an origin over a tunnel, with `connection` as the protocol."""
        # From now on the connection can abort the transport: bytes may arrive before `start_tls`
        # returns.
        connection.connection_made(transport)
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                transport, connection, self._tls(), server_hostname=origin.host
            )
        except BaseException:
            transport.abort()
            raise
        if encrypted is None or encrypted.is_closing():
            raise ConnectionResetError("the connection was closed during the TLS handshake")
        connection.connection_made(encrypted)

    def _tls(self) -> ssl.SSLContext:
        """Return the TLS context; the default context is made on first use."""
        self._ssl_context = self._ssl_context or default_context()
        return self._ssl_context


class _ConnectRequest(asyncio.Protocol):
    """One CONNECT request to a proxy.

    Attributes:
        response: The bytes that were received, when they contain a whole head or are too many.
    """

    def __init__(self, proxy: Proxy, origin: Origin) -> None:
        target = origin.address.encode()
        lines = b"Host: %b\r\n%b" % (target, proxy.header_line)
        self.response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._request = encode_head(b"CONNECT", target, fixed=lines)
        self._credentials = proxy.credentials
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        is_complete = b"\r\n\r\n" in self._received or len(self._received) > MAX_HEAD_BYTES
        if is_complete and not self.response.done():
            received = bytes(self._received)
            if self._credentials:
                # Errors show the status line, in which a proxy may repeat them.
                received = received.replace(self._credentials, b"***")
            self.response.set_result(received)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.response.done():
            error = exc or ConnectionResetError("the proxy closed the connection")
            self.response.set_exception(error)


def _check_connect_response(received: bytes) -> None:
    """Reject a response to CONNECT after which no TLS handshake can start.

    Raises:
        ProtocolError: The status is not 2xx, or the response is not a head alone.
        ProxyRefusedError: The status is 403 or 407.
    """
    head, separator, rest = received.partition(b"\r\n\r\n")
    status = parse_head(head + separator)[0].status
    if not 200 <= status < 300:
        words = head.partition(b"\r\n")[0].decode("ascii", "replace").split()
        text = f"the proxy returned {' '.join(words[1:])[:100]}"
        if status == 407:
            raise ProxyRefusedError(f"{text}; check user and password in the url of the proxy")
        raise ProxyRefusedError(text) if status == 403 else ProtocolError(text)
    if rest:
        raise ProtocolError("the proxy sent bytes after its response to CONNECT")
