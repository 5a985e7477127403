"""AiofluxCheckpointIO: the plugin by which Lightning stores, loads and removes checkpoints."""

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
from aioflux.integrations.lightning._background_writer import Background
from aioflux.integrations.lightning._objects import copy, exists, find, remove
from aioflux.integrations.lightning._shared_download import has_company, load_together
from aioflux.integrations.lightning._staged_checkpoint import Slabs, Staged
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
    older one of its name stays until then, and its checksum is compared with the service's, on
    saving and on loading. Paths without a scheme mean files of the local disk.

    With `background=True`, saving takes as long as copying the checkpoint in host memory; the rest
    is done behind it, in order: an older checkpoint is removed when the newer one is stored, and
    not where it cannot be. What fails is raised by the next save, by `wait`, and when the trainer
    ends, which waits for all that is under way. Use this in place of Lightning's AsyncCheckpointIO,
    which removes the older checkpoint at once, copies tensors on their accelerator, and takes any
    number of checkpoints at a time.

    Fabric never tells a plugin that it ends: call `wait` after the last save.
    """

    def __init__(
        self, *, background: bool = False, max_pending: int = 1, **options: Unpack[StoreOptions]
    ) -> None:
        """Choose how checkpoints are stored; sends nothing yet.

        Args:
            background: Return from a save when the checkpoint is copied in host memory.
            max_pending: Checkpoints that are copied and not yet stored; another save waits. Each
                takes its size in host memory, which is used again for the next.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as `aioflux.open_store`. Credentials go along to processes that
                Lightning spawns, and into no other pickle.

        Raises:
            TypeError: An option is not known.
            ValueError: `max_pending` is not above 0, or has no effect.
        """
        super().__init__()
        if max_pending < 1:
            raise ValueError(f"max_pending must be 1 or more, not {max_pending!r}")
        if max_pending != 1 and not background:
            raise ValueError(f"max_pending={max_pending} has no effect without background=True")
        _refuse(set(options) - _STORE, "AiofluxCheckpointIO", _STORE)
        self.options: StoreOptions = options
        """What stores are opened with."""
        self._background = Background(max_pending=max_pending) if background else None
        self._slabs = Slabs()
        # pytorch_lightning has a CheckpointIO of its own, which looks the same.
        if standalone := sys.modules.get("lightning_fabric.plugins.io.checkpoint_io"):
            standalone.CheckpointIO.register(type(self))

    @property
    def is_background(self) -> bool:
        """Whether saving returns before the checkpoint is stored."""
        return self._background is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(background={self.is_background})"

    def __getstate__(self) -> dict[str, Any]:
        if carries_secret(self.options.get("credentials")) and get_spawning_popen() is None:
            raise TypeError(
                f"{self!r} does not pickle: credentials go along to processes that are being "
                "started, and into no other pickle; pass a module-level function that returns a "
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
            checkpoint: What torch.save takes.
            path: A uri such as `gs://bucket/run-7/last.ckpt`, or a path of the local disk.
            storage_options: A mapping of `mode`, `if_generation_match` and `metadata`, as
                `aioflux.checkpoint.save`, and of the options of a store in place of those of this
                plugin. It is what `trainer.save_checkpoint` passes on.

        Raises:
            StorageError: It could not be stored, or, in the background, an earlier one.
            TypeError: `storage_options` is no mapping of these.
        """
        uri = to_uri(path)
        options = self.merged(storage_options, _WRITE)
        if self._background is None:
            save(checkpoint, uri, **options)
            return
        self._background.make_room()
        staged = Staged.of(checkpoint, self._slabs)
        self._background.write(uri, partial(_upload, uri, staged, options))

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, once all that is under way is stored.

        Ranks of one host that load it at the same time share one download, and one copy of it.

        Args:
            path: A uri, or a path of the local disk.
            map_location: As `torch.load`; by default tensors come to host memory, as Lightning
                expects it: a checkpoint of one accelerator would otherwise fill it from all ranks.
            weights_only: As `torch.load`; None for its default, which is True.

        Raises:
            NotFoundError: There is no such checkpoint.
            StorageError: It cannot be read, or an earlier one could not be stored.
        """
        self.wait()
        uri = to_uri(path)
        place: Any = "cpu" if map_location is None else map_location
        if uri.startswith(("http://", "https://")):
            return TorchCheckpointIO().load_checkpoint(uri, place, weights_only)
        # An accelerator gets its own copy, and the mapping goes. An optimizer in host memory would
        # keep what it is given, and with it the mapping of the whole checkpoint.
        is_mapped = torch.accelerator.is_available()
        loaded: dict[str, Any]
        if has_company() and not uri.startswith("file://"):
            loaded = load_together(
                uri, self.options, map_location=place, weights_only=weights_only, mmap=is_mapped
            )
        else:
            loaded = load(
                uri,
                map_location=place,
                weights_only=cast("bool", weights_only),  # None is torch's default
                mmap=is_mapped,
                **self.options,
            )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, also one of several objects; one that is not there is no error.

        In the background it is done in its turn, and not where the save before it failed.
        """
        uri = to_uri(path)
        if self._background is None:
            remove(uri, self.options)
        else:
            self._background.remove(uri, partial(remove, uri, self.options))

    def copy_checkpoint(self, source: Path, path: Path) -> None:
        """Copy a checkpoint of one object on the service, within its bucket; in its turn.

        Raises:
            NotFoundError: There is no such checkpoint.
        """
        uri = to_uri(path)
        if self._background is None:
            copy(to_uri(source), uri, self.options)
        else:
            self._background.write(uri, partial(copy, to_uri(source), uri, self.options))

    def exists(self, path: Path) -> bool:
        """Tell whether there is a checkpoint, stored or under way."""
        uri = to_uri(path)
        if self._background is not None and self._background.is_pending(uri):
            return True
        return exists(uri, self.options)

    def find(self, directory: Path, pattern: re.Pattern[str]) -> list[str]:
        """Return the checkpoints right below a prefix whose names match, as whole uris."""
        return find(to_uri(directory), pattern, self.options)

    def run_save(self, uri: str, work: Callable[[], object]) -> None:
        """Carry out a save that a strategy makes, in its turn.

        Raises:
            CheckpointError: It failed, unless it is done in the background.
        """
        if self._background is None:
            work()
        else:
            self._background.write(uri, work)

    def merged(self, storage_options: Any, known: frozenset[str]) -> dict[str, Any]:
        """Return the options of stores with those of one save.

        Args:
            storage_options: What the user gave with the save.
            known: What it may be, beside the options of a store.

        Raises:
            TypeError: It is no mapping of these.
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
        _refuse(set(given) - _STORE - known, "storage_options", _STORE | known)
        return {**self.options, **given}

    def wait(self) -> None:
        """Wait until all that was saved is stored.

        Raises:
            StorageError: Something could not be.
        """
        if self._background is not None:
            self._background.wait()

    def teardown(self) -> None:
        """Wait until all that was saved is stored, and give its memory back.

        Raises:
            StorageError: Something could not be.
        """
        try:
            if self._background is not None:
                self._background.close()
        finally:
            self._slabs.clear()


def _upload(uri: str, staged: Staged, options: dict[str, Any]) -> None:
    try:
        _bridge.run(_send(uri, staged, options))
    finally:
        staged.release()


async def _send(uri: str, staged: Staged, options: dict[str, Any]) -> None:
    root, key = split_object_uri(uri)
    of_store = {name: value for name, value in options.items() if name in _STORE}
    of_write = {name: value for name, value in options.items() if name in _WRITE}
    async with (
        open_store(root, **of_store) as store,
        store.open_writer(key, zero_copy=True, **of_write) as writer,
    ):
        for view in staged.views():
            await writer.write(view)


def _refuse(unknown: set[str], what: str, known: frozenset[str]) -> None:
    if unknown:
        raise TypeError(
            f"{what} takes no {', '.join(sorted(unknown))}; it takes {', '.join(sorted(known))}"
        )
