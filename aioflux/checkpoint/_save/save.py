"""save: an object with the bytes of torch.save, sent from the memory of the tensors themselves.

torch.save -> _StateFile: headers are gathered, tensors borrowed -> a batch of pieces, one crossing
           -> a borrowing writer on the event loop: parts of many pieces, in parallel, no copy

The crc32 of the zip's entries is left out if torch has a setting for one context: it takes 0.33 s
for each GB, and the crc32c of the object replaces it. On disk it stays: files have no crc32c.
"""

from __future__ import annotations

import pickle
from contextvars import ContextVar, copy_context
from typing import IO, TYPE_CHECKING

from aioflux import _bridge
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint._require_torch import require_torch
from aioflux.checkpoint._save.writer import CheckpointWriter, writing
from aioflux.options import MIB, TransferOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._save.tensor_memory import TensorMemory
    from aioflux.options import StoreOptions
    from aioflux.store import ObjectWriter, WriteMode

__all__ = ["save", "save_by_torch"]

_LEAST_BORROWED_BYTES = 16 * 1024
"""Smaller views are copied: sending one separately costs as much as copying some 16 KiB."""
_GATHERED_BYTES = MIB
"""Copies that are gathered before they cross to the event loop."""
_BATCH_BYTES = 8 * MIB
"""Tensors that are gathered before they cross: a crossing costs 35-125 us."""


def save(
    state: object,
    uri: str,
    *,
    mode: WriteMode = "overwrite",
    if_generation_match: str | None = None,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[StoreOptions],
) -> ObjectMeta:
    """Write what `torch.save` writes of a state to an object, and return the object's metadata.

    Parts are sent while torch.save runs. Tensors in main memory are sent without a copy; at most
    `TransferOptions.max_buffered_bytes` and 1 MiB are buffered. The object appears whole when it is
    stored; after an error, a signal or the end of the process the old one is unchanged.

    Args:
        state: Anything that torch.save takes. Its tensors must not change before this returns.
        uri: Whole uri of the object, such as `gs://bucket/run-7/model.pt`.
        mode: "overwrite" replaces an object of this name, "create" fails if there is one.
        if_generation_match: Replace only this generation.
        metadata: User metadata.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        StorageError: It could not be stored, and no part of it is visible.
        ValueError: The uri names no object, or a setting has no effect with it.
        ModuleNotFoundError: torch is not installed.
    """
    require_torch("aioflux.checkpoint.save")
    from aioflux.checkpoint._save.tensor_memory import TensorMemory

    root, key = split_object_uri(uri)
    settings = {
        "mode": mode,
        "if_generation_match": if_generation_match,
        "metadata": metadata,
        "zero_copy": True,
    }
    memory = TensorMemory()

    def open_object() -> _bridge.Held[ObjectWriter]:
        if options.get("transfer") is None:
            size = plan_part_size(memory.num_bytes)
            options["transfer"] = TransferOptions(part_size_bytes=size)
        return _bridge.Held(writing(root, key, settings, options))

    with _StateFile(_LazyWriter(open_object), uri, memory) as file:
        save_by_torch(state, file, memory, has_crc32=root.startswith("file:"))
    return file.meta


def plan_part_size(num_bytes: int) -> int:
    """Return the size of the parts of a state, in bytes: a 32nd, from 5 to 16 MiB.

    Each part is sent over its own connection: a state of five parts uses five connections.
    """
    return min(16 * MIB, max(5 * MIB, -(-num_bytes // (32 * MIB)) * MIB))


class _LazyWriter:
    """Opens the object when it is first needed: torch.save has found all tensors by then."""

    def __init__(self, open_object: Callable[[], _bridge.Held[ObjectWriter]]) -> None:
        self._open_object = open_object
        self._held: _bridge.Held[ObjectWriter] | None = None

    @property
    def value(self) -> ObjectWriter:
        """The object under construction."""
        return self._open().value

    def leave(self, error: BaseException | None = None, /) -> bool:
        """Store the object, or with an error abort it."""
        if error is not None and self._held is None:
            return False
        return self._open().leave(error)

    def _open(self) -> _bridge.Held[ObjectWriter]:
        if self._held is None:
            self._held = self._open_object()
        return self._held


class _StateFile(CheckpointWriter):
    """The file that torch.save writes a state to: memory of its tensors is borrowed."""

    def __init__(self, held: _LazyWriter, uri: str, memory: TensorMemory) -> None:
        super().__init__(held, uri)
        self._memory = memory
        self._batch: list[tuple[memoryview, bool]] = []
        """The pieces that cross next, and whether each is borrowed."""
        self._num_batched = 0

    def _write_view(self, view: memoryview) -> None:
        borrowed = None
        if view.nbytes >= _LEAST_BORROWED_BYTES:
            borrowed = self._memory.find(view)
        if borrowed is not None:
            self._gather(borrowed, is_borrowed=True)
        elif view.nbytes >= _GATHERED_BYTES:
            self._gather(view, is_borrowed=False)
            self._send_pending()  # torch may reuse its memory
        else:
            self._pending += view
        if self._num_batched >= _BATCH_BYTES or len(self._pending) >= _GATHERED_BYTES:
            self._send_pending()

    def _gather(self, view: memoryview, *, is_borrowed: bool) -> None:
        if self._pending:
            self._batch.append((memoryview(bytes(self._pending)), False))
            self._pending.clear()
        self._batch.append((view, is_borrowed))
        self._num_batched += view.nbytes

    def _send_pending(self) -> None:
        if self._pending:
            self._gather(memoryview(b""), is_borrowed=False)
        batch, self._batch, self._num_batched = self._batch, [], 0
        if batch:
            _bridge.run(_write_all(self._held.value, batch))


async def _write_all(writer: ObjectWriter, batch: list[tuple[memoryview, bool]]) -> None:
    for view, is_borrowed in batch:
        await (writer.write(view) if is_borrowed else writer.write_copy(view))


def save_by_torch(
    state: object, file: IO[bytes], memory: TensorMemory | None = None, *, has_crc32: bool = False
) -> None:
    """Write a state to a file by torch.save.

    Args:
        state: The state.
        file: The file.
        memory: Notes the storages of the state.
        has_crc32: Whether zip entries have their crc32. They always do in versions of torch whose
            settings apply to all threads.
    """
    import torch
    from torch.utils.serialization import config

    def run() -> None:
        entry = getattr(config, "_config", {}).get("save.compute_crc32")
        if not has_crc32 and isinstance(getattr(entry, "user_override", None), ContextVar):
            config.save.compute_crc32 = False
        torch.save(state, file, pickle_module=memory.pickle_module() if memory else pickle)

    copy_context().run(run)  # so that settings of torch are changed there only
