"""The plugin with which Lightning stores, loads and removes checkpoints."""

from __future__ import annotations

import sys
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from aioflux import _bridge
from aioflux._values.uri import split_object_uri
from aioflux.checkpoint import load, save
from aioflux.integrations.lightning._background_writer import BackgroundWriter
from aioflux.integrations.lightning._objects import (
    checkpoint_exists,
    copy_checkpoint,
    find_checkpoints,
    remove_checkpoint,
)
from aioflux.integrations.lightning._serialized_copy import MemoryPool, SerializedCopy
from aioflux.integrations.lightning._shared_download import has_other_ranks, load_shared
from aioflux.integrations.lightning._uris import to_uri
from aioflux.options import StoreOptions, carries_secret
from aioflux.store import open_store

if TYPE_CHECKING:
    import os
    import re
    from collections.abc import Callable
    from typing import Unpack

    Path = str | os.PathLike[str]

__all__ = ["AiofluxCheckpointIO"]

_STORE: Final = frozenset(StoreOptions.__annotations__)
_WRITE: Final = frozenset({"mode", "if_generation_match", "metadata"})


class AiofluxCheckpointIO(CheckpointIO):
    """Stores checkpoints in a bucket: `Trainer(plugins=[AiofluxCheckpointIO()])`.

    A checkpoint is one object, in the format of torch.save. It appears whole or not at all, an
    older one of the same name stays until then, and its checksum is compared with the service's, on
    saving and on loading. Paths without a scheme are local files.

    With `background=True`, saving takes as long as copying the checkpoint in host memory; a thread
    does the rest, in order: an older checkpoint is removed when the newer one is stored, and stays
    if that fails. Failures are raised by the next save, by `wait`, and when the trainer ends, which
    waits for all pending saves. Use this in place of Lightning's AsyncCheckpointIO, which removes
    the older checkpoint at once, copies tensors on their accelerator, and accepts any number of
    checkpoints at a time.

    Fabric does not call `teardown` of a plugin: call `wait` after the last save.
    """

    def __init__(
        self, *, background: bool = False, max_pending: int = 1, **options: Unpack[StoreOptions]
    ) -> None:
        """Set how checkpoints are stored; sends no request.

        Args:
            background: Return from a save when the checkpoint is copied in host memory.
            max_pending: Checkpoints that are copied and not yet stored; another save waits. Each
                takes its size in host memory, which is reused for the next.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as `aioflux.open_store`. Credentials are passed to processes that
                Lightning spawns, and to no other pickle.

        Raises:
            TypeError: There is no such option.
            ValueError: `max_pending` is not above 0, or has no effect.
        """
        super().__init__()
        if max_pending < 1:
            raise ValueError(f"max_pending must be 1 or more, not {max_pending!r}")
        if max_pending != 1 and not background:
            raise ValueError(f"max_pending={max_pending} has no effect without background=True")
        _reject(set(options) - _STORE, "AiofluxCheckpointIO", _STORE)
        self.options: StoreOptions = options
        """Options of the stores."""
        self._background = BackgroundWriter(max_pending=max_pending) if background else None
        self._memory = MemoryPool()
        # lightning_fabric, the standalone package, has an equal CheckpointIO of its own.
        if standalone := sys.modules.get("lightning_fabric.plugins.io.checkpoint_io"):
            standalone.CheckpointIO.register(type(self))

    @property
    def is_background(self) -> bool:
        """Return whether saving returns before the checkpoint is stored."""
        return self._background is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(background={self.is_background})"

    def __getstate__(self) -> dict[str, Any]:
        if carries_secret(self.options.get("credentials")) and get_spawning_popen() is None:
            raise TypeError(
                f"{self!r} does not pickle: credentials are passed to processes that are being "
                "started, and to no other pickle; pass a module-level function that returns a "
                "token, or rely on the default credentials"
            )
        max_pending = self._background.max_pending if self._background else 1
        return {"background": self.is_background, "max_pending": max_pending, **self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Store a checkpoint, or copy it to be stored in the background.

        Args:
            checkpoint: Any state that torch.save accepts.
            path: A uri such as `gs://bucket/run-7/last.ckpt`, or a local path.
            storage_options: A mapping of `mode`, `if_generation_match` and `metadata`, as
                `aioflux.checkpoint.save`, and of options of a store in place of those of this
                plugin; `trainer.save_checkpoint` passes it on.

        Raises:
            StorageError: It could not be stored; in the background, an earlier one could not.
            TypeError: `storage_options` is not a mapping of these.
        """
        uri = to_uri(path)
        options = self.merge_options(storage_options, _WRITE)
        if self._background is None:
            save(checkpoint, uri, **options)
            return
        self._background.wait_for_slot()
        copy = SerializedCopy.of(checkpoint, self._memory)
        self._background.write(uri, partial(_upload, uri, copy, options))

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, once all pending saves are stored.

        Ranks of one host that load it at the same time share one download, and one copy of it.

        Args:
            path: A uri, or a local path.
            map_location: As `torch.load`; by default tensors are loaded to host memory, as
                Lightning expects: all ranks would otherwise load to the accelerator of one.
            weights_only: As `torch.load`; None for its default, which is True.

        Raises:
            NotFoundError: There is no such checkpoint.
            StorageError: It cannot be read, or an earlier one could not be stored.
        """
        self.wait()
        uri = to_uri(path)
        map_location = "cpu" if map_location is None else map_location
        if uri.startswith(("http://", "https://")):
            return TorchCheckpointIO().load_checkpoint(uri, map_location, weights_only)
        # With an accelerator, tensors are copied to it and the mapping is freed. Without one, an
        # optimizer would keep its tensors, and with them the mapping of the whole checkpoint.
        is_mapped = torch.accelerator.is_available()
        loaded: dict[str, Any]
        if has_other_ranks() and not uri.startswith("file://"):
            loaded = load_shared(
                uri,
                self.options,
                map_location=map_location,
                weights_only=weights_only,
                mmap=is_mapped,
            )
        else:
            loaded = load(
                uri,
                map_location=map_location,
                weights_only=cast("bool", weights_only),  # None is torch's default
                mmap=is_mapped,
                **self.options,
            )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint of one object or several; a missing one is no error.

        In the background, the removal waits for the save before it; if that failed, the checkpoint
        is kept.
        """
        uri = to_uri(path)
        if self._background is None:
            remove_checkpoint(uri, self.options)
        else:
            self._background.remove(uri, partial(remove_checkpoint, uri, self.options))

    def copy_checkpoint(self, source: Path, path: Path) -> None:
        """Copy a checkpoint on the service, within its bucket, after pending saves.

        Raises:
            NotFoundError: There is no such checkpoint.
        """
        uri = to_uri(path)
        if self._background is None:
            copy_checkpoint(to_uri(source), uri, self.options)
        else:
            self._background.write(uri, partial(copy_checkpoint, to_uri(source), uri, self.options))

    def exists(self, path: Path) -> bool:
        """Return whether there is a checkpoint, stored or pending."""
        uri = to_uri(path)
        if self._background is not None and self._background.is_pending(uri):
            return True
        return checkpoint_exists(uri, self.options)

    def find(self, directory: Path, pattern: re.Pattern[str]) -> list[str]:
        """Return the checkpoints right below a prefix whose names match, as whole uris."""
        return find_checkpoints(to_uri(directory), pattern, self.options)

    def run_save(self, uri: str, work: Callable[[], object]) -> None:
        """Run the save of a strategy, or submit it to the background thread.

        Raises:
            CheckpointError: It failed in the foreground.
        """
        if self._background is None:
            work()
        else:
            self._background.write(uri, work)

    def merge_options(self, storage_options: Any, known: frozenset[str]) -> dict[str, Any]:
        """Return the options of stores with those of one save.

        Raises:
            TypeError: `storage_options` is not a mapping of known options.
        """
        if storage_options is None:
            return {**self.options}
        try:
            given = dict(storage_options)
        except (TypeError, ValueError) as exc:
            raise TypeError(
                f"storage_options must be a mapping such as {{'mode': 'create'}}, not "
                f"{storage_options!r}"
            ) from exc
        _reject(set(given) - _STORE - known, "storage_options", _STORE | known)
        return {**self.options, **given}

    def wait(self) -> None:
        """Wait until all pending saves are stored.

        Raises:
            StorageError: One could not be stored.
        """
        if self._background is not None:
            self._background.wait()

    def teardown(self) -> None:
        """Wait until all pending saves are stored, and free their memory.

        Raises:
            StorageError: One could not be stored.
        """
        try:
            if self._background is not None:
                self._background.close()
        finally:
            self._memory.clear()


def _upload(uri: str, copy: SerializedCopy, options: dict[str, Any]) -> None:
    try:
        _bridge.run(_write(uri, copy, options))
    finally:
        copy.release()


async def _write(uri: str, copy: SerializedCopy, options: dict[str, Any]) -> None:
    store_uri, key = split_object_uri(uri)
    store_options = {name: value for name, value in options.items() if name in _STORE}
    write_options = {name: value for name, value in options.items() if name in _WRITE}
    async with (
        open_store(store_uri, **store_options) as store,
        store.open_writer(key, zero_copy=True, **write_options) as writer,
    ):
        for view in copy.views():
            await writer.write(view)


def _reject(unknown: set[str], what: str, known: frozenset[str]) -> None:
    if unknown:
        raise TypeError(
            f"{what} takes no {', '.join(sorted(unknown))}; it takes {', '.join(sorted(known))}"
        )
