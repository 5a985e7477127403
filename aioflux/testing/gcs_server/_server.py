"""GCSServer: the server with its thread, and helpers for tests.

The constructor has more than eight parameters, because each configures another part of the server;
related ones are one value (`Network`, `Limits`).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Self

import uvloop

from aioflux.testing.gcs_server._app import ROUTES, App
from aioflux.testing.gcs_server._connection import Limits
from aioflux.testing.gcs_server._faults import Faults
from aioflux.testing.gcs_server._file_journal import open_state
from aioflux.testing.gcs_server._listener import Listener, bind
from aioflux.testing.gcs_server._network import Network, NetworkHook
from aioflux.testing.gcs_server._retry_tests import RetryTests
from aioflux.testing.gcs_server._state import State
from aioflux.testing.gcs_server._stats import Stats
from aioflux.testing.gcs_server._tls import Certificates, make_certificates

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from aioflux.testing.gcs_server._messages import Buffer

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - read, not bound
_NETWORK = Network()
_LIMITS = Limits()


class GCSServer:
    """A server that speaks the JSON and XML API of Google Cloud Storage.

    `with GCSServer() as server` serves from a thread of its own; `async with` serves from the
    running loop. Leaving either closes every socket. The helpers (`put`, `get`, `keys`,
    `create_bucket`) bypass HTTP; they take the state's lock, so any thread may call them.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free one.
        buckets: Buckets to create at the start; any other is 404 until it is created.
        root: Directory that keeps objects between runs, even of killed processes; None keeps
            them in memory. One server at a time uses it, from its construction to its stop.
        fsync: Flush to the disk before each response, so that objects survive a loss of power, too.
        state: Objects to serve, instead of an empty state.
        network: Latency, bandwidth and limit on requests; `server.network` changes them later.
        limits: Bounds on a single request.
        tls: True makes a certificate that clients trust through `ca_file`; a pair of paths names
            a certificate and its key, in PEM.
        md5: False leaves out the MD5 of objects and parts unless a request declares one, as GCS
            does for composed objects; ETags are opaque then. The MD5 takes most of the time of
            a large upload: without it 32 MiB bodies arrive at over 1 GB/s, with it at half that.

    Attributes:
        faults: Faults to inject.
        stats: Counters per operation.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        buckets: Iterable[str] = (),
        root: str | Path | None = None,
        fsync: bool = False,
        state: State | None = None,
        network: Network = _NETWORK,
        limits: Limits = _LIMITS,
        tls: bool | tuple[str | Path, str | Path] = False,
        md5: bool = True,
    ) -> None:
        if root is not None and state is not None:
            raise ValueError("root and state exclude each other")
        self.host = host
        self.port = port
        self.state = state or State() if root is None else open_state(Path(root), fsync=fsync)
        self.state.has_md5 = md5
        self.app = App(self.state, limits=limits)
        self.stats = Stats(self.app)
        self.faults = Faults()
        self._network = NetworkHook(network)
        operations = {route.operation for route in ROUTES}
        self._retry_tests = RetryTests(self.app.run, operations)
        self.app.add_routes(self._retry_tests.routes())
        self.app.hooks = (self.stats, self._network, self._retry_tests, self.faults)
        self._certificates = self._certify(tls)
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        for bucket in buckets:
            if bucket not in self.state.buckets:
                self.state.create_bucket(bucket)

    @property
    def url(self) -> str:
        """Root of the server: for `STORAGE_EMULATOR_HOST` and `endpoint_url`."""
        host = _ANY_ADDRESS.get(self.host, self.host)
        scheme = "http" if self._certificates is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def network(self) -> Network:
        """The simulated network; set it to change that of open connections, too."""
        return self._network.network

    @network.setter
    def network(self, network: Network) -> None:
        old, self._network = self._network, NetworkHook(network)
        self.app.hooks = tuple(self._network if hook is old else hook for hook in self.app.hooks)
        if self._listener is not None:
            self._listener.pace(network.connection_bytes_per_second)

    # --- TLS -----------------------------------------------------------------------------

    @property
    def ca_file(self) -> Path:
        """Certificate that clients have to trust, in PEM (`SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`).

        Raises:
            ValueError: The server speaks plain HTTP.
        """
        return self._tls_files().ca_file

    def client_ssl_context(self) -> ssl.SSLContext:
        """Return a context for clients that trusts this server alone.

        Raises:
            ValueError: The server speaks plain HTTP.
        """
        return self._tls_files().client_context()

    def _tls_files(self) -> Certificates:
        if self._certificates is None:
            raise ValueError("the server speaks plain HTTP: pass tls=True")
        return self._certificates

    def _certify(self, tls: bool | tuple[str | Path, str | Path]) -> Certificates | None:
        if tls is False:
            return None
        if tls is not True:
            certificate, key = (Path(path) for path in tls)
            return Certificates(certificate, key, ca_file=certificate)
        directory = tempfile.mkdtemp(prefix="aioflux-tls-")
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        hosts = dict.fromkeys(("localhost", "127.0.0.1", "::1", self.host))
        return make_certificates(Path(directory), hosts)

    # --- start and stop ------------------------------------------------------------------

    def start(self) -> None:
        """Serve from a daemon thread; returns when the socket listens.

        Raises:
            RuntimeError: It is running.
            OSError: The address cannot be bound.
        """
        if self._listener is not None or self._thread is not None:
            raise RuntimeError("the server is running")
        ready = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(self._serve(ready))
            except BaseException as exc:
                failures.append(exc)
            finally:
                ready.set()

        self._thread = threading.Thread(target=run, name="GCSServer", daemon=True)
        self._thread.start()
        ready.wait()
        if failures:
            self._thread.join()
            self._thread = None
            raise failures[0]

    def stop(self) -> None:
        """Close every socket and end the thread, if the server runs."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stopping is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        self._stopping = asyncio.Event()
        await self._open()
        ready.set()
        try:
            await self._stopping.wait()
        finally:
            await self._close()

    async def _open(self) -> None:
        self.state.journal.open()
        loop = self._loop = asyncio.get_running_loop()
        sock = bind(self.host, self.port)
        self.port = sock.getsockname()[1]
        rate = self._network.network.connection_bytes_per_second
        listener = Listener(self.app, loop, sock, bytes_per_second=rate)
        certificates = self._certificates
        await listener.open(None if certificates is None else certificates.server_context())
        self._listener = listener
        self.app.buffers.start()

    async def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
            self.state.journal.close()
            self.app.buffers.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        if self._listener is not None or self._thread is not None:
            raise RuntimeError("the server is running")
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    # --- back door -----------------------------------------------------------------------

    def create_bucket(self, name: str) -> None:
        """Create an empty bucket."""
        with self.state.lock:
            self.state.create_bucket(name)

    def put(self, bucket: str, key: str, data: Buffer) -> int:
        """Write an object and return its generation."""
        with self.state.lock:
            return self.state.put(bucket, key, [bytes(data)]).generation

    def get(self, bucket: str, key: str) -> bytes:
        """Return an object's bytes."""
        with self.state.lock:
            record = self.state.get(bucket, key)
            return bytes(record.blob.view(0, record.size))

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys of a bucket that begin with `prefix`, in order."""
        with self.state.lock:
            names = self.state.bucket(bucket).objects.ordered()
            return [name for name in names if name.startswith(prefix)]
