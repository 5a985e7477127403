"""Azurite, Microsoft's emulator of Azure Blob Storage (npm's `azurite-blob`), in memory.

Azurite is one JavaScript process. It uses more CPU time than its clients.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perf.access import connection_string
from perf.servers._fill import fill
from perf.servers._spec import BUCKET, Server, ServerSpec
from perf.servers._supervised import free_ports, run_supervised

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["open_azurite"]

_TESTS_PROGRAM = "tests/servers/azurite/node_modules/.bin/azurite-blob"
_ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def open_azurite(spec: ServerSpec) -> Iterator[Server]:
    """Run Azurite during a `with` block, with all objects of the spec.

    Raises:
        RuntimeError: Azurite is not installed, or did not start.
    """
    from azure.storage.blob import BlobServiceClient

    directory = Path(tempfile.mkdtemp(prefix="aioflux-perf-"))
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    try:
        with run_supervised(_command(port), directory, url) as pid:
            with BlobServiceClient.from_connection_string(connection_string(url)) as client:
                container = client.create_container(BUCKET)

                def put(key: str, data: bytes) -> None:
                    container.upload_blob(key, data, overwrite=True)

                fill(spec, put)
            yield Server(url=url, pids=(pid,), kind="azurite")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _command(port: int) -> list[str]:
    installed = _ROOT / _TESTS_PROGRAM
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
