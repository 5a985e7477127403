"""nginx as an object store: objects are files on tmpfs, with the urls of both APIs of GCS.

nginx serves reads with sendfile and static headers, and a PUT of a whole object with its WebDAV
module. `api.lua`, inside nginx, handles the other requests (metadata, uploads in parts, the JSON
API); the bytes of uploads are written to files without Lua. For sets of many objects (`sets.lua`),
listings are computed, and all objects have the bytes of one file.
"""

from __future__ import annotations

import base64
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c

from perf.servers._ports import free_ports
from perf.servers._spec import BUCKET, Server, ServerSpec, contents
from perf.servers._states import write_state
from perf.servers._tmpfs import memory_directory
from perf.work import state_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing.gcs_server._tls import Certificates

__all__ = ["INSTALL", "missing", "open_nginx"]

INSTALL = "apt install nginx-light libnginx-mod-http-lua wrk"
_MODULE_DIRECTORIES = ("/usr/lib/nginx/modules", "/usr/lib64/nginx/modules")
_MODULES = ("ndk_http_module.so", "ngx_http_lua_module.so")
_START_SECONDS = 100.0
_MAX_FILES = 20_000
_HERE = Path(__file__).parent

_CONFIGURATION = """\
{modules}
{user}
worker_processes 1;
worker_rlimit_nofile {num_files};
daemon off;
pid {directory}/pid;
error_log {directory}/errors.log warn;
events {{ worker_connections 8192; multi_accept on; }}
http {{
    access_log off;
    server_tokens off;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_timeout 300;
    keepalive_requests 100000000;
    keepalive_time 24h;
    client_max_body_size 0;
    client_body_in_file_only clean;
    client_body_buffer_size 1m;
    client_body_temp_path {directory}/incoming;
    default_type application/octet-stream;
    root {directory}/objects;
    lua_shared_dict state 4m;
    lua_socket_buffer_size 64k;
    init_by_lua_block {{
        DIRECTORY = "{directory}"
        CRC32C_LIBRARY = "{crc32c_library}"
        HERE = "{here}"
        LATENCY_SECONDS, RATE, PIECE_BYTES = {latency_seconds}, {rate}, {piece_bytes}
        KEPT_BYTES = {kept_bytes}
        api = dofile("{here}/api.lua")
    }}
    # A PUT of a whole object has no arguments; one of a part has.
    map $request_method$is_args $is_file {{
        default 0; GET 1; GET? 1; HEAD 1; HEAD? 1; PUT 1;
    }}
    map $request_method $put_etag {{ default ""; PUT '"1"'; }}
    server {{
        listen 127.0.0.1:{port}{ssl} backlog=4096;
{tls}{network}
        location = /.requests {{ access_by_lua_block {{ return }} stub_status; }}
        location /{bucket}/ {{
            if ($is_file = 0) {{ rewrite ^ /.api last; }}
            dav_methods PUT;
            create_full_put_path on;
            add_header ETag $put_etag;
            add_header x-goog-generation 1;
            add_header x-goog-metageneration 1;
            add_header x-goog-stored-content-encoding identity;
            add_header x-goog-storage-class STANDARD;
        }}
{objects}
        location /storage/v1/b/ {{
            if ($arg_alt = media) {{ rewrite ^/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 last; }}
            content_by_lua_block {{ api() }}
        }}
        location /download/storage/v1/b/ {{
            rewrite ^/download/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 last;
        }}
        location /upload/storage/v1/b/ {{ content_by_lua_block {{ api() }} }}
        location = /.api {{ internal; content_by_lua_block {{ api() }} }}
    }}
}}
"""
_TLS = """\
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.3;
"""
_PAUSE = "        access_by_lua_block {{ pause() }}\n"
_PACE = "        limit_rate {rate};\n        sendfile_max_chunk {piece_bytes};\n"
_PIECE_SECONDS = 0.02
"""Duration of the piece that a connection with a limit sends at once. nginx's wait after each piece
ends a little late, so that small pieces would reduce the bandwidth."""
_OBJECTS = """\
        location /{bucket}/{prefix}/ {{
            if ($is_file = 0) {{ rewrite ^ /.api last; }}
            add_header x-goog-generation 1;
            add_header x-goog-metageneration 1;
            add_header x-goog-stored-content-length {size};
            add_header x-goog-stored-content-encoding identity;
            add_header x-goog-hash "crc32c={crc32c}";
            add_header x-goog-storage-class STANDARD;
        }}
"""
_SETS = """\
        location ~ ^/{bucket}/{size}x[0-9]+/[0-9]+\\.bin$ {{
            rewrite ^ /{bucket}/{size}/0 break;
            add_header x-goog-generation 1;
            add_header x-goog-metageneration 1;
            add_header x-goog-stored-content-length {size};
            add_header x-goog-stored-content-encoding identity;
            add_header x-goog-hash "crc32c={crc32c}";
            add_header x-goog-storage-class STANDARD;
        }}
"""
_COMPOSED = """\
        location ~ ^/{bucket}/(?<composed>[a-z]+-composed-objects/.+)$ {{
            if ($is_file = 0) {{ rewrite ^ /.api last; }}
            header_filter_by_lua_block {{ tell_composed(ngx.var.composed) }}
            add_header x-goog-generation 1;
            add_header x-goog-metageneration 1;
            add_header x-goog-stored-content-encoding identity;
            add_header x-goog-storage-class STANDARD;
        }}
"""


