"""CheckpointWriter: a binary file whose bytes become one object when it is closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Unpack

from aioflux import _bridge
from aioflux._files import WritableFile, WriterContext
from aioflux._values.uri import split_object_uri
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectWriter, WriteMode


class CheckpointWriter(WritableFile):
    """A file from `open_writer`: writable, not seekable.

    Parts are uploaded during the writes. The file buffers at most 1 MiB and
    `TransferOptions.max_buffered_bytes`. `close`, or the end of a `with` block, completes the
    upload and makes the object visible. The upload is aborted and nothing becomes visible after an
    exception in the `with` block, a failed write or `abort`, or if the file is never closed.
    """

    def __init__(self, context: WriterContext, uri: str) -> None:
        super().__init__(context, uri)
        self.uri = uri
        """Whole uri of the object."""

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the stored object.

        Raises:
            AttributeError: The file is not closed, or the object could not be stored.
        """
        return self._context.value.meta

    def __repr__(self) -> str:
        return f"<CheckpointWriter {self.uri}>"

    def flush(self) -> None:
        """Do nothing: the object becomes visible only on `close`."""
        self._require_open()

    def close(self) -> None:
        """Complete the upload and make the object visible. A second call does nothing.

        Raises:
            StorageError: The object could not be stored, and the upload was aborted. If the abort
                failed, too, the error has a note.
        """
        if self.closed:
            return
        try:
            self._raise_failure()
            self._send_buffer()
            self._context.exit()
        except BaseException as exc:
            self.abort(exc)
            raise
        super().close()

    def abort(self, reason: BaseException | None = None) -> None:
        """Close the file and abort the upload: nothing becomes visible.

        Args:
            reason: Error that receives a note if the upload cannot be aborted.
        """
        if self.closed:
            return
        super().close()
        self._buffer.clear()
        self._context.exit(reason or RuntimeError(f"{self.uri} was aborted"))


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

    Sends no request yet. Use the file as a context manager, so that an exception aborts the upload.

    Args:
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        mode: "overwrite" replaces an existing object; "create" fails if the object exists.
        if_generation_match: Replace the object only if it has this generation.
        content_type: Media type; `application/octet-stream` by default.
        metadata: User metadata.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as for `aioflux.open_store`.

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
    return CheckpointWriter(_bridge.OpenContext(writing(root, key, settings, options)), uri)


@asynccontextmanager
async def writing(
    root: str, key: str, settings: dict[str, Any], options: StoreOptions
) -> AsyncIterator[ObjectWriter]:
    """Open a store and the writer of one object in it; see `Store.open_writer`."""
    async with open_store(root, **options) as store, store.open_writer(key, **settings) as writer:
        yield writer
