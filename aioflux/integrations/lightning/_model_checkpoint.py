"""Lightning's ModelCheckpoint callback, changed to work with checkpoints in buckets."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fsspec import AbstractFileSystem, register_implementation  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint as _LightningModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_warn,
)

from aioflux._values.uri import parse_uri
from aioflux.integrations.fsspec import (
    AzureFileSystem,
    GSFileSystem,
    MemoryFileSystem,
    S3FileSystem,
)
from aioflux.integrations.lightning._checkpoint_io import AiofluxCheckpointIO
from aioflux.integrations.lightning._uris import (
    FOUND,
    is_below,
    is_same,
    name_pattern,
    to_uri,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor

_FILESYSTEMS: Final[dict[str, Any]] = {
    name: kind
    for kind in (GSFileSystem, S3FileSystem, AzureFileSystem, MemoryFileSystem)
    for name in kind.protocol
}


class ModelCheckpoint(_LightningModelCheckpoint):
    """Lightning's ModelCheckpoint for a `dirpath` in a bucket, with the same arguments.

    Use it with `AiofluxCheckpointIO`, whose options also apply here. gcsfs, s3fs and adlfs are
    neither needed nor used. Differences from Lightning's class:

    * `ckpt_path="last"` resumes from the bucket. Lightning's class warns and trains from step 0.
    * A checkpoint is removed only after the checkpoint that replaces it is stored, so that training
      can always be resumed. The checkpoint that training was resumed from, and checkpoints outside
      of `dirpath`, are never removed.
    * `save_last` makes a server-side copy of the checkpoint that was just stored. Lightning's class
      uploads the checkpoint twice.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        **options: Any,
    ) -> None:
        """Create the callback; see Lightning's `ModelCheckpoint` for the arguments.

        Raises:
            ValueError: `dirpath` is a uri of which `pathlib.Path` has removed a slash.
        """
        if dirpath is not None:
            uri = to_uri(dirpath)
            if uri.startswith("file://"):  # Lightning would read the uri as a relative path
                dirpath = parse_uri(uri).key
        self._plugin: AiofluxCheckpointIO | None = None
        self._newest: tuple[str, int] | None = None
        """Path and step of the checkpoint that was just stored, for a copy by `save_last`."""
        self._next_last_path = ""
        super().__init__(dirpath, filename, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See base class.

        Raises:
            TypeError: Checkpoints are saved by Lightning's AsyncCheckpointIO, or in a bucket by its
                TorchCheckpointIO.
        """
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, AsyncCheckpointIO):
            raise TypeError(
                "Lightning's AsyncCheckpointIO removes a checkpoint before the next one is stored; "
                "use AiofluxCheckpointIO(background=True) instead"
            )
        self._plugin = _plugin_of(trainer)
        directory = self.__resolve_ckpt_dir(trainer)
        if _filesystem_of(directory) is None:
            super().setup(trainer, pl_module, stage)
            return
        if type(plugin) is TorchCheckpointIO:
            raise TypeError(
                f"Lightning's TorchCheckpointIO cannot save to {directory}; pass "
                "Trainer(plugins=[AiofluxCheckpointIO()])"
            )
        # The base class would open a filesystem of another library.
        self.dirpath = trainer.strategy.broadcast(directory)
        if trainer.is_global_zero and stage == "fit":
            self.__warn_if_dir_not_empty(self.dirpath)
        if self.save_last == "link":
            raise ValueError(f"save_last='link' needs a local dirpath, not {directory}")

    def __init_ckpt_dir(self, dirpath: str | Path | None, filename: str | None) -> None:
        # `__init__` of the base class calls this, which would open another library's filesystem.
        if _filesystem_of(dirpath) is None:
            super().__init_ckpt_dir(dirpath, filename)
        else:
            self.dirpath, self.filename = dirpath, filename

    @property
    def _fs(self) -> Any:
        """Filesystem of `dirpath` for the methods of the base class."""
        kind = _filesystem_of(self.dirpath)
        options = self._plugin.options if self._plugin is not None else {}
        return self._other_fs if kind is None else kind(**options)

    @_fs.setter
    def _fs(self, filesystem: Any) -> None:
        self._other_fs = filesystem

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for pending saves, because some strategies do not call `teardown` of the plugin."""
        super().teardown(trainer, pl_module, stage)
        if self._plugin is not None:
            self._plugin.wait()

    def state_dict(self) -> dict[str, Any]:
        """See base class."""
        state = super().state_dict()
        if self._next_last_path:
            # `save_last` will copy this checkpoint, and the copy has to contain the path of the
            # copy. Otherwise a resumed run treats the copy as a checkpoint of another run, and
            # saves its own last checkpoint under another name.
            state["last_model_path"] = self._next_last_path
        return state

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Return whether a checkpoint is stored, or its save is pending."""
        if self._plugin is None:
            return super().file_exists(filepath, trainer)
        exists = trainer.is_global_zero and self._plugin.exists(filepath)
        return bool(trainer.strategy.reduce_boolean_decision(exists, all=False))

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        directory = str(self.__resolve_ckpt_dir(trainer))
        plugin = _plugin_of(trainer)
        if plugin is None or "://" not in directory:
            return super()._find_last_checkpoints(trainer)
        pattern = name_pattern(self.CHECKPOINT_NAME_LAST, self.FILE_EXTENSION)
        found = plugin.find(directory, pattern)
        return {_FoundCheckpoints.add(uri, time) for uri, time in found.items()}

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._copies_last:
            self._next_last_path = self._name_last(trainer, self._monitor_candidates(trainer))
        try:
            super()._save_checkpoint(trainer, filepath)
        finally:
            self._next_last_path = ""
        self._newest = (filepath, trainer.global_step)

    def _save_last_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        newest, self._newest = self._newest, None
        if not self._copies_last or newest is None or newest[1] != trainer.global_step:
            super()._save_last_checkpoint(trainer, monitor_candidates)
            self._newest = None
            return
        path = self._name_last(trainer, monitor_candidates)
        previous, self.last_model_path = self.last_model_path, path
        if trainer.is_global_zero and self._plugin is not None:
            self._plugin.copy_checkpoint(newest[0], path)
        trainer.strategy.barrier("ModelCheckpoint.save_last")
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    @property
    def _copies_last(self) -> bool:
        """Return whether `save_last` copies the newest checkpoint and does not save it again."""
        return self.save_last is True and self._plugin is not None

    def _name_last(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> str:
        """Return the path for `save_last`: the path that this run used before, or an unused one."""
        path = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST)
        version = self.STARTING_VERSION
        while (
            self._enable_version_counter
            and path != self.last_model_path
            and self.file_exists(path, trainer)
        ):
            path = self.format_checkpoint_name(
                monitor_candidates, self.CHECKPOINT_NAME_LAST, ver=version
            )
            version += 1
        return path

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        if is_same(previous, current):
            return False
        if trainer.ckpt_path is not None and is_same(previous, trainer.ckpt_path):
            return False
        return self.dirpath is not None and is_below(previous, self.dirpath)

    def __warn_if_dir_not_empty(self, dirpath: str | Path) -> None:
        # `setup` of the base class calls this. The base class would list by fsspec.
        if self._plugin is not None and self.save_top_k != 0:
            if self._plugin.find(dirpath, re.compile(".*")):
                rank_zero_warn(f"Checkpoint directory {dirpath} exists and is not empty.")
        else:
            super().__warn_if_dir_not_empty(dirpath)


def _plugin_of(trainer: Trainer) -> AiofluxCheckpointIO | None:
    plugin = trainer.strategy.checkpoint_io
    return plugin if isinstance(plugin, AiofluxCheckpointIO) else None


def _filesystem_of(path: Any) -> Any:
    """Return the class of the filesystem of a path, or None if it is not in a bucket."""
    scheme, separator, _ = str(path).partition("://")
    return _FILESYSTEMS.get(scheme) if separator else None


class _FoundCheckpoints(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Filesystem in which Lightning looks up the time of a checkpoint that the plugin has found.

    Lightning compares the times of all checkpoints of `ckpt_path="last"` through fsspec, which does
    not have the options of the plugin.
    """

    times: ClassVar[dict[str, datetime | None]] = {}

    @classmethod
    def add(cls, uri: str, time: datetime | None) -> str:
        """Add a checkpoint, and return the path by which Lightning finds it here."""
        path = FOUND + uri
        register_implementation(path.partition("://")[0], cls, clobber=True)
        cls.times[path] = time
        return path

    def exists(self, path: str, **_: Any) -> bool:
        return path in self.times

    def modified(self, path: str) -> datetime | None:
        return self.times[path]
