"""S3FileLister: urls of the objects below prefixes, with the metadata of the objects.

Functional form: `.list_files_by_s3()`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Self, Unpack, cast

from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import IterDataPipe

from aioflux.compat.s3_datapipes._options import Stores, with_timeout
from aioflux.data._error_policy import worker_errors

if TYPE_CHECKING:
    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions

_log = logging.getLogger("aioflux")


class ListedUrl(str):
    """The url of a listed object: a string with the metadata of the object.

    A loader needs no request for the size of the object, and reads the listed generation. Shuffles,
    filters, batches and pickles preserve the metadata.
    """

    __slots__ = ("meta",)

    meta: ObjectMeta
    """Metadata from the listing; its key is relative to the bucket."""

    def __new__(cls, meta: ObjectMeta) -> Self:
        """Make the url of an object."""
        url = super().__new__(cls, meta.uri)
        url.meta = meta
        return url

    def __reduce__(self) -> tuple[type[ListedUrl], tuple[ObjectMeta]]:
        return ListedUrl, (self.meta,)


@functional_datapipe("list_files_by_s3")
class S3FileLister(IterDataPipe[str]):
    """The urls of all objects below the given prefixes, in the order of the prefixes.

    A prefix need not end at a "/": `s3://bucket/tr` also finds `s3://bucket/train/1`. Empty objects
    whose keys end with "/" are left out: web consoles create them to show directories. A prefix
    without objects is logged as a warning by the logger "aioflux".

    The urls are strings with metadata (see `ListedUrl`), so that a loader reads the listed
    generation.

    Args:
        source_datapipe: Urls of prefixes or buckets.
        length: Result of `len`; by default `len` raises TypeError.
        request_timeout_ms: Progress timeout and connect timeout of requests in milliseconds; -1 for
            the defaults of `Timeouts`.
        region: Region of the buckets, for `s3://` only; by default the region of each bucket is
            looked up.
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
                yield from self._urls_below(prefix)

    def _urls_below(self, prefix: str) -> Iterator[str]:
        store, key = self._stores.locate(prefix)
        pages = cast("Generator[Listing, None, None]", store.list_pages(key))
        has_objects = False
        with closing(pages):
            for page in pages:
                for meta in page:
                    if meta.size or not meta.key.endswith("/"):
                        has_objects = True
                        yield ListedUrl(meta)
        if not has_objects:
            _log.warning("there is no object whose url begins with %s", prefix)

    def __len__(self) -> int:
        if self.length < 0:
            raise TypeError(f"{type(self).__name__} instance doesn't have valid length")
        return self.length
