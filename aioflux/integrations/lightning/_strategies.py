"""Lightning's FSDPStrategy and ModelParallelStrategy, with checkpoints in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch.strategies import FSDPStrategy as _LightningFSDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as _LightningModelParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from aioflux.errors import CheckpointError
from aioflux.integrations.lightning._checkpoint_io import AiofluxCheckpointIO
from aioflux.integrations.lightning._objects import META_KEY, is_sharded
from aioflux.integrations.lightning._sharded_checkpoint import (
    TRAINER_DATA_NAME,
    TrainerData,
    has_trainer_data,
    load_sharded,
    save_sharded,
    snapshot,
    training_memory,
)
from aioflux.integrations.lightning._uris import to_uri

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.fabric.plugins import CheckpointIO
    from torch.distributed import ProcessGroup

_WRITER_OPTIONS: Final = frozenset({"objects_per_rank", "compression", "mode", "metrics"})


class _BucketCheckpoints(ParallelStrategy):
    """Saves and loads of both strategies. Lightning's own treat every uri as a local path."""

    _weights_name: str
    """Lightning's name for the weights in a sharded checkpoint."""
    _group: ProcessGroup | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that stores checkpoints; an `AiofluxCheckpointIO` by default."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AiofluxCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def _plugin(self) -> AiofluxCheckpointIO:
        plugin = self.checkpoint_io
        if not isinstance(plugin, AiofluxCheckpointIO):
            raise TypeError(
                f"{type(self).__name__} of aioflux stores checkpoints with AiofluxCheckpointIO, "
                f"not with {type(plugin).__name__}; pass plugins=[AiofluxCheckpointIO()]"
            )
        return plugin

    @property
    def _saves_shards(self) -> bool:
        raise NotImplementedError

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; called by every rank.

        Args:
            checkpoint: Checkpoint of the trainer; weights and optimizer states are removed from it.
            filepath: A uri such as `gs://bucket/run-7/last.ckpt`, or a local path.
            storage_options: A mapping. A sharded save accepts `objects_per_rank`, `compression`,
                `mode` and `metrics` of `StorageWriter`, and the options of a store. A save of one
                object accepts the options of `AiofluxCheckpointIO.save_checkpoint`.

        Raises:
            CheckpointError: The checkpoint or an earlier pending one could not be saved.
            TypeError: `storage_options` is not a mapping, or has an unknown option.
        """
        uri = self.broadcast(to_uri(filepath))
        if not self._saves_shards:
            with self._raise_on_all_ranks(uri):
                ParallelStrategy.save_checkpoint(self, checkpoint, uri, storage_options)
            return
        plugin = self._plugin
        options = plugin.merge_options(storage_options, _WRITER_OPTIONS)
        state = {
            self._weights_name: checkpoint.pop("state_dict"),
            **{
                _optimizer_name(number): optimizer_state
                for number, optimizer_state in enumerate(checkpoint.pop("optimizer_states", []))
            },
        }
        trainer_data = None
        with self._raise_on_all_ranks(uri):
            plugin.wait()
            if self.is_global_zero:
                trainer_data = TrainerData.serialize(checkpoint)
        settings = {"step": checkpoint.get("global_step"), **options}
        group = None
        if plugin.is_background:
            in_use = training_memory(self._model_in_use(), self.optimizers)
            state, group = snapshot(state, in_use), self._background_group()
        plugin.run_save(uri, partial(save_sharded, uri, state, trainer_data, settings, group))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a sharded checkpoint, or a checkpoint of one object; called by every rank.

        Returns:
            The checkpoint without weights; of a sharded checkpoint also without optimizer states.

        Raises:
            NotFoundError: There is no such checkpoint.
            CheckpointError: The checkpoint could not be loaded.
        """
        uri = self.broadcast(to_uri(checkpoint_path))
        plugin = self._plugin
        layout = [False, False]
        with self._raise_on_all_ranks(uri):
            plugin.wait()
            if self.is_global_zero and is_sharded(uri, plugin.options):
                layout = [True, has_trainer_data(uri, plugin.options)]
        is_in_shards, with_trainer_data = self.broadcast(layout)
        if is_in_shards:
            return self._load_shards(uri, weights_only, with_trainer_data=with_trainer_data)
        return self._load_whole(uri, weights_only)

    def teardown(self) -> None:
        """Wait until all pending saves are stored, then run the `teardown` of Lightning."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()

    def _load_shards(
        self, uri: str, weights_only: bool | None, *, with_trainer_data: bool
    ) -> dict[str, Any]:
        model = self._model_in_use()
        optimizers = {
            _optimizer_name(number): optimizer
            for number, optimizer in enumerate(self._optimizers_in_use())
        }
        state: dict[str, Any] = {self._weights_name: get_model_state_dict(model)}
        for name, optimizer in optimizers.items():
            state[name] = get_optimizer_state_dict(model, optimizer)
        if with_trainer_data:
            state[TRAINER_DATA_NAME] = b""
        options = self._plugin.options
        load_sharded(uri, state, options, weights_only=weights_only, is_strict=self._is_strict)
        state_options = StateDictOptions(strict=self._is_strict)
        set_model_state_dict(model, state[self._weights_name], options=state_options)
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(model, optimizer, state[name], options=state_options)
        if with_trainer_data:
            return TrainerData(state[TRAINER_DATA_NAME]).load(weights_only=weights_only)
        return self._plugin.load_checkpoint(f"{uri}/{META_KEY}", weights_only=weights_only)

    def _load_whole(self, uri: str, weights_only: bool | None) -> dict[str, Any]:
        model, optimizers = self._model_in_use(), self._optimizers_in_use()
        checkpoint = self._plugin.load_checkpoint(uri, weights_only=weights_only)
        state_options = StateDictOptions(full_state_dict=True, strict=self._is_strict)
        set_model_state_dict(model, checkpoint.pop("state_dict"), options=state_options)
        states = checkpoint.get("optimizer_states", []) if optimizers else []
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"{uri} contains states of {len(states)} optimizers, and the trainer has "
                f"{len(optimizers)} optimizers; resume with the optimizers of the saved run, or "
                "load only the weights by trainer.validate"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            if any(isinstance(key, int) for key in state["state"]):
                state = FullyShardedDataParallel.rekey_optim_state_dict(
                    state, OptimStateKeyType.PARAM_NAME, model
                )
            set_optimizer_state_dict(model, optimizer, state, options=state_options)
        return checkpoint

    @property
    def _is_strict(self) -> bool:
        return self.lightning_module is None or self.lightning_module.strict_loading

    def _model_in_use(self) -> torch.nn.Module:
        if self.model is None:
            raise RuntimeError(f"{type(self).__name__} has no model yet; the trainer sets it")
        return self.model

    def _optimizers_in_use(self) -> list[torch.optim.Optimizer]:
        module = self.lightning_module
        is_fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        return self.optimizers if is_fitting else []

    def _background_group(self) -> ProcessGroup:
        """Return a gloo group that only the background thread uses."""
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group

    @contextmanager
    def _raise_on_all_ranks(self, uri: str) -> Iterator[None]:
        """Raise on every rank if the block raises on one rank.

        Without this, the other ranks would wait for that rank.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as exc:  # raised below
            failure = exc
        if not self.reduce_boolean_decision(failure is None):
            raise failure or CheckpointError(
                f"{uri} was not saved or loaded because another rank failed; see its error"
            )


