"""The server of aioflux.testing in a separate process, for features that nginx lacks.

`python -m perf.servers._embedded '<json>'` prints its url as JSON, and serves until standard input
closes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from perf.servers._spec import BUCKET, Server, ServerSpec, contents
from perf.servers._states import write_state
from perf.work import set_key, state_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

__all__ = ["open_embedded"]

_STOP_SECONDS = 20.0


@contextmanager
def open_embedded(spec: ServerSpec) -> Iterator[Server]:
    """Run the embedded server during a `with` block."""
    command = [sys.executable, "-m", "perf.servers._embedded", json.dumps(asdict(spec))]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603  our own command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                output = errors.read().decode(errors="replace").strip()
                raise RuntimeError(f"the embedded server did not start: {output}")
            yield Server(pids=(process.pid,), kind="embedded", **json.loads(line))
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _server(spec: ServerSpec) -> GCSServer:
    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Network

    network = Network(
        latency_seconds=spec.latency_seconds,
        connection_bytes_per_second=spec.connection_bytes_per_second,
    )
    # MD5 would take most of the time of an upload.
    server = GCSServer(buckets=(BUCKET,), network=network, tls=spec.tls, md5=False)
    _fill(spec, server)
    if spec.fault_rate:
        server.faults.add("objects.media", status=503, probability=spec.fault_rate, seed=1)
        server.faults.add("objects.media", reset=True, probability=spec.fault_rate, seed=2)
    return server


def _fill(spec: ServerSpec, server: GCSServer) -> None:
    """Store all objects of a spec: single objects, sets, and states."""
    for size, count in spec.objects:
        for index in range(count):
            server.put(BUCKET, f"{size}/{index}", contents(size))
    for size, count in spec.sets:
        data = contents(size)
        for index in range(count):
            server.put(BUCKET, set_key(size, count, index), data)
    for dtype, size in spec.states:
        with tempfile.NamedTemporaryFile() as file:
            write_state(dtype, size, Path(file.name))
            server.put(BUCKET, state_key(dtype, size), Path(file.name).read_bytes())


@contextmanager
def _counted(server: GCSServer) -> Iterator[str]:
    """Serve a page with the number of requests, in the format of nginx; yield its url."""
    num_counter_requests = 0

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal num_counter_requests
            num_counter_requests += 1
            # Like nginx, include the requests for this page.
            num_requests = server.stats.total.requests + num_counter_requests
            text = f"server accepts handled requests\n 0 0 {num_requests} \n".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{pages.server_port}/"
        finally:
            pages.shutdown()
            thread.join()


def main() -> None:
    """Run the server that the first argument describes, until standard input closes."""
    from aioflux.testing._process import serve

    values = json.loads(sys.argv[1])
    for name in ("objects", "sets", "states"):
        values[name] = tuple(map(tuple, values[name]))
    spec = ServerSpec(**values)
    server = _server(spec)

    with _counted(server) as counter:

        def ready() -> None:
            ca_file = str(server.ca_file) if spec.tls else ""
            fields = {"url": server.url, "ca_file": ca_file, "counter": counter}
            print(json.dumps(fields), flush=True)

        sys.exit(serve(server, ready, until_stdin_closes=True))


if __name__ == "__main__":
    main()
