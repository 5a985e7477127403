"""Account: endpoint and credentials of a client of Google's library."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux.options import StoreOptions

__all__ = ["Account"]


class Account:
    """Endpoint and credentials of a `google.cloud.storage.Client`, or the default ones.

    Pickles into processes that are being started, credentials included. Other pickles, which may
    end up anywhere, carry no secret: they are a TypeError, unless the credentials are anonymous or
    the default ones.
    """

    def __init__(self, storage_client: Any = None) -> None:
        """Copy the endpoint and the credentials of a client.

        Args:
            storage_client: A `google.cloud.storage.Client`; None for the endpoint of GCS, or that
                of the environment variable STORAGE_EMULATOR_HOST, and Application Default
                Credentials.

        Raises:
            TypeError: It is no such client.
        """
        self._endpoint_url: str | None = None
        self._credentials: Any = None
        if storage_client is None:
            return
        try:
            self._endpoint_url = storage_client.api_endpoint
            # The client has no public name for them.
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
                f"the {kind.__name__} of storage_client are pickled for workers that are being "
                "started, and for nothing else; leave storage_client out if the default "
                "credentials are enough"
            )
        return self.__dict__
