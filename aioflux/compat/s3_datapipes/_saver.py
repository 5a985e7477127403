"""S3FileSaver: writes of objects. Functional form: `.save_files_by_s3()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Unpack

from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import IterDataPipe

from aioflux.compat.s3_datapipes._options import Stores, with_timeout
from aioflux.data._error_policy import worker_errors

if TYPE_CHECKING:
    from aioflux.options import StoreOptions

_MODES = {"wb": "overwrite", "xb": "create"}


@functional_datapipe("save_files_by_s3")
class S3FileSaver(IterDataPipe[str]):
    """Pipe that writes `(name, data)` pairs as objects, and yields the url of each stored object.

    Consecutive objects of one bucket are written in parallel, within the limits of `transfer`, and
    their urls are yielded in the order of completion. An object is stored whole or not at all. If a
    write fails, the iteration ends with an error that names the object. For checkpoints use
    `aioflux.checkpoint`.

    Args:
        source_datapipe: Pairs of a name and bytes, or of a name and an open binary file.
        mode: "wb" overwrites existing objects; "xb" raises an error if an object exists.
        filepath_fn: Returns the url for a name; by default the name is the url.
        request_timeout_ms: Progress timeout and connect timeout of requests in milliseconds; -1 for
            the defaults of `Timeouts`.
        region: Region of the buckets, for `s3://` only; by default the region of each bucket is
            looked up.
        options: As in `aioflux.open_store`.

    Raises:
        ValueError: `mode` is not valid, or settings contradict each other.
    """

    def __init__(
        self,
        source_datapipe: Iterable[tuple[Any, Any]],
        mode: str = "wb",
        filepath_fn: Callable[[Any], str] | None = None,
        request_timeout_ms: int = -1,
        region: str = "",
        **options: Unpack[StoreOptions],
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
        self.source_datapipe = source_datapipe
        self._mode: Any = _MODES[mode]
        self._url_of = filepath_fn
        self._stores = Stores(with_timeout(options, request_timeout_ms), region=region)

    def __iter__(self) -> Iterator[str]:
        """Write the pairs, and yield the url of each object."""
        with worker_errors():
            # Consecutive objects of the same bucket are written in parallel.
            for store, group in groupby(self._objects(), key=lambda entry: entry[0]):
                pairs = ((key, data) for _, key, data in group)
                for batch in store.put_batches(pairs, mode=self._mode):
                    yield from (meta.uri for meta in batch)

    def _objects(self) -> Iterator[tuple[Any, str, Any]]:
        for name, data in self.source_datapipe:
            store, key = self._stores.locate(name if self._url_of is None else self._url_of(name))
            yield store, key, data.read() if hasattr(data, "read") else data

    def __len__(self) -> int:
        return len(self.source_datapipe)  # type: ignore[arg-type]  # TypeError without a length
