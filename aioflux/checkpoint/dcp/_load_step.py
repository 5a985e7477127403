"""load_into: load of a checkpoint into a state, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful

from aioflux.checkpoint.dcp import StorageReader
from aioflux.checkpoint.dcp._into_planner import IntoPlanner
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from aioflux.checkpoint._load.stored_checkpoint import CommitBytes
    from aioflux.checkpoint._save.ranks import Ranks
    from aioflux.store import Store


@runtime_checkable
class AdaptiveState(Protocol):
    """A state that can load checkpoints with more or fewer values than it has itself."""

    def template_for(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state to load into.

        Args:
            contents: `Metadata.state_dict_metadata` of the checkpoint: DCP's metadata of each
                value, by the dotted name of the value.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Apply the loaded state."""


class _StepReader(StorageReader):
    """A reader of the checkpoint below a prefix of an open store."""

    def __init__(
        self, store: Store, prefix: str, known: CommitBytes | None, **settings: Any
    ) -> None:
        self._opened = store
        super().__init__(store.uri, **settings)
        self._prefix, self._known = prefix, known

    def _open(self, uri: str) -> Store:
        return self._opened


def load_into(
    store: Store,
    prefix: str,
    into: Any,
    ranks: Ranks,
    *,
    known: CommitBytes | None = None,
    weights_only: bool,
) -> None:
    """Load the checkpoint below a prefix of a store into a state. Each rank loads its part.

    `known` is its commit object, if the coordinator has read it.

    The state is an `AdaptiveState`, a `Stateful`, or a dictionary that may contain `Stateful`
    values.

    Raises:
        CheckpointCorruptError: The bytes that a rank read are damaged.
        CheckpointError: A rank could not load its part.
    """
    reader = _StepReader(store, prefix, known, weights_only=weights_only, process_group=ranks.group)
    if isinstance(into, AdaptiveState):
        template = into.template_for(reader.read_metadata().state_dict_metadata)
    elif isinstance(into, Stateful):
        template = into.state_dict()
    else:
        template = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in into.items()
        }
    _load(template, reader, ranks)
    if isinstance(into, AdaptiveState | Stateful):
        into.load_state_dict(template)
        return
    for key in [key for key in into if key not in template]:
        del into[key]
    for key, value in template.items():
        if isinstance(existing := into.get(key), Stateful):
            existing.load_state_dict(value)
        else:
            into[key] = value


def _load(template: dict[str, Any], reader: StorageReader, ranks: Ranks) -> None:
    planner = IntoPlanner(template, reader, ranks.world_size)
    if ranks.world_size == 1:
        _load_alone(planner, reader)
    else:
        try:
            # The planner has the state. DCP uses only the keys of the dictionary passed here.
            names = dict.fromkeys(map(str, template))
            load(names, storage_reader=reader, planner=planner, process_group=ranks.group)
        except CheckpointException as exc:
            raise _join_failures(exc) from exc
    planner.fill()


def _load_alone(planner: IntoPlanner, reader: StorageReader) -> None:
    """Load as `dcp.load` does, but without its warning for one process and its wrapped errors."""
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _join_failures(error: CheckpointException) -> CheckpointError:
    """Return one error for the errors of all ranks: a CheckpointCorruptError if one rank has it."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    text = "; ".join(
        f"rank {rank}: {type(failure).__name__}: {failure}"
        for rank, failure in sorted(failures.items())
    )
    is_corrupt = any(isinstance(error, CheckpointCorruptError) for error in failures.values())
    return CheckpointCorruptError(text) if is_corrupt else CheckpointError(text)
