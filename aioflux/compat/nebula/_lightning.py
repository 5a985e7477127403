"""NebulaCallback and NebulaCheckpointIO: Nebula for Lightning.

    config_params = {"persistent_storage_path": "gs://bucket/run-7", "persistent_time_interval": 10}
    trainer = Trainer(
        plugins=[NebulaCheckpointIO()],
        callbacks=[NebulaCallback(monitor="loss", config_params=config_params)],
    )

A checkpoint is a tag with the file name that Lightning gives it, without `.ckpt`, and one part
named `checkpoint`.
"""

from __future__ import annotations

import os
import re
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
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer

    Path = str | os.PathLike[str]

__all__ = ["NebulaCallback", "NebulaCheckpointIO"]

_PART: Final = "checkpoint"
"""Name of the only part of a tag."""
_SUFFIX: Final = ".ckpt"
_PROTOCOL: Final = "aioflux-nebula"
_OPTIONS: Final = frozenset({"is_best", "persist_path"})


class NebulaCallback(ModelCheckpoint):
    """Lightning's ModelCheckpoint, which calls `init` before the training."""

    def __init__(
        self, *arguments: Any, config_params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Set what is saved and when, as in Lightning's `ModelCheckpoint`.

        Args:
            arguments: As `ModelCheckpoint`.
            config_params: Arguments of `init`; by default `init` is not called.
            options: As `ModelCheckpoint`.
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
                "NebulaCallback needs Trainer(plugins=[NebulaCheckpointIO()]): without it "
                "checkpoints would be written as Lightning writes them"
            )
        if self._config_params is not None:
            init(**self._config_params)
        super().setup(trainer, pl_module, stage)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """See base class; adds tags, for `ckpt_path="last"`."""
        if self._config_params is not None:
            init(**self._config_params)  # called before `setup`
        register_implementation(_PROTOCOL, _Tags, clobber=True)
        pattern = re.compile(rf"{self.CHECKPOINT_NAME_LAST}(-(\d+))?")
        found = super()._find_last_checkpoints(trainer)
        for tag, listed in list_checkpoints().items():
            if pattern.match(tag) and _PART in listed["files"]:
                found.add(f"{_PROTOCOL}://{tag}{_SUFFIX}")
        return found


class _Tags(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The tags as a filesystem, in which Lightning looks up a checkpoint before loading it."""

    protocol = _PROTOCOL

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return size and time of a tag."""
        listed = list_checkpoints().get(_tag(path))
        if listed is None:
            raise FileNotFoundError(f"there is no checkpoint {_tag(path)!r}")
        return {"name": path, "type": "file", "size": listed["size_bytes"], "time": listed["time"]}

    def modified(self, path: str) -> datetime:
        return datetime.fromisoformat(self.info(path)["time"])


class NebulaCheckpointIO(CheckpointIO):
    """Saves checkpoints to the memory of the node, and from there to the persistent storage.

    All of them are saved there, regardless of the interval: Lightning decides which, and when.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint to memory.

        Args:
            checkpoint: Any object that torch.save takes.
            path: The path of Lightning, which becomes the tag.
            storage_options: `is_best`: wait until it is in the persistent storage.
                `persist_path`: save this one to another storage than that of `init`.

        Raises:
            CheckpointError: It could not be copied, or, with these options, not saved.
            TypeError: An option is unknown.
        """
        options = dict(storage_options or {})
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(
                f"unknown storage_options: {', '.join(sorted(unknown))}; known are "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        tag, elsewhere = _tag(path), parse_storage_path(options.get("persist_path"))
        run = _training_run.run_at(elsewhere) if elsewhere else _training_run.current()
        run.snapshots.save(tag, _PART, checkpoint, COMMITTED)
        # Due: Lightning relies on it, so that a newer one must not take its place.
        run.client.call("commit", tag, "", True, 0, 1)
        if elsewhere or options.get("is_best"):
            run.client.call("flush", tag)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, from memory or storage.

        Args:
            path: The path of Lightning, or one of `get_latest_checkpoint_path`.
            map_location: As `torch.load`; host memory by default.
            weights_only: As `torch.load`; None for its default, which is True.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
        """
        device = "cpu" if map_location is None else map_location
        found = get_checkpoint(_tag(path))
        loaded: dict[str, Any]
        if found is not None:
            loaded = found.load(_PART, device, weights_only)
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
                f"there is no checkpoint {_tag(path)!r} in memory or in storage, and no file "
                f"{os.fspath(path)}"
            )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint once a newer one is saved; one that does not exist is no error."""
        _training_run.current().client.call("remove", _tag(path))

    def teardown(self) -> None:
        """Wait until the newest checkpoint is saved.

        Raises:
            CheckpointError: It could not be saved.
        """
        flush_persistence()


def _tag(path: Path) -> str:
    """Return the tag of a path of Lightning: the file name without `.ckpt`."""
    name = os.path.basename(os.fspath(path).rstrip("/"))
    return name.removesuffix(_SUFFIX)
