"""Account: which endpoint is asked, and with which credentials."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux.options import StoreOptions

__all__ = ["Account"]


class Account:
    """Endpoint and credentials of a `google.cloud.storage.Client`, or the default ones.

    Goes along to processes that are being started, credentials included, as the locks of
    multiprocessing do. Into other pickles, which may end up anywhere, no secret goes: there it is a
    TypeError, unless the credentials are anonymous or the default ones.
    """

    def __init__(self, storage_client: Any = None) -> None:
        """Take over what a client was built with.

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
        """What `open_store` takes of it."""
        return {"endpoint_url": self._endpoint_url, "credentials": self._credentials}

    def __repr__(self) -> str:
        return f"<Account at {self._endpoint_url or 'the default endpoint'}>"

    def __getstate__(self) -> dict[str, Any]:
        kind = type(self._credentials)
        is_secret = self._credentials is not None and kind.__name__ != "AnonymousCredentials"
        if is_secret and get_spawning_popen() is None:
            raise TypeError(
                f"the {kind.__name__} of storage_client go along to workers that are being "
                "started, and into no other pickle; leave storage_client out where the default "
                "credentials will do"
            )
        return self.__dict__
