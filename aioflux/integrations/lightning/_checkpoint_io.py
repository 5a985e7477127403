"""Lightning plugin that stores, loads and removes checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

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

    Path = str | os.PathLike[str]

_STORE_OPTIONS: Final = frozenset(StoreOptions.__annotations__)
_WRITE_OPTIONS: Final = frozenset({"mode", "if_generation_match", "metadata"})


class AiofluxCheckpointIO(CheckpointIO):
    """Lightning plugin for checkpoints in a bucket: `Trainer(plugins=[AiofluxCheckpointIO()])`.

    A checkpoint is one object, in the format of torch.save. The object becomes visible, whole, when
    the upload is complete; until then an older object of the same name remains. Saves and loads
    compare the checksum with the service's. Paths without a scheme are local files.

    With `background=True`, a save only copies the checkpoint in host memory, and a thread uploads
    the copy. The thread removes an older checkpoint after the newer one is stored; if the newer one
    cannot be stored, the older one is not removed. Failures are raised by the next save, by `wait`,
    and at the end of the trainer, which waits for all pending saves. Do not use Lightning's
    AsyncCheckpointIO instead: it removes the older checkpoint first, copies tensors on their
    accelerator, and has no limit on pending checkpoints.

    Fabric does not call `teardown` of a plugin: call `wait` after the last save.
    """

    def __init__(
        self, *, background: bool = False, max_pending: int = 1, **options: Unpack[StoreOptions]
    ) -> None:
        """Check the settings; sends no request.

        Args:
            background: Return from a save when the checkpoint is copied in host memory.
            max_pending: Maximum number of copies that are not stored yet; a further save waits.
                Each copy needs the size of a checkpoint in host memory. Later saves reuse this
                memory.
            options: Options of `aioflux.open_store`: `transfer`, `retry`, `timeouts`,
                `credentials`, `endpoint_url` and `ssl_context`. Secrets in `credentials` are
                pickled only for processes that Lightning spawns.

        Raises:
            TypeError: There is no such option.
            ValueError: `max_pending` is below 1, or is set without `background`.
        """
        super().__init__()
        if max_pending < 1:
            raise ValueError(f"max_pending must be 1 or more, not {max_pending!r}")
        if max_pending != 1 and not background:
            raise ValueError(f"max_pending={max_pending} has no effect without background=True")
        _reject(set(options) - _STORE_OPTIONS, "AiofluxCheckpointIO", _STORE_OPTIONS)
        self.options: StoreOptions = options
        self._background = BackgroundWriter(max_pending=max_pending) if background else None
        self._memory = MemoryPool()
        # The standalone package lightning_fabric has its own CheckpointIO class.
        if standalone := sys.modules.get("lightning_fabric.plugins.io.checkpoint_io"):
            standalone.CheckpointIO.register(type(self))

    @property
    def is_background(self) -> bool:
        """Return whether a save returns before the checkpoint is stored."""
        return self._background is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(background={self.is_background})"

    def __getstate__(self) -> dict[str, Any]:
        if carries_secret(self.options.get("credentials")) and get_spawning_popen() is None:
            raise TypeError(
                f"{self!r} cannot be pickled: credentials are passed to processes that are being "
                "spawned, and never to another pickle; pass a module-level function that returns "
                "a token, or rely on the default credentials"
            )
        max_pending = self._background.max_pending if self._background else 1
        return {"background": self.is_background, "max_pending": max_pending, **self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Store a checkpoint; with `background`, copy it and submit the upload.

        Args:
            checkpoint: Any state that torch.save accepts.
            path: A uri such as `gs://bucket/run-7/last.ckpt`, or a local path.
            storage_options: A mapping with `mode`, `if_generation_match` and `metadata` of
                `aioflux.checkpoint.save`, and with options of a store, which override the options
                of the plugin. `trainer.save_checkpoint` has an argument of this name.

        Raises:
            StorageError: The checkpoint or, with `background`, an earlier one could not be stored.
            TypeError: `storage_options` is not a mapping, or has an unknown option.
        """
        uri = to_uri(path)
        options = self.merge_options(storage_options, _WRITE_OPTIONS)
        if self._background is None:
            save(checkpoint, uri, **options)
            return
        self._background.wait_for_slot()
        copy = SerializedCopy.of(checkpoint, self._memory)
        self._background.write(uri, partial(_upload, uri, copy, options))

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Wait until all pending saves are stored, then load a checkpoint.

        The ranks of one host that load it at the same time share one download and its memory.

        Args:
            path: A uri, or a local path.
            map_location: As in `torch.load`; by default tensors are loaded to host memory, as
                Lightning expects. The default of `torch.load` would load the tensors of all ranks
                to the accelerator of the rank that saved.
            weights_only: As in `torch.load`; None is its default, True.

        Raises:
            NotFoundError: There is no such checkpoint.
            StorageError: The checkpoint cannot be read, or a pending save has failed.
        """
        self.wait()
        uri = to_uri(path)
        map_location = "cpu" if map_location is None else map_location
        if uri.startswith(("http://", "https://")):
            return TorchCheckpointIO().load_checkpoint(uri, map_location, weights_only)
        # With an accelerator, tensors are copied there and the memory mapping is freed. Without
        # one, the optimizer keeps its loaded tensors, which would keep the whole mapping.
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
        """Remove a checkpoint of one or several objects; a missing checkpoint is not an error.

        With `background`, the removal runs after the pending saves, and is skipped if the last of
        them failed.
        """
        uri = to_uri(path)
        if self._background is None:
            remove_checkpoint(uri, self.options)
        else:
            self._background.remove(uri, partial(remove_checkpoint, uri, self.options))

    def copy_checkpoint(self, source: Path, path: Path) -> None:
        """Copy a checkpoint within its bucket (server-side), after all pending saves.

        Raises:
            NotFoundError: The source does not exist.
        """
        uri = to_uri(path)
        if self._background is None:
            copy_checkpoint(to_uri(source), uri, self.options)
        else:
            self._background.write(uri, partial(copy_checkpoint, to_uri(source), uri, self.options))

    def exists(self, path: Path) -> bool:
        """Return whether a checkpoint is stored, or its save is pending."""
        uri = to_uri(path)
        if self._background is not None and self._background.is_pending(uri):
            return True
        return checkpoint_exists(uri, self.options)

    def find(self, directory: Path, pattern: re.Pattern[str]) -> dict[str, datetime | None]:
        """Return the uris of checkpoints directly below a prefix, each with its time.

        Args:
            directory: The prefix or local directory.
            pattern: Pattern of the names of the checkpoints.
        """
        return find_checkpoints(to_uri(directory), pattern, self.options)

    def run_save(self, uri: str, work: Callable[[], object]) -> None:
        """Run the save of a strategy; with `background`, submit it to the thread.

        Raises:
            CheckpointError: The save failed, without `background`.
        """
        if self._background is None:
            work()
        else:
            self._background.write(uri, work)

    def merge_options(self, storage_options: Any, save_options: frozenset[str]) -> dict[str, Any]:
        """Return the plugin's options, overridden and extended by `storage_options`."""
        if storage_options is None:
            return {**self.options}
        try:
            options = dict(storage_options)
        except (TypeError, ValueError) as exc:
            raise TypeError(
                f"storage_options must be a mapping such as {{'mode': 'create'}}, not "
                f"{storage_options!r}"
            ) from exc
        known = _STORE_OPTIONS | save_options
        _reject(set(options) - known, "storage_options", known)
        return {**self.options, **options}

    def wait(self) -> None:
        """Wait until all pending saves are stored.

        Raises:
            StorageError: A pending save has failed.
        """
        if self._background is not None:
            self._background.wait()

    def teardown(self) -> None:
        """Wait until all pending saves are stored, and free their memory.

        Raises:
            StorageError: A pending save has failed.
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
    store_options = {name: value for name, value in options.items() if name in _STORE_OPTIONS}
    write_options = {name: value for name, value in options.items() if name in _WRITE_OPTIONS}
    async with (
        open_store(store_uri, **store_options) as store,
        store.open_writer(key, zero_copy=True, **write_options) as writer,
    ):
        for view in copy.views():
            await writer.write(view)


def _reject(unknown: set[str], argument: str, known: frozenset[str]) -> None:
    if unknown:
        raise TypeError(
            f"{argument} has no option {', '.join(sorted(unknown))}; its options are "
            f"{', '.join(sorted(known))}"
        )
