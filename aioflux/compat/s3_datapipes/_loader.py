"""S3FileLoader: objects as files, prefetched, `.load_files_by_s3()`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.utils.common import StreamWrapper

from aioflux.compat.s3_datapipes._options import Stores, with_timeout
from aioflux.compat.s3_datapipes._prefetch import UrlPrefetcher
from aioflux.data._error_policy import worker_errors
from aioflux.data._store_reader import DEFAULT_CACHE_BYTES, FetchConfig
from aioflux.options import MIB, TransferOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from typing import Unpack

    from aioflux.options import StoreOptions

__all__ = ["S3FileLoader"]

_BUFFER_BYTES = 128 * MIB
"""torchdata's own default of `buffer_size`."""


@functional_datapipe("load_files_by_s3")
class S3FileLoader(IterDataPipe[tuple[str, Any]]):
    """Yields `(url, StreamWrapper)` for each url, in their order: a binary file, seekable.

    While one object is read, the next ones are prefetched, also across batches, and in every
    DataLoader worker by itself: whole objects up to `TransferOptions.max_in_flight_bytes`
    (256 MiB), and of a large one as much as `buffer_size`, with as much of the next large one. So
    a worker holds at most that, twice `buffer_size`, and what the consumer keeps.

    Urls of `list_files_by_s3` are read in the generation that was listed, and fail with
    NotFoundError if the object was replaced since. Those of objects larger than `buffer_size` are
    streams, read by one thread; other objects are in memory, whole and verified, when they are
    yielded. Share the urls among workers by `sharding_filter` before this pipe: it loads all urls
    that it gets.

    Args:
        source_datapipe: Urls of objects.
        request_timeout_ms: Time in which a response must make progress, in milliseconds; -1 for
            that of `Timeouts()`.
        region: Region of the buckets; by default it is looked up for each. `s3://` only.
        buffer_size: Bytes of one large object that are prefetched; 128 MiB by default.
        multi_part_download: Whether an object is read in ranges side by side, of
            `TransferOptions.range_size_bytes` each; it is by default. False sends one request for
            as much as `buffer_size` holds.
        cache: A local directory that keeps objects between epochs and runs: cached objects are not
            requested again. Takes urls of `list_files_by_s3` only, and large objects whole.
        cache_bytes: Size of the cache, at most; 64 GiB by default.
        options: As in `aioflux.open_store`. `transfer` limits the requests in flight.

    Raises:
        ValueError: Settings contradict each other.
    """

    def __init__(
        self,
        source_datapipe: Iterable[str],
        request_timeout_ms: int = -1,
        region: str = "",
        buffer_size: int | None = None,
        multi_part_download: bool | None = None,
        *,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        **options: Unpack[StoreOptions],
    ) -> None:
        if buffer_size is None:
            buffer_size = _BUFFER_BYTES
        if buffer_size <= 0:
            raise ValueError(f"buffer_size must be above 0, not {buffer_size!r}")
        if multi_part_download is False:
            transfer = options.get("transfer") or TransferOptions()
            options["transfer"] = replace(transfer, range_size_bytes=buffer_size)
        self.source_datapipe = source_datapipe
        self._buffer_bytes = buffer_size
        self._stores = Stores(with_timeout(options, request_timeout_ms), region=region)
        self._fetch_config = FetchConfig.with_cache(cache, cache_bytes=cache_bytes)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Load one url after the other."""
        urls = iter(self.source_datapipe)
        prefetcher = UrlPrefetcher(urls, self._stores, self._fetch_config, self._buffer_bytes)
        with worker_errors(), closing(prefetcher.files()) as files:
            for url, file in files:
                yield url, StreamWrapper(file, name=url)

    def __len__(self) -> int:
        return len(self.source_datapipe)  # type: ignore[arg-type]  # or TypeError
