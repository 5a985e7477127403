"""Options of torchdata's pipes as those of `open_store`, and the stores that they open."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from aioflux import sync
from aioflux._store_cache import StoreCache
from aioflux._values.uri import parse_uri, split_at_bucket
from aioflux.options import S3Access, Timeouts, carries_secret

if TYPE_CHECKING:
    from aioflux.options import StoreOptions

__all__ = ["Stores", "in_region", "with_timeout"]

_UNSET = -1


class Stores:
    """A store for each bucket that urls name, opened on first use.

    Pickles and forks as its settings: each process opens its own.

    Args:
        options: Options of `open_store`.
        region: Region of the buckets; empty to look it up.
    """

    def __init__(self, options: StoreOptions, region: str = "") -> None:
        self._options = options
        self._region = region
        self._stores = StoreCache(partial(_open_store, options, region))

    def __reduce__(self) -> tuple[type[Stores], tuple[StoreOptions, str]]:
        if carries_secret(self._options.get("credentials")):
            raise TypeError(
                "a pipe with credentials= does not pickle: these stay in this process; pass a "
                "module-level function that returns them, or rely on the default credentials"
            )
        return Stores, (self._options, self._region)

    def at(self, url: str) -> tuple[sync.Store, str]:
        """Return the store of a url, and the key or prefix in it.

        Raises:
            TypeError: The url is no string.
            ValueError: It is none that aioflux can open, or a setting has no effect with it.
        """
        bucket, key = split_at_bucket(parse_uri(url))
        return self._stores[bucket], key


def _open_store(options: StoreOptions, region: str, uri: str) -> sync.Store:
    return sync.open_store(uri, **in_region(options, region, uri))


def in_region(options: StoreOptions, region: str, url: str) -> StoreOptions:
    """Return options with the region of the bucket of a url; an empty one is looked up.

    Raises:
        ValueError: The url's service has no regions, or the options have another.
    """
    if not region:
        return options
    if parse_uri(url).scheme != "s3":
        raise ValueError(f"region={region!r} has no effect with {url}")
    given = options.get("credentials")
    access = given if isinstance(given, S3Access) else S3Access(credentials=given)
    if access.region not in {"", region}:
        raise ValueError(f"region={region!r} is not the {access.region!r} of credentials=")
    return cast("StoreOptions", {**options, "credentials": replace(access, region=region)})


def with_timeout(options: StoreOptions, request_timeout_ms: int) -> StoreOptions:
    """Return options with the time that a request may make no progress; -1 for `Timeouts()`.

    Raises:
        ValueError: It is no time, or there are `timeouts` already.
    """
    if request_timeout_ms == _UNSET:
        return options
    if request_timeout_ms <= 0:
        raise ValueError(f"request_timeout_ms must be above 0, or -1, not {request_timeout_ms!r}")
    if options.get("timeouts") is not None:
        raise ValueError("request_timeout_ms and timeouts mean the same; give one of them")
    seconds = request_timeout_ms / 1000
    timeouts = Timeouts(connect_seconds=seconds, progress_seconds=seconds)
    return cast("StoreOptions", {**options, "timeouts": timeouts})
