"""Azurite, Microsoft's own emulator of blobs (`azurite-blob`, of npm), in memory.

It is one process of JavaScript: it takes more of the time than its clients do.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perf.access import connection_string
from perf.servers._kept import free_ports, kept
from perf.servers._spec import BUCKET, Server, ServerSpec
from perf.servers._stock import stock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["open_azurite"]

_IN_THE_TESTS = "tests/servers/azurite/node_modules/.bin/azurite-blob"
_ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def open_azurite(spec: ServerSpec) -> Iterator[Server]:
    """Run Azurite for the length of a `with` block, with every object stored.

    Raises:
        RuntimeError: It is missing, or did not start.
    """
    from azure.storage.blob import BlobServiceClient

    directory = Path(tempfile.mkdtemp(prefix="aioflux-perf-"))
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    try:
        with kept(_command(port), directory, url) as pid:
            with BlobServiceClient.from_connection_string(connection_string(url)) as client:
                container = client.create_container(BUCKET)

                def put(key: str, data: bytes) -> None:
                    container.upload_blob(key, data, overwrite=True)

                stock(spec, put)
            yield Server(url=url, pids=(pid,), kind="azurite")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _command(port: int) -> list[str]:
    installed = _ROOT / _IN_THE_TESTS
    program = str(installed) if installed.exists() else shutil.which("azurite-blob")
    if program is None:
        raise RuntimeError("azurite-blob is missing: npm install azurite")
    return [
        program,
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--disableProductStyleUrl",
        "--inMemoryPersistence",
        "--blobHost=127.0.0.1",
        f"--blobPort={port}",
    ]
