"""Public class of the emulator: start and stop of the server, and helpers for tests.

The constructor has more than eight parameters: each configures a different part of the server.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
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

    from aioflux.testing.gcs_server._messages import Buffer

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - clients need one address
_NETWORK = Network()
_LIMITS = Limits()


class GCSServer:
    """Server with the JSON and XML APIs of Google Cloud Storage.

    `with GCSServer() as server` runs the server in a new thread, `async with` on the running event
    loop. The end of the block closes every socket. The helpers `put`, `get`, `keys` and
    `create_bucket` access the objects without HTTP. Any thread may call them.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free port.
        buckets: Buckets to create. Other buckets are missing (404) until they are created.
        root: Directory in which objects survive a restart, even if the process is killed: empty,
            or written by this server. None keeps objects in memory. The server locks the directory
            until it is stopped.
        fsync: With `root`, flush changes to disk before each response, so that they survive a power
            loss.
        state: Objects to serve, for example those of another server. Excludes `root`.
        network: Simulated latency, bandwidth and rate limit. `server.network` can be set later.
        limits: Limits on the size and duration of a request.
        tls: True serves HTTPS with a new certificate, which clients trust through `ca_file`. A
            pair of paths serves HTTPS with this certificate and key, both in PEM.
        md5: False computes the MD5 of an object or part only if the request has an MD5. The ETags
            of the XML API are not MD5s where none was computed. The MD5 takes most of the time of a
            large upload: the server receives bodies of 32 MiB at 0.5 GB/s, without the MD5 at 1
            GB/s.

    Attributes:
        faults: Faults that the server injects. See `faults.add`.
        stats: Counters of requests and bytes by operation.
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
            raise ValueError("root and state exclude each other: pass one of them")
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
        self._certificates = self._load_certificates(tls)
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        for bucket in buckets:
            if bucket not in self.state.buckets:
                self.state.create_bucket(bucket)

    @property
    def url(self) -> str:
        """Root url of the server, the value for `STORAGE_EMULATOR_HOST` or `endpoint_url`."""
        host = _ANY_ADDRESS.get(self.host, self.host)
        scheme = "http" if self._certificates is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def network(self) -> Network:
        """Simulated network. A new value also applies to connections that are already open."""
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
        """PEM file that clients must trust, the value for `SSL_CERT_FILE` or `REQUESTS_CA_BUNDLE`.

        Raises:
            ValueError: The server was created without `tls`.
        """
        return self._tls_files().ca_file

    def client_ssl_context(self) -> ssl.SSLContext:
        """Return an SSL context with which a client trusts only this server.

        Raises:
            ValueError: The server was created without `tls`.
        """
        return self._tls_files().client_context()

    def _tls_files(self) -> Certificates:
        if self._certificates is None:
            raise ValueError("the server has no certificate: pass tls=True to GCSServer")
        return self._certificates

    def _load_certificates(self, tls: bool | tuple[str | Path, str | Path]) -> Certificates | None:
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
        """Serve from a daemon thread, and wait until the server accepts connections.

        Raises:
            RuntimeError: The server is already running.
            OSError: The address cannot be bound.
        """
        if self._listener is not None or self._thread is not None:
            raise RuntimeError("the server is already running")
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
        """Close every socket and end the thread. Do nothing if no thread is running."""
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
            raise RuntimeError("the server is already running")
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    # --- access without HTTP -------------------------------------------------------------

    def create_bucket(self, name: str) -> None:
        """Create an empty bucket. Raise APIError (409) if it exists."""
        with self.state.lock:
            self.state.create_bucket(name)

    def put(self, bucket: str, key: str, data: Buffer) -> int:
        """Write an object and return its generation."""
        with self.state.lock:
            return self.state.put(bucket, key, [bytes(data)]).generation

    def get(self, bucket: str, key: str) -> bytes:
        """Return the bytes of an object. Raise APIError (404) if it is missing."""
        with self.state.lock:
            record = self.state.get(bucket, key)
            return bytes(record.blob.view(0, record.size))

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys of a bucket that begin with `prefix`, in order."""
        with self.state.lock:
            names = self.state.bucket(bucket).objects.ordered()
            return [name for name in names if name.startswith(prefix)]
