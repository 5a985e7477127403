"""Lightning's ModelCheckpoint, corrected for buckets."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint as _LightningModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_warn,
)

from aioflux._values.uri import parse_uri
from aioflux.errors import CheckpointError
from aioflux.integrations.fsspec import register
from aioflux.integrations.lightning._checkpoint_io import AiofluxCheckpointIO
from aioflux.integrations.lightning._uris import (
    ALIAS,
    is_below,
    is_same,
    name_pattern,
    to_uri,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(_LightningModelCheckpoint):
    """Lightning's ModelCheckpoint for a `dirpath` in a bucket; takes the same arguments.

    Use it with `AiofluxCheckpointIO`. Its differences:

    * `ckpt_path="last"` resumes from the bucket. Lightning's own warns and trains from step 0.
    * A checkpoint is removed only when the one that replaces it is stored, so that there is always
      one to resume from. The one that training was resumed from, and those outside of `dirpath`,
      are never removed.
    * `save_last` makes a copy on the service of the checkpoint that was just stored. Lightning's
      own uploads it twice.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        **options: Any,
    ) -> None:
        """Take the arguments of Lightning's `ModelCheckpoint`.

        Raises:
            ValueError: `dirpath` was a uri before `pathlib.Path` removed a slash.
        """
        if dirpath is not None:
            uri = to_uri(dirpath)
            if uri.startswith("file://"):  # Lightning would take it for a relative path
                dirpath = parse_uri(uri).key
            elif uri.startswith(("gs://", "gcs://")) and find_spec("gcsfs") is None:
                register(replace=("gs", "gcs"))  # no other filesystem is registered
        self._plugin: AiofluxCheckpointIO | None = None
        self._stored: tuple[str, int] | None = None
        """The checkpoint that was stored last, and its step."""
        self._next_last_path = ""
        super().__init__(dirpath, filename, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See base class.

        Raises:
            TypeError: Checkpoints are saved by Lightning's AsyncCheckpointIO.
        """
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, AsyncCheckpointIO):
            raise TypeError(
                "Lightning's AsyncCheckpointIO removes a checkpoint before the next one is stored; "
                "use AiofluxCheckpointIO(background=True) in its place"
            )
        self._plugin = _plugin_of(trainer)
        super().setup(trainer, pl_module, stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait until all is stored: some strategies do not call `teardown` of the plugin."""
        super().teardown(trainer, pl_module, stage)
        if self._plugin is not None:
            self._plugin.wait()

    def state_dict(self) -> dict[str, Any]:
        """See base class."""
        state = super().state_dict()
        if self._next_last_path:
            # A copy of this checkpoint becomes the last one. It has to contain its own name, or the
            # resumed run takes it for that of another run, and saves next to it.
            state["last_model_path"] = self._next_last_path
        return state

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """See base class; a pending checkpoint exists, too."""
        if self._plugin is None:
            return super().file_exists(filepath, trainer)
        found = trainer.is_global_zero and self._plugin.exists(filepath)
        return bool(trainer.strategy.reduce_boolean_decision(found, all=False))

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        directory = str(self.__resolve_ckpt_dir(trainer))
        plugin = _plugin_of(trainer)
        if plugin is None or "://" not in directory:
            return super()._find_last_checkpoints(trainer)
        pattern = name_pattern(self.CHECKPOINT_NAME_LAST, self.FILE_EXTENSION)
        return {_name_for_fsspec(uri) for uri in plugin.find(directory, pattern)}

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._copies_last:
            self._next_last_path = self._name_last(trainer, self._monitor_candidates(trainer))
        try:
            super()._save_checkpoint(trainer, filepath)
        finally:
            self._next_last_path = ""
        self._stored = (filepath, trainer.global_step)

    def _save_last_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        stored, self._stored = self._stored, None
        if not self._copies_last or stored is None or stored[1] != trainer.global_step:
            super()._save_last_checkpoint(trainer, monitor_candidates)
            self._stored = None
            return
        path = self._name_last(trainer, monitor_candidates)
        previous, self.last_model_path = self.last_model_path, path
        if trainer.is_global_zero and self._plugin is not None:
            self._plugin.copy_checkpoint(stored[0], path)
        trainer.strategy.barrier("ModelCheckpoint.save_last")
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    @property
    def _copies_last(self) -> bool:
        """Return whether the last checkpoint is a copy of the one that was stored just before."""
        return self.save_last is True and self._plugin is not None

    def _name_last(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> str:
        """Return an unused name, or that of the last checkpoint of this run."""
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
        # Called by `setup` of the base class, whose own method uses fsspec.
        if self._plugin is not None and self.save_top_k != 0:
            if self._plugin.find(dirpath, re.compile(".*")):
                rank_zero_warn(f"Checkpoint directory {dirpath} exists and is not empty.")
        else:
            super().__warn_if_dir_not_empty(dirpath)


def _plugin_of(trainer: Trainer) -> AiofluxCheckpointIO | None:
    plugin = trainer.strategy.checkpoint_io
    return plugin if isinstance(plugin, AiofluxCheckpointIO) else None


def _name_for_fsspec(uri: str) -> str:
    """Return a name with which fsspec returns the time of a checkpoint, as Lightning needs it.

    Raises:
        CheckpointError: There is none: Lightning would find no checkpoint, and start from step 0.
    """
    register()
    for name in (uri, f"{ALIAS}{uri}"):
        filesystem = get_filesystem(name)
        with suppress(KeyError, NotImplementedError):  # gcsfs has no time of a directory
            if filesystem.exists(name):
                filesystem.modified(name)
                return name
    raise CheckpointError(
        f"{uri} exists, but fsspec, which Lightning uses, does not find it; give fsspec the "
        "options of AiofluxCheckpointIO: aioflux.integrations.fsspec.register(replace=("
        '"gs",)) and fsspec.config.conf["gs"] = {"endpoint_url": ...}'
    )
