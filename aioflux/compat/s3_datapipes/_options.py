"""Conversion of torchdata's options to options of `open_store`, and the stores of a pipe."""

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

_UNSET = -1


class Stores:
    """One store for each bucket, opened on first use.

    A pickle contains only the settings. A forked child opens its own stores.

    Args:
        options: Options of `open_store`.
        region: Region of the buckets; if empty, the region of each bucket is looked up.
    """

    def __init__(self, options: StoreOptions, region: str = "") -> None:
        self._options = options
        self._region = region
        self._stores = StoreCache(partial(_open_store, options, region))

    def __reduce__(self) -> tuple[type[Stores], tuple[StoreOptions, str]]:
        if carries_secret(self._options.get("credentials")):
            raise TypeError(
                "a pipe with credentials= cannot be pickled: secrets stay in this process; pass a "
                "module-level function that returns the credentials, or use the default credentials"
            )
        return Stores, (self._options, self._region)

    def locate(self, url: str) -> tuple[sync.Store, str]:
        """Return the store of the url's bucket, and the key or prefix in the bucket.

        Raises:
            TypeError: The url is not a string.
            ValueError: aioflux cannot open the url, or a setting has no effect with the url.
        """
        bucket, key = split_at_bucket(parse_uri(url))
        return self._stores[bucket], key


def _open_store(options: StoreOptions, region: str, uri: str) -> sync.Store:
    return sync.open_store(uri, **in_region(options, region, uri))


def in_region(options: StoreOptions, region: str, url: str) -> StoreOptions:
    """Return options with a region for the bucket of `url`; an empty region changes nothing.

    Raises:
        ValueError: The service of the url has no regions, or the options have another region.
    """
    if not region:
        return options
    if parse_uri(url).scheme != "s3":
        raise ValueError(f"region={region!r} has no effect with {url}")
    credentials = options.get("credentials")
    access = credentials if isinstance(credentials, S3Access) else S3Access(credentials=credentials)
    if access.region not in {"", region}:
        raise ValueError(f"region={region!r} is not the region {access.region!r} of credentials=")
    return cast("StoreOptions", {**options, "credentials": replace(access, region=region)})


def with_timeout(options: StoreOptions, request_timeout_ms: int) -> StoreOptions:
    """Return options with this connect timeout and progress timeout; -1 changes nothing.

    Raises:
        ValueError: The timeout is not valid, or `options` already has `timeouts`.
    """
    if request_timeout_ms == _UNSET:
        return options
    if request_timeout_ms <= 0:
        raise ValueError(f"request_timeout_ms must be above 0, or -1, not {request_timeout_ms!r}")
    if options.get("timeouts") is not None:
        raise ValueError("request_timeout_ms and timeouts set the same limits; pass one of them")
    seconds = request_timeout_ms / 1000
    timeouts = Timeouts(connect_seconds=seconds, progress_seconds=seconds)
    return cast("StoreOptions", {**options, "timeouts": timeouts})
