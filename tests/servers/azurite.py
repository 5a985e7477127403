"""Azurite, Microsoft's own emulator of the Blob service (npm; `make test` installs it)."""

from __future__ import annotations

import http.client
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.servers.process import ServerProcess, free_ports

if TYPE_CHECKING:
    from tests.http.authority import Authority

__all__ = ["ACCOUNT", "KEY", "Azurite"]

ACCOUNT = "aiofluxtests"
KEY = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHMsIG5vYm9keSdzIG93biE="  # gitleaks:allow  a test server's own

_PROGRAM = Path(__file__).parent / "azurite" / "node_modules" / ".bin" / "azurite-blob"


def find_azurite() -> str:
    """Return the path of azurite, or skip the test."""
    found = str(_PROGRAM) if _PROGRAM.exists() else shutil.which("azurite-blob")
    if found is None or shutil.which("node") is None:
        pytest.skip("azurite is missing; 'npm ci --prefix tests/servers/azurite' installs it")
    return found


class Azurite(ServerProcess):
    """One server with empty containers, in memory.

    Attributes:
        account: Name of its storage account.
        key: Its key.
    """

    account = ACCOUNT
    key = KEY

    def __init__(
        self, *, containers: tuple[str, ...] = ("container",), tls: Authority | None = None
    ) -> None:
        """Configure a server.

        Args:
            containers: Created at the start.
            tls: Issuer of the certificate of a server with TLS, which then accepts access tokens.
        """
        self._containers = containers
        self._tls = tls
        [port] = free_ports(1)
        self._port = port
        super().__init__(
            self._arguments,
            f"http{'s' if tls else ''}://127.0.0.1:{port}",
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
        )

    def _arguments(self, directory: Path) -> list[str]:
        arguments = [
            find_azurite(),
            "--inMemoryPersistence",
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "--silent",
            "--blobHost=127.0.0.1",
            f"--blobPort={self._port}",
        ]
        if self._tls is not None:
            arguments += [f"--cert={self._tls.leaf_file}", f"--key={self._tls.leaf_file}"]
            arguments.append("--oauth=basic")
        return arguments

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to the server that is not open yet."""
        if self._tls is None:
            return super().connection()
        host = self.url.partition("://")[2]
        return http.client.HTTPSConnection(host, timeout=30, context=self._tls.client_context())

    def is_ready(self, response: http.client.HTTPResponse) -> bool:
        """Return whether a response to `GET /` is one of azurite."""
        return b"Azurite" in (response.getheader("Server") or "").encode()

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            with self.client() as client:
                for name in self._containers:
                    client.create_container(name)
        except BaseException:
            self.stop()
            raise
        return self

    def door(self) -> Any:
        """Return a client of the first container, shared by tests: creating one takes 20 ms."""
        if not hasattr(self, "_door"):
            client = self.closing.enter_context(self.client())
            self._door = client.get_container_client(self._containers[0])
        return self._door

    def client(self) -> Any:
        """Return a client of the SDK: the back door of tests."""
        from azure.storage.blob import BlobServiceClient

        verify = True if self._tls is None else str(self._tls.file)
        return BlobServiceClient(
            f"{self.url}/{ACCOUNT}", credential=KEY, connection_verify=verify, logging_enable=False
        )
