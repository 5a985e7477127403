"""CheckpointWriter: a binary file whose bytes become one object when it is closed."""

from __future__ import annotations

import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aioflux import _bridge
from aioflux._files import Holder, WritableFile
from aioflux._values.uri import split_object_uri
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType
    from typing import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectWriter, WriteMode


__all__ = ["CheckpointWriter", "open_writer", "writing"]


class CheckpointWriter(WritableFile):
    """A file that `open_writer` opened: writable, not seekable.

    Parts are sent while more is written; memory is bounded by `TransferOptions.max_buffered_bytes`
    and 1 MiB. The object becomes visible, whole, when `close` returns, as at the end of a `with`
    block. An exception in the block, an error of a write, `abort`, or a file that is dropped or
    left open at the end of the process publish nothing and abort the upload.
    """

    def __init__(self, held: Holder, uri: str) -> None:
        super().__init__(held, uri)
        self.uri = uri
        """Whole uri of the object."""

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the object that was stored.

        Raises:
            AttributeError: It is not stored.
        """
        return self._held.value.meta

    def __repr__(self) -> str:
        return f"<CheckpointWriter {self.uri}>"

    def flush(self) -> None:
        """Do nothing: what was written becomes visible on `close`, all at once."""
        self._require_open()

    def close(self) -> None:
        """Store what was written and make it visible. Closing twice does nothing.

        Raises:
            StorageError: It could not be stored: nothing is visible and nothing stays.
        """
        if self.closed:
            return
        try:
            self._raise_failure()
            self._send_pending()
            self._held.leave()
        except BaseException as exc:
            self.abort(exc)
            raise
        super().close()

    def abort(self, reason: BaseException | None = None) -> None:
        """Close the file and drop what was written: nothing becomes visible.

        Args:
            reason: Receives a note if the upload cannot be aborted.
        """
        if self.closed:
            return
        super().close()
        self._pending.clear()
        self._held.leave(reason or RuntimeError(f"{self.uri} was aborted"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self.abort(error)
        # torch.save turns the error of a write, also Ctrl-C, into a RuntimeError about positions in
        # a zip file.
        if self._failure is not None and error is not self._failure:
            raise self._failure from error

    def __del__(self) -> None:
        # A file closes itself here, which would publish. `Held` aborts instead.
        if not self.closed:
            warnings.warn(
                f"{self.uri} was never closed: nothing of it is stored; open it with `with`",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )


def open_writer(
    uri: str,
    *,
    mode: WriteMode = "overwrite",
    if_generation_match: str | None = None,
    content_type: str = "",
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[StoreOptions],
) -> CheckpointWriter:
    """Open one object for writing, for `torch.save(state_dict, file)`.

    Sends nothing yet. Use it as a context manager, so that an exception publishes nothing.

    Args:
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        mode: "overwrite" replaces an object of this name, "create" fails if there is one.
        if_generation_match: Replace only this generation.
        content_type: Media type; `application/octet-stream` by default.
        metadata: User metadata.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        ValueError: The uri names no object, or a setting has no effect with it.
    """
    root, key = split_object_uri(uri)
    settings = {
        "mode": mode,
        "if_generation_match": if_generation_match,
        "content_type": content_type,
        "metadata": metadata,
    }
    return CheckpointWriter(_bridge.Held(writing(root, key, settings, options)), uri)


@asynccontextmanager
async def writing(
    root: str, key: str, settings: dict[str, Any], options: StoreOptions
) -> AsyncIterator[ObjectWriter]:
    """Return a context with the writer of one object; see `Store.open_writer`."""
    async with open_store(root, **options) as store, store.open_writer(key, **settings) as writer:
        yield writer
