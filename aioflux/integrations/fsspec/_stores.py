"""Stores: the stores that one fsspec filesystem reads and writes, and the loops that it runs on."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fsspec import asyn  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from fsspec.registry import registry  # type: ignore[import-untyped]
from fsspec.utils import stringify_path  # type: ignore[import-untyped]

from aioflux import _bridge
from aioflux.integrations.fsspec._options import block_size_option, store_options
from aioflux.integrations.fsspec._paths import place_of, strip
from aioflux.integrations.fsspec._transaction import Transaction
from aioflux.store import open_store, sessions_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable
    from types import TracebackType

    from aioflux.integrations.fsspec._local_files import Gates
    from aioflux.integrations.fsspec._paths import Place
    from aioflux.store import Store

__all__ = ["Stores"]

_SIGNS = {
    "gs": "google-cloud-storage's Blob.generate_signed_url does",
    "s3": "boto3's generate_presigned_url does",
    "az": "azure-storage-blob's generate_blob_sas does",
    "file": "they are for objects that are asked for over HTTP",
    "memory": "they are for objects that are asked for over HTTP",
}
"""Who signs urls, where they are signed."""

_MAX_DIRECTORIES = 256
"""Local directories whose stores are remembered."""

_CLOSE_SECONDS = 5.0
"""Time that connections on fsspec's own loop have to close at the end of the process."""


class Stores(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What an `AiofluxFileSystem` is made of: places, stores and loops."""

    scheme: ClassVar[str]
    """Scheme of the uris that `aioflux.open_store` is given."""

    # The class has its blocking methods (see `_blocking`), so that fsspec adds none to an instance.
    mirror_sync_methods = False
    transaction_type = Transaction

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        batch_size: int | None = None,
        **storage_options: Any,
    ) -> None:
        if self._cached:
            return  # fsspec initialises what it found in its cache once more
        # Told to be asynchronous, fsspec starts no thread of its own.
        super().__init__(asynchronous=True, batch_size=batch_size)
        self.asynchronous = asynchronous
        self.own_loop = loop
        self.default_block_size = block_size_option(storage_options)
        self.account_name = str(storage_options.get("account_name") or "")
        self.options = store_options(self.scheme, storage_options)
        # Refuses what cannot be opened here and now, and knows what does not pickle.
        self._model = open_store(self._any_store(), **self.options)
        self._stores: dict[str, Store] = {}
        self._gates: Gates = weakref.WeakKeyDictionary()
        _systems[id(self)] = self  # equal ones hash alike

    def is_used_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tell whether there are connections of a loop."""
        return any(loop in sessions_of(store) for store in list(self._stores.values()))

    @classmethod
    def _any_store(cls) -> str:
        bucket = {"file": "/", "az": "account/container"}.get(cls.scheme, "bucket")
        return f"{cls.scheme}://{bucket}"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that blocking calls run on."""
        return self.own_loop or _bridge.background_loop()

    @property
    def fsid(self) -> str:
        """What is the same for filesystems that show the same objects."""
        endpoint = self.options.get("endpoint_url") or ""
        if self.scheme == "gs" and not endpoint:
            endpoint = os.environ.get("STORAGE_EMULATOR_HOST", "")
        return f"aioflux+{self.scheme}({endpoint})"

    def __reduce__(self) -> tuple[Any, ...]:
        self._model.__reduce__()  # raises where credentials would be carried along
        reduced: tuple[Any, ...] = super().__reduce__()
        return reduced

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Describe the filesystem for `to_json`, which fsspec can make it of again.

        Raises:
            TypeError: It was given credentials, which are never carried along.
        """
        self._model.__reduce__()
        found: dict[str, Any] = super().to_dict(include_password=include_password)
        return found

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return strip(stringify_path(path), cls.protocol, cls.root_marker)

    def unstrip_protocol(self, name: str) -> str:
        """Return a path with its protocol: the plain one where that is registered for aioflux."""
        path = self._strip_protocol(name)
        plain = registry.get(self.scheme) is type(self)
        return f"{self.scheme if plain else f'aio{self.scheme}'}://{path}"

    def place(self, path: Any) -> Place:
        """Return the store and key that a path means.

        Raises:
            ValueError: It names no bucket, or is not absolute where it has to be, or its account is
                not the `account_name` of the storage options.
        """
        place = place_of(self.scheme, self._strip_protocol(path))
        if self.account_name and place.base.partition("/")[0] != self.account_name:
            raise ValueError(
                f"{path!r} is not of the account {self.account_name!r} that account_name names; "
                f"write {self.account_name}/container/key"
            )
        return place

    def object_place(self, path: Any) -> Place:
        """Return the store and key of what is to be read or written.

        Raises:
            ValueError: The path names no object.
        """
        place = self.place(path)
        if not place.key:
            raise ValueError(f"{path!r} names no object; write {place.base}key")
        return place

    def store(self, place: Place) -> Store:
        """Return the store of a place, opened on first use."""
        store = self._stores.get(place.store)
        if store is None:
            if self.scheme == "file" and len(self._stores) >= _MAX_DIRECTORIES:
                self._stores.clear()  # those in use are held by who uses them
            store = self._stores.setdefault(place.store, open_store(place.store, **self.options))
            _bridge.close_when_dropped(store)
        return store

    async def aclose(self) -> None:
        """Close the connections of the running loop; the next call makes others.

        Only who awaits coroutines on a loop of their own has to, before that loop ends.
        """
        for store in list(self._stores.values()):
            await sessions_of(store).close_current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def invalidate_cache(self, path: str | None = None) -> None:
        """Do nothing: no listing is remembered."""
        super().invalidate_cache(path)

    def sign(self, path: str, expiration: int = 100, **kwargs: Any) -> str:
        """Refuse: aioflux signs no urls.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"aioflux signs no urls, and so none for {path!r}; {_SIGNS[self.scheme]}"
        )

    def as_list(self, path: Any) -> list[str]:
        """Return paths without protocol, of one or several."""
        several: Iterable[Any] = path if isinstance(path, (list, tuple, set)) else [path]
        return [self._strip_protocol(each) for each in several]


_systems: weakref.WeakValueDictionary[int, Stores] = weakref.WeakValueDictionary()


@atexit.register
def _close_on_loop_of_fsspec() -> None:
    """Close connections on the loop of fsspec, where its generic filesystem works, say.

    The bridge closes those on its own loop, and who has a loop closes what is on that.
    """
    loop = asyn.loop[0]
    if loop is None or not loop.is_running():
        return
    for system in list(_systems.values()):
        if system.is_used_on(loop):
            asyn.sync(loop, system.aclose, timeout=_CLOSE_SECONDS)