class FSDPStrategy(_BucketCheckpoints, _LightningFSDPStrategy):
    """Lightning's FSDPStrategy with checkpoints in a bucket, with the same arguments.

        Trainer(
            strategy=FSDPStrategy(state_dict_type="sharded"),
            plugins=[AiofluxCheckpointIO(background=True)],
            callbacks=[ModelCheckpoint("gs://bucket/run-7", save_last=True)],
        )

    `AiofluxCheckpointIO` stores the checkpoints, also in the background. A sharded checkpoint is
    written by `aioflux.checkpoint.dcp`, verified, and committed as a whole; a full checkpoint is
    one object. Both kinds can be loaded with any `state_dict_type`. Lightning's strategy treats
    `gs://` as a local path.

    Lightning's strategy can load a sharded checkpoint that was copied to a directory, and this
    strategy can load a checkpoint of Lightning's that was copied to a bucket.
    """

    _weights_name = "model"

    @property
    def _saves_shards(self) -> bool:
        return self._state_dict_type == "sharded"


class ModelParallelStrategy(_BucketCheckpoints, _LightningModelParallelStrategy):
    """Lightning's ModelParallelStrategy with checkpoints in a bucket, with the same arguments.

    See `FSDPStrategy` of this package. With `save_distributed_checkpoint`, checkpoints are sharded.
    """

    _weights_name = "state_dict"

    @property
    def _saves_shards(self) -> bool:
        return self._save_distributed_checkpoint


def _optimizer_name(number: int) -> str:
    return f"optimizer_{number}"
