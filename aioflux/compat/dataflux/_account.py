"""Account: endpoint and credentials, copied from a client of google-cloud-storage."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux.options import StoreOptions


class Account:
    """Endpoint and credentials of a `google.cloud.storage.Client`, or the defaults.

    The credentials are pickled only for a worker process that is being started. Any other pickle
    could be stored anywhere, and raises TypeError, unless the credentials are anonymous or the
    default credentials.
    """

    def __init__(self, storage_client: Any = None) -> None:
        """Copy the endpoint and the credentials of a client.

        Args:
            storage_client: A `google.cloud.storage.Client`. None for Application Default
                Credentials and the endpoint of GCS, or the endpoint in the environment variable
                STORAGE_EMULATOR_HOST.

        Raises:
            TypeError: `storage_client` is not a client.
        """
        self._endpoint_url: str | None = None
        self._credentials: Any = None
        if storage_client is None:
            return
        try:
            self._endpoint_url = storage_client.api_endpoint
            # The client has no public attribute for its credentials.
            self._credentials = storage_client._credentials  # noqa: SLF001
        except AttributeError as exc:
            raise TypeError(
                "storage_client must be a google.cloud.storage.Client, not "
                f"{type(storage_client).__name__}"
            ) from exc

    @property
    def options(self) -> StoreOptions:
        """Options of `open_store`."""
        return {"endpoint_url": self._endpoint_url, "credentials": self._credentials}

    def __repr__(self) -> str:
        return f"<Account at {self._endpoint_url or 'the default endpoint'}>"

    def __getstate__(self) -> dict[str, Any]:
        kind = type(self._credentials)
        is_secret = self._credentials is not None and kind.__name__ != "AnonymousCredentials"
        if is_secret and get_spawning_popen() is None:
            raise TypeError(
                f"the {kind.__name__} of storage_client are pickled for worker processes that are "
                "being started, and for nothing else; to pickle this object, leave storage_client "
                "out and use the default credentials"
            )
        return self.__dict__
