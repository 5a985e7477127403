"""A container of Azurite; tests access its objects with plain requests and a SAS token."""

from __future__ import annotations

import http.client
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

import aioflux

if TYPE_CHECKING:
    from tests.servers.azurite import Azurite


def account_sas(server: Azurite) -> str:
    """Return a SAS token with all permissions for containers and blobs, valid for a day."""
    sas: str = generate_account_sas(
        server.account,
        server.key,
        resource_types=ResourceTypes(service=True, container=True, object=True),
        permission=AccountSasPermissions.from_string("rwdlacupx"),
        expiry=datetime.now(UTC) + timedelta(days=1),
    )
    return sas


class AzurePlace:
    """An empty prefix; the options are those of `aioflux.open_store`."""

    def __init__(self, server: Azurite, **options: Any) -> None:
        self._server = server
        self._prefix = f"{uuid.uuid4().hex}/"
        self._sas = account_sas(server)
        self._connection = http.client.HTTPConnection(server.url.partition("://")[2])
        self.endpoint_url = server.url
        self._options = {"endpoint_url": server.url, "credentials": server.key, **options}
        self.credentials = self._options["credentials"]

    @property
    def uri(self) -> str:
        return f"az://{self._server.account}/container/{self._prefix}"

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(self.uri, **self._options, **settings)

    def write(self, key: str, data: bytes) -> None:
        assert self._ask("PUT", key, data)[0] == 201

    def read(self, key: str) -> bytes:
        status, data = self._ask("GET", key)
        if status == 404:
            raise KeyError(key)
        assert status == 200, data
        return data

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        path = f"/{self._server.account}/container/{quote(self._prefix + key)}?{self._sas}"
        headers = {"x-ms-version": "2023-11-03", "x-ms-blob-type": "BlockBlob"}
        for is_last in (False, True):
            try:
                self._connection.request(method, path, body, headers)
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except (http.client.RemoteDisconnected, ConnectionError):
                # The server closes connections that are idle for 5 seconds.
                self._connection.close()
                if is_last:
                    raise
        raise AssertionError

    def close(self) -> None:
        self._connection.close()
