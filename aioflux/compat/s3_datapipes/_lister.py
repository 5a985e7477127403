"""S3FileLister: urls of the objects below prefixes, `.list_files_by_s3()`, with their metadata."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING, Self, cast

from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import IterDataPipe

from aioflux.compat.s3_datapipes._options import Stores, with_timeout
from aioflux.data._error_policy import worker_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from typing import Unpack

    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions

__all__ = ["ListedUrl", "S3FileLister"]

_log = logging.getLogger("aioflux")


class ListedUrl(str):
    """The url of an object that was listed: a string with the metadata of the object.

    A loader needs no request for the object's size, and reads the generation that was listed. The
    metadata survives shuffles, filters, batches and processes.
    """

    __slots__ = ("meta",)

    meta: ObjectMeta
    """Metadata, as listed; its key is relative to the bucket."""

    def __new__(cls, meta: ObjectMeta) -> Self:
        """Make the url of an object."""
        url = super().__new__(cls, meta.uri)
        url.meta = meta
        return url

    def __reduce__(self) -> tuple[type[ListedUrl], tuple[ObjectMeta]]:
        return ListedUrl, (self.meta,)


@functional_datapipe("list_files_by_s3")
class S3FileLister(IterDataPipe[str]):
    """Yields the url of every object whose url begins with one of the prefixes, sorted by prefix.

    A prefix is a beginning and no directory: `s3://bucket/tr` finds `s3://bucket/train/1`, too. The
    empty objects that consoles put in place of directories, whose keys end with "/", are left out.
    A prefix without any object is a warning of the logger "aioflux".

    The urls are strings with the listed metadata (see `ListedUrl`): a loader reads the generation
    that was listed.

    Args:
        source_datapipe: Urls of prefixes or buckets.
        length: Result of `len`; unknown by default.
        request_timeout_ms: Time in which a response must make progress, in milliseconds; -1 for
            that of `Timeouts()`.
        region: Region of the buckets; by default it is looked up for each. `s3://` only.
        options: As in `aioflux.open_store`.

    Raises:
        ValueError: Settings contradict each other.
    """

    def __init__(
        self,
        source_datapipe: Iterable[str],
        length: int = -1,
        request_timeout_ms: int = -1,
        region: str = "",
        **options: Unpack[StoreOptions],
    ) -> None:
        self.source_datapipe = source_datapipe
        self.length = length
        self._stores = Stores(with_timeout(options, request_timeout_ms), region=region)

    def __iter__(self) -> Iterator[str]:
        """List one prefix after the other."""
        with worker_errors():
            for prefix in self.source_datapipe:
                yield from self._below(prefix)

    def _below(self, prefix: str) -> Iterator[str]:
        store, key = self._stores.at(prefix)
        pages = cast("Generator[Listing, None, None]", store.list_pages(key))
        has_any = False
        with closing(pages):
            for page in pages:
                for meta in page:
                    if meta.size or not meta.key.endswith("/"):
                        has_any = True
                        yield ListedUrl(meta)
        if not has_any:
            _log.warning("there is no object whose url begins with %s", prefix)

    def __len__(self) -> int:
        if self.length < 0:
            raise TypeError(f"{type(self).__name__} instance doesn't have valid length")
        return self.length
