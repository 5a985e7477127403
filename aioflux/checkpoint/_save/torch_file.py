"""save and open_writer: a state, or the bytes that torch.save writes, as one object.

    torch.save -> CheckpointWriter: a file whose bytes become one object when it is closed

`save` passes a file that sends memory of the caller's tensors without a copy (borrowed memory):

    torch.save -> _StateFile: a batch of pieces: copies of small pieces, borrowed tensor memory
               -> one crossing to the event loop for each batch
               -> zero-copy writer: parts of many pieces, in parallel

The crc32 of the zip entries is omitted if torch can omit it for a single call: computing it takes
0.33 s for each GB, and the object has a crc32c. Files on disk have no crc32c, and keep the crc32.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Unpack

from aioflux import _bridge
from aioflux._files import WritableFile, WriterContext
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._require_torch import require_torch
from aioflux.options import MIB, TransferOptions
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._save.tensor_memory import TensorMemory
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectWriter, WriteMode

_MIN_BORROWED_BYTES = 16 * 1024
"""Smaller pieces are copied: sending a separate piece costs as much as copying 16 KiB."""
_MAX_COPIED_BYTES = MIB
"""A batch is sent when consecutive copied pieces at its end reach this size."""
_BATCH_BYTES = 8 * MIB
"""A batch is sent when it reaches this size. The crossing to the event loop costs 35-125 us."""


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
    content_encoding: str = "",
    content_disposition: str = "",
    cache_control: str = "",
    storage_class: str = "",
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
        content_encoding: As for `Store.put`, and so the next three.
        content_disposition: Presentation in browsers.
        cache_control: Rules for caches.
        storage_class: Storage class, by its name in the service.
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
        "content_encoding": content_encoding,
        "content_disposition": content_disposition,
        "cache_control": cache_control,
        "storage_class": storage_class,
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


def save(
    state: object,
    uri: str,
    *,
    mode: WriteMode = "overwrite",
    if_generation_match: str | None = None,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[StoreOptions],
) -> ObjectMeta:
    """Save a state to an object in the format of `torch.save`, and return the object's metadata.

    Parts are uploaded while torch.save runs. Tensors of 16 KiB and more in main memory are sent
    without a copy; for other data, at most `TransferOptions.max_buffered_bytes` and 10 MiB are
    buffered. The object becomes visible when it is complete. If an error, a signal or a crash
    prevents that, the earlier object is unchanged.

    Args:
        state: Any object that torch.save accepts. Its tensors must not change during the call.
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        mode: "overwrite" replaces an existing object; "create" fails if the object exists.
        if_generation_match: Replace the object only if it has this generation.
        metadata: User metadata.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as for `aioflux.open_store`.

    Raises:
        StorageError: The object could not be stored; no part of it is visible.
        ValueError: The uri names no object, or a setting has no effect with it.
        TypeError: A part of the state cannot be pickled.
        ModuleNotFoundError: torch is not installed.
    """
    require_torch("aioflux.checkpoint.save")
    from aioflux.checkpoint._save.tensor_memory import TensorMemory, save_by_torch

    root, key = split_object_uri(uri)
    settings = {
        "mode": mode,
        "if_generation_match": if_generation_match,
        "metadata": metadata,
        "zero_copy": True,
    }
    memory = TensorMemory()

    def open_object() -> _bridge.OpenContext[ObjectWriter]:
        if options.get("transfer") is None:
            size = plan_part_size(memory.num_bytes)
            options["transfer"] = TransferOptions(part_size_bytes=size)
        return _bridge.OpenContext(writing(root, key, settings, options))

    with _StateFile(_LazyWriter(open_object), uri, memory) as file:
        save_by_torch(state, file, memory, has_crc32=root.startswith("file:"))
    return file.meta


def plan_part_size(num_bytes: int) -> int:
    """Return the part size for a state: a 32nd of its size in whole MiB, but 5 to 16 MiB.

    Parts are sent in parallel, so with smaller parts a small state uses several connections.
    """
    return min(16 * MIB, max(5 * MIB, -(-num_bytes // (32 * MIB)) * MIB))


class _LazyWriter:
    """An object writer that opens at the first write.

    By then torch.save has pickled the state and all tensors are recorded, so that their size can
    decide the part size.
    """

    def __init__(self, open_object: Callable[[], _bridge.OpenContext[ObjectWriter]]) -> None:
        self._open_object = open_object
        self._context: _bridge.OpenContext[ObjectWriter] | None = None

    @property
    def value(self) -> ObjectWriter:
        return self._open().value

    def exit(self, error: BaseException | None = None, /) -> bool:
        """Complete the upload, or abort it if there is an error."""
        if error is not None and self._context is None:
            return False
        return self._open().exit(error)

    def _open(self) -> _bridge.OpenContext[ObjectWriter]:
        if self._context is None:
            self._context = self._open_object()
        return self._context


class _StateFile(CheckpointWriter):
    """A file that torch.save writes to. It borrows the memory of tensors."""

    def __init__(self, context: _LazyWriter, uri: str, memory: TensorMemory) -> None:
        super().__init__(context, uri)
        self._memory = memory
        self._batch: list[tuple[memoryview, bool]] = []
        """The next pieces to send, and whether each is borrowed."""
        self._batch_bytes = 0

    def _write_view(self, view: memoryview) -> None:
        borrowed = None
        if view.nbytes >= _MIN_BORROWED_BYTES:
            borrowed = self._memory.find(view)
        if borrowed is not None:
            self._add_piece(borrowed, is_borrowed=True)
        elif view.nbytes >= _MAX_COPIED_BYTES:
            self._add_piece(view, is_borrowed=False)
            self._send_buffer()  # now: torch may reuse the memory of the view after this call
        else:
            self._buffer += view
        if self._batch_bytes >= _BATCH_BYTES or len(self._buffer) >= _MAX_COPIED_BYTES:
            self._send_buffer()

    def _add_piece(self, view: memoryview, *, is_borrowed: bool) -> None:
        if self._buffer:
            self._batch.append((memoryview(bytes(self._buffer)), False))
            self._batch_bytes += len(self._buffer)
            self._buffer.clear()
        self._batch.append((view, is_borrowed))
        self._batch_bytes += view.nbytes

    def _send_buffer(self) -> None:
        if self._buffer:
            self._add_piece(memoryview(b""), is_borrowed=False)
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            _bridge.run(_write_all(self._context.value, batch))


async def _write_all(writer: ObjectWriter, batch: list[tuple[memoryview, bool]]) -> None:
    for view, is_borrowed in batch:
        await (writer.write(view) if is_borrowed else writer.write_copy(view))