def missing() -> str:
    """Return a message about missing parts of nginx and their installation; empty if none."""
    if sys.platform != "linux":
        return f"nginx is supported only on Linux, not on {sys.platform}"
    if _binary() is None:
        return f"nginx is missing ({INSTALL})"
    if _modules() is None:
        return f"nginx lacks its lua module ({INSTALL})"
    if not _crc32c_library():
        return "the C library of google-crc32c is missing"
    return ""


def _binary() -> str | None:
    # On Debian, the PATH of ordinary users does not contain sbin.
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def _modules() -> list[Path] | None:
    for directory in map(Path, _MODULE_DIRECTORIES):
        paths = [directory / name for name in _MODULES]
        if all(path.exists() for path in paths):
            return paths
    return None


def _crc32c_library() -> str:
    """Return the path of the C library in google-crc32c; empty if it has none."""
    root = Path(google_crc32c.__file__).parent.parent / "google_crc32c.libs"
    return next((str(path) for path in sorted(root.glob("libcrc32c*.so*"))), "")


def _encode_crc32c(data: bytes) -> str:
    """Return the crc32c of `data` in the service's format: big-endian, base64."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


Stored = dict[str, tuple[int, str]]
"""Size and crc32c of stored objects, by prefix."""


def _configuration(
    spec: ServerSpec, directory: Path, port: int, certificates: Certificates | None, stored: Stored
) -> str:
    """Return the configuration of one server."""
    tls = network = ""
    rate = spec.connection_bytes_per_second or 0
    piece_bytes = round(rate * _PIECE_SECONDS)
    if certificates is not None:
        tls = _TLS.format(certificate=certificates.certificate_file, key=certificates.key_file)
    if spec.latency_seconds or rate:
        network = _PAUSE.format()
    if rate:
        network += _PACE.format(rate=rate, piece_bytes=piece_bytes)
    return _CONFIGURATION.format(
        modules="\n".join(f"load_module {path};" for path in _modules() or ()),
        # The worker needs the user of this process, which reads its files.
        user="user root;" if os.geteuid() == 0 else "",
        # Each connection needs a file descriptor for its socket and one for its object.
        num_files=min(_MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        directory=directory,
        here=_HERE,
        bucket=BUCKET,
        crc32c_library=_crc32c_library(),
        port=port,
        ssl=" ssl" if tls else "",
        tls=tls,
        network=network,
        latency_seconds=spec.latency_seconds,
        rate=rate,
        piece_bytes=piece_bytes,
        kept_bytes=spec.kept_bytes,
        objects=_locations(spec, stored),
    )


def _locations(spec: ServerSpec, stored: Stored) -> str:
    """Return the locations for objects, states, sets, and composites of sets."""
    found = [
        _OBJECTS.format(bucket=BUCKET, prefix=prefix, size=size, crc32c=crc32c)
        for prefix, (size, crc32c) in stored.items()
    ]
    found += [
        _SETS.format(bucket=BUCKET, size=size, crc32c=stored[str(size)][1])
        for size in sorted({size for size, _ in spec.sets})
    ]
    if spec.sets:
        found.append(_COMPOSED.format(bucket=BUCKET))
    return "".join(found)


def _store(directory: Path, spec: ServerSpec) -> Stored:
    """Write the objects and states of a spec below a directory."""
    stored: Stored = {}
    for size, count in spec.files:
        data = contents(size)
        stored[str(size)] = size, _encode_crc32c(data)
        folder = directory / str(size)
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            (folder / str(index)).write_bytes(data)
    for dtype, size in spec.states:
        key = state_key(dtype, size)
        target = directory / key
        target.parent.mkdir(parents=True, exist_ok=True)
        stored[key.rpartition("/")[0]] = write_state(dtype, size, target)
    return stored


@contextmanager
def open_nginx(spec: ServerSpec) -> Iterator[Server]:
    """Run nginx during a `with` block."""
    parent = memory_directory(spec.num_bytes)
    directory = Path(tempfile.mkdtemp(prefix="aioflux-perf-", dir=parent))
    notes = () if parent else ("objects are on disk: /dev/shm has no room for them",)
    process: subprocess.Popen[bytes] | None = None
    try:
        for name in ("objects", f"objects/{BUCKET}", "incoming", "uploads"):
            (directory / name).mkdir()
        stored = _store(directory / "objects" / BUCKET, spec)
        certificates = _certify(directory) if spec.tls else None
        [port] = free_ports(1)
        text = _configuration(spec, directory, port, certificates, stored)
        (directory / "nginx.conf").write_text(text)
        process = _start(directory)
        assert process.stdout is not None
        pids = _pids(int(process.stdout.readline() or 0), port, directory)
        yield Server(
            url=f"http{'s' if spec.tls else ''}://127.0.0.1:{port}",
            ca_file=str(certificates.ca_file) if certificates else "",
            pids=pids,
            kind="nginx",
            counter="" if spec.tls else f"http://127.0.0.1:{port}/.requests",
            notes=notes,
        )
    finally:
        if process is not None:
            _stop(process)
        shutil.rmtree(directory, ignore_errors=True)


def _certify(directory: Path) -> Certificates:
    from aioflux.testing.gcs_server._tls import make_certificates

    return make_certificates(directory, ["127.0.0.1", "localhost"])


def _start(directory: Path) -> subprocess.Popen[bytes]:
    binary = _binary()
    assert binary is not None
    supervisor = [sys.executable, "-I", "-S", str(_HERE / "_supervisor.py")]
    supervisor += [str(int(signal.SIGTERM)), str(directory)]
    command = [binary, "-p", str(directory), "-c", str(directory / "nginx.conf")]
    command += ["-e", str(directory / "errors.log")]
    return subprocess.Popen(  # noqa: S603  our own command
        [*supervisor, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _pids(master: int, port: int, directory: Path) -> tuple[int, ...]:
    """Wait until nginx listens and its worker runs; return the ids of both."""
    deadline = time.monotonic() + _START_SECONDS
    children = Path(f"/proc/{master}/task/{master}/children")
    while time.monotonic() < deadline:
        if _has_ended(master):
            break
        workers = children.read_text().split()
        if workers and _listens(port):
            return (master, *map(int, workers))
        time.sleep(0.01)
    log = directory / "errors.log"
    output = log.read_text(errors="replace").strip() if log.exists() else ""
    raise RuntimeError(f"nginx did not start; its error log: {output or 'empty'}")


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the supervisor's standard input, which stops nginx, and wait for its exit."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(_START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
