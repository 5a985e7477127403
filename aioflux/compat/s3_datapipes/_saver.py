"""S3FileSaver: writes objects as they arrive, `.save_files_by_s3()`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import IterDataPipe

from aioflux.compat.s3_datapipes._options import Stores, with_timeout
from aioflux.data._error_policy import worker_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Unpack

    from aioflux.options import StoreOptions

__all__ = ["S3FileSaver"]

_MODES = {"wb": "overwrite", "xb": "create"}


@functional_datapipe("save_files_by_s3")
class S3FileSaver(IterDataPipe[str]):
    """Writes each `(name, data)` as an object, and yields its url when it is stored.

    Many are in flight at once, within the limits of `transfer`, so urls come in the order in which
    objects are stored. An object appears whole or not at all; the first that cannot be written ends
    the iteration with an error that names it. For checkpoints use `aioflux.checkpoint`.

    Args:
        source_datapipe: Pairs of a name and bytes, or an open binary file.
        mode: "wb" overwrites; with "xb" an object must be new.
        filepath_fn: Makes the url of a name; by default the name is the url.
        request_timeout_ms: Time in which a request must make progress, in milliseconds; -1 for
            that of `Timeouts()`.
        region: Region of the buckets; by default it is looked up for each. `s3://` only.
        options: As in `aioflux.open_store`.

    Raises:
        ValueError: Settings contradict each other.
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
        """Write the pairs."""
        with worker_errors():
            # Consecutive objects of one bucket are written in parallel.
            for store, group in groupby(self._located(), key=lambda located: located[0]):
                pairs = ((key, data) for _, key, data in group)
                for meta in store.put_many(pairs, mode=self._mode):
                    yield meta.uri

    def _located(self) -> Iterator[tuple[Any, str, Any]]:
        for name, data in self.source_datapipe:
            store, key = self._stores.at(name if self._url_of is None else self._url_of(name))
            yield store, key, data.read() if hasattr(data, "read") else data

    def __len__(self) -> int:
        return len(self.source_datapipe)  # type: ignore[arg-type]  # or TypeError
