"""Nebula's callback and checkpoint plugin for Lightning.

    config_params = {"persistent_storage_path": "gs://bucket/run-7", "persistent_time_interval": 10}
    trainer = Trainer(
        plugins=[NebulaCheckpointIO()],
        callbacks=[NebulaCallback(monitor="loss", config_params=config_params)],
    )

A checkpoint of Lightning is stored as a tag with one part. The tag is the file name that Lightning
passes, without `.ckpt`. The part is named `checkpoint`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import torch
from fsspec import AbstractFileSystem, register_implementation  # type: ignore[import-untyped]
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from aioflux.checkpoint import load
from aioflux.compat.nebula import _training_run
from aioflux.compat.nebula._api import (
    flush_persistence,
    get_checkpoint,
    init,
    list_checkpoints,
)
from aioflux.compat.nebula._memory_tier import COMMITTED
from aioflux.compat.nebula._settings import parse_storage_path, to_uri
from aioflux.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    Path = str | os.PathLike[str]

_PART_NAME: Final = "checkpoint"
_SUFFIX: Final = ".ckpt"
_PROTOCOL: Final = "aioflux-nebula"
_OPTIONS: Final = frozenset({"is_best", "persist_path"})


class NebulaCallback(ModelCheckpoint):
    """Lightning's ModelCheckpoint, with a call of `init` before the training."""

    def __init__(
        self, *arguments: Any, config_params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Create the callback.

        Args:
            arguments: Positional arguments of `ModelCheckpoint`.
            config_params: Arguments of `init`; None to not call `init`.
            options: Keyword arguments of `ModelCheckpoint`.
        """
        super().__init__(*arguments, **options)
        self._config_params = dict(config_params) if config_params is not None else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See base class.

        Raises:
            TypeError: The trainer has no NebulaCheckpointIO.
        """
        if not isinstance(trainer.strategy.checkpoint_io, NebulaCheckpointIO):
            raise TypeError(
                "NebulaCallback needs Trainer(plugins=[NebulaCheckpointIO()]): without this plugin "
                "Lightning would write the checkpoints to its own files"
            )
        if self._config_params is not None:
            init(**self._config_params)
        super().setup(trainer, pl_module, stage)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Return last checkpoints, including tags, for `ckpt_path="last"`."""
        if self._config_params is not None:
            init(**self._config_params)  # Lightning calls this method before `setup`.
        register_implementation(_PROTOCOL, _TagFileSystem, clobber=True)
        pattern = re.compile(rf"{self.CHECKPOINT_NAME_LAST}(-(\d+))?")
        paths = super()._find_last_checkpoints(trainer)
        for tag, description in list_checkpoints().items():
            if pattern.match(tag) and _PART_NAME in description["files"]:
                paths.add(f"{_PROTOCOL}://{tag}{_SUFFIX}")
        return paths


class _TagFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Filesystem of tags: Lightning looks up size and time of a checkpoint before a load."""

    protocol = _PROTOCOL

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return size and time of a tag."""
        tag = _tag_from_path(path)
        description = list_checkpoints().get(tag)
        if description is None:
            raise FileNotFoundError(f"there is no checkpoint {tag!r}")
        size, time = description["size_bytes"], description["time"]
        return {"name": path, "type": "file", "size": size, "time": time}

    def modified(self, path: str) -> datetime:
        return datetime.fromisoformat(self.info(path)["time"])


class NebulaCheckpointIO(CheckpointIO):
    """Plugin that saves checkpoints to the memory of the node and to the persistent storage.

    All checkpoints are saved to the persistent storage, even within `persistent_time_interval`,
    because Lightning itself decides when to save.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint to memory.

        Args:
            checkpoint: Any object that torch.save accepts.
            path: The path of Lightning, from which the tag is made.
            storage_options: With `is_best`, wait until the persistent storage has the checkpoint.
                With `persist_path`, save it to this storage instead of the one of `init`, and wait.

        Raises:
            CheckpointError: The checkpoint could not be copied, or the awaited save has failed.
            TypeError: An option is unknown.
        """
        options = dict(storage_options or {})
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(
                f"unknown storage_options: {', '.join(sorted(unknown))}; the options are "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        tag, persist_path = _tag_from_path(path), parse_storage_path(options.get("persist_path"))
        run = _training_run.run_at(persist_path) if persist_path else _training_run.current()
        run.snapshot_writer.save(tag, _PART_NAME, checkpoint, COMMITTED)
        must_save = True  # Lightning expects that each checkpoint is stored, not only the newest.
        run.client.call("commit", tag, "", must_save, 0, 1)
        if persist_path or options.get("is_best"):
            run.client.call("flush", tag)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint from memory, local disk or persistent storage.

        Args:
            path: A path of Lightning, or a return value of `get_latest_checkpoint_path`.
            map_location: As in `torch.load`; by default tensors are loaded to host memory.
            weights_only: As in `torch.load`; None is its default, True.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
        """
        device = "cpu" if map_location is None else map_location
        checkpoint = get_checkpoint(_tag_from_path(path))
        loaded: dict[str, Any]
        if checkpoint is not None:
            loaded = checkpoint.load(_PART_NAME, device, weights_only)
        elif "://" in os.fspath(path):
            options = _training_run.current().options_at(os.fspath(path))
            is_safe = weights_only is not False
            loaded = load(
                to_uri(os.fspath(path)), map_location=device, weights_only=is_safe, **options
            )
        elif os.path.isfile(path):
            loaded = torch.load(path, map_location=device, weights_only=weights_only)
        else:
            raise CheckpointNotFoundError(
                f"there is no checkpoint {_tag_from_path(path)!r} in memory or in storage, and no "
                f"file {os.fspath(path)}"
            )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint: from memory now, from the other tiers after their next save.

        The other tiers are the disk and the persistent storage. A missing checkpoint is no error.
        """
        _training_run.current().client.call("remove", _tag_from_path(path))

    def teardown(self) -> None:
        """Wait until the newest checkpoint is saved.

        Raises:
            CheckpointError: The newest checkpoint could not be saved.
        """
        flush_persistence()


def _tag_from_path(path: Path) -> str:
    name = os.path.basename(os.fspath(path).rstrip("/"))
    return name.removesuffix(_SUFFIX)
