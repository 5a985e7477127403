"""S3FileLoader: objects as prefetched binary files. Functional form: `.load_files_by_s3()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

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

    from aioflux.options import StoreOptions

_BUFFER_BYTES = 128 * MIB
"""Default of `buffer_size`, the same as in torchdata."""


class _FileWrapper(StreamWrapper):
    """A StreamWrapper that garbage collection does not close.

    Garbage collection may run on the event loop's thread, where `close` would wait for the loop. A
    reader that is dropped without `close` closes itself.
    """

    def __del__(self) -> None:
        """Do nothing."""


@functional_datapipe("load_files_by_s3")
class S3FileLoader(IterDataPipe[tuple[str, Any]]):
    """Pairs `(url, StreamWrapper)`, one for each url, in order; the file is binary and seekable.

    While one object is read, the next objects are prefetched, also across batches. Each DataLoader
    worker prefetches separately. An object that `list_files_by_s3` has listed with a size above
    `buffer_size` is large, and is yielded as a stream, to be read by one thread. Other objects are
    in memory, whole and verified, when they are yielded.

    A worker buffers whole objects up to `TransferOptions.max_in_flight_bytes` (256 MiB), up to
    `buffer_size` of the current large object, and up to `buffer_size` of the next large object.

    Listed urls are read in the listed generation: NotFoundError is raised if the object was
    replaced. Put `sharding_filter` before this pipe to share urls among workers, because this pipe
    loads every url.

    Args:
        source_datapipe: Urls of objects.
        request_timeout_ms: Progress timeout and connect timeout of requests in milliseconds; -1 for
            the defaults of `Timeouts`.
        region: Region of the buckets, for `s3://` only; by default the region of each bucket is
            looked up.
        buffer_size: Bytes of one large object that are prefetched; 128 MiB by default.
        multi_part_download: Whether ranges of `TransferOptions.range_size_bytes` are read in
            parallel; True by default. False reads ranges of `buffer_size`.
        cache: Local directory that stores objects for later epochs and runs; cached objects are not
            requested again. A cache accepts only urls of `list_files_by_s3`, and large objects are
            read whole.
        cache_bytes: Largest size of the cache in bytes; 64 GiB by default.
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
                yield url, _FileWrapper(file, name=url)

    def __len__(self) -> int:
        return len(self.source_datapipe)  # type: ignore[arg-type]  # TypeError without a length
