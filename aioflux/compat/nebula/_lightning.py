"""NebulaCallback and NebulaCheckpointIO: checkpoints of Lightning, saved by Nebula.

    config_params = {"persistent_storage_path": "gs://bucket/run-7", "persistent_time_interval": 10}
    trainer = Trainer(
        plugins=[NebulaCheckpointIO()],
        callbacks=[NebulaCallback(monitor="loss", config_params=config_params)],
    )

A checkpoint is a tag, named as Lightning names the object without its ending, with one part called
`checkpoint`.
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
from aioflux.compat.nebula import _run
from aioflux.compat.nebula._api import (
    flush_persistence,
    get_checkpoint,
    init,
    list_checkpoints,
)
from aioflux.compat.nebula._memory_tier import COMMITTED
from aioflux.compat.nebula._uris import place_of, to_uri
from aioflux.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer

    Path = str | os.PathLike[str]

__all__ = ["NebulaCallback", "NebulaCheckpointIO"]

_NAME: Final = "checkpoint"
"""Name of the part that a checkpoint of Lightning is."""
_ENDING: Final = ".ckpt"
_PROTOCOL: Final = "aioflux-nebula"
_OPTIONS: Final = frozenset({"is_best", "persist_path"})


class NebulaCallback(ModelCheckpoint):
    """Lightning's ModelCheckpoint, with arguments as it has, which begins Nebula with a run."""

    def __init__(
        self, *arguments: Any, config_params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Choose what is saved and when, as Lightning's `ModelCheckpoint`.

        Args:
            arguments: As `ModelCheckpoint`.
            config_params: What `init` takes; by default what it was called with, or the
                environment.
            options: As `ModelCheckpoint`.
        """
        super().__init__(*arguments, **options)
        self._config_params = dict(config_params) if config_params is not None else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See base class.

        Raises:
            TypeError: Checkpoints are not saved by NebulaCheckpointIO.
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
        """See base class: `ckpt_path="last"` looks for what no directory has."""
        if self._config_params is not None:
            init(**self._config_params)  # it is asked for before `setup`
        register_implementation(_PROTOCOL, _Tags, clobber=True)
        pattern = re.compile(rf"{self.CHECKPOINT_NAME_LAST}(-(\d+))?")
        found = super()._find_last_checkpoints(trainer)
        for tag, told in list_checkpoints().items():
            if pattern.match(tag) and _NAME in told["files"]:
                found.add(f"{_PROTOCOL}://{tag}{_ENDING}")
        return found


class _Tags(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Where Lightning looks whether a checkpoint is there, and of when, before it loads it."""

    protocol = _PROTOCOL

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describe a tag."""
        told = list_checkpoints().get(_tag(path))
        if told is None:
            raise FileNotFoundError(f"there is no checkpoint {_tag(path)!r}")
        return {"name": path, "type": "file", "size": told["size_bytes"], "time": told["time"]}

    def modified(self, path: str) -> datetime:
        """Return when it was saved."""
        return datetime.fromisoformat(self.info(path)["time"])


class NebulaCheckpointIO(CheckpointIO):
    """Saves a checkpoint to the memory of the node, and from there to the persistent storage.

    Each is saved there, whatever the interval: Lightning has chosen which, and when.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Copy a checkpoint to memory.

        Args:
            checkpoint: What torch.save takes.
            path: What Lightning names it: its tag.
            storage_options: `is_best`: wait until it is in the persistent storage.
                `persist_path`: another storage than that of `init`, for it alone.

        Raises:
            CheckpointError: It could not be copied, or, with these options, not be saved.
            TypeError: An option is not known.
        """
        options = dict(storage_options or {})
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(
                f"storage_options takes no {', '.join(sorted(unknown))}; it takes "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        tag, elsewhere = _tag(path), place_of(options.get("persist_path"))
        run = _run.run_at(elsewhere) if elsewhere else _run.current()
        run.snapshots.save(tag, _NAME, checkpoint, COMMITTED)
        # Lightning has chosen it, and counts on it: it is saved whatever comes after it.
        run.client.call("commit", tag, "", True, 0, 1)
        if elsewhere or options.get("is_best"):
            run.client.call("flush", tag)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, from memory or where it is saved.

        Args:
            path: What it was named, or what `get_latest_checkpoint_path` returned.
            map_location: As `torch.load`; host memory by default.
            weights_only: As `torch.load`; None for its default, which is True.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
        """
        place = "cpu" if map_location is None else map_location
        found = get_checkpoint(_tag(path))
        loaded: dict[str, Any]
        if found is not None:
            loaded = found.load(_NAME, place, weights_only)
        elif "://" in os.fspath(path):
            options = _run.current().options_at(os.fspath(path))
            is_safe = weights_only is not False
            loaded = load(
                to_uri(os.fspath(path)), map_location=place, weights_only=is_safe, **options
            )
        elif os.path.isfile(path):
            loaded = torch.load(path, map_location=place, weights_only=weights_only)
        else:
            raise CheckpointNotFoundError(
                f"there is no checkpoint {_tag(path)!r}, in memory or where it would be saved, and "
                f"no file {os.fspath(path)}"
            )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, once a newer one is saved; one that is not there is no error."""
        _run.current().client.call("remove", _tag(path))

    def teardown(self) -> None:
        """Wait until the newest checkpoint is saved.

        Raises:
            CheckpointError: It could not be.
        """
        flush_persistence()


def _tag(path: Path) -> str:
    """Return the tag of a path of Lightning: its last name, without its ending."""
    name = os.path.basename(os.fspath(path).rstrip("/"))
    return name.removesuffix(_ENDING)
