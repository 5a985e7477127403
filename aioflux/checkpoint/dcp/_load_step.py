"""load_into: load of a checkpoint into a state, on all ranks.

`IntoPlanner` matches the stored state with the existing nested state:

    metadata + containers  -> the stored state, nested, with a `_StoredValue` for each value
    existing state         -> matched with the stored state, key by key
    matched values         -> targets by stored name -> DCP's planner
    loaded values          -> set in the containers of the existing state

DCP's own planner turns all keys into strings. If a key of the existing state is the number 0, it
would set the loaded value under the string "0", and keep the old value under the number 0.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful

from aioflux.checkpoint._format.nesting import nest, parameter_names
from aioflux.checkpoint._load.state import as_parameter, storage_identity
from aioflux.checkpoint._save.items import has_plain_memory
from aioflux.checkpoint.dcp import StorageReader
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import LoadPlan

    from aioflux.checkpoint._load.stored_checkpoint import CommitBytes
    from aioflux.checkpoint._save.ranks import Ranks
    from aioflux.store import Store


@dataclass(frozen=True, slots=True)
class _StoredValue:
    name: str
    stored: TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, slots=True)
class _DictMatch:
    """A dictionary of the existing state, matched with a stored dictionary."""

    existing: MutableMapping[Any, Any]
    values: dict[Any, _Match]
    is_whole: bool
    """Remove the existing keys that are not in `values`."""


@dataclass(frozen=True, slots=True)
class _ListMatch:
    """A list of the existing state, matched with a stored list."""

    existing: list[Any]
    values: list[_Match]


_Match: TypeAlias = "_StoredValue | _DictMatch | _ListMatch"


class IntoPlanner(DefaultLoadPlanner):
    """Planner of a load into a nested state. After the load, `fill` sets the loaded values.

    A dictionary with string keys selects values: each of its keys must be stored, and other stored
    keys are ignored. Other containers become equal to the saved container, with everything in
    them: a list gets the saved length, a dictionary with other keys gets the saved keys, and an
    empty container gets the saved content. Tensors are loaded in place.
    """

    def __init__(self, into: dict[Any, Any], reader: StorageReader, world_size: int) -> None:
        super().__init__(flatten_state_dict=False)
        self._into = into
        self._reader = reader
        self._world_size = world_size
        self._targets: dict[str, Any] = {}
        self._parameters: set[str] = set()
        self._identities: dict[int, Any] = {}
        self._root: _Match | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep the metadata for `create_local_plan`. See base class."""
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Match the existing state with the stored state. See base class.

        Raises:
            CheckpointError: A value is not stored, or is stored in another size.
            CheckpointCorruptError: The metadata is damaged.
        """
        self._root = self._match(self._into, self._stored(), (), is_whole=False)
        super().set_up_planner(self._targets, self.metadata, self.is_coordinator)
        return super().create_local_plan()

    def fill(self) -> None:
        """Set the loaded values in the existing state."""
        assert self._root is not None
        _set_values(self._root, self.state_dict)

    @property
    def _metadata(self) -> Metadata:
        assert self.metadata is not None
        return self.metadata

    def _stored(self) -> dict[Any, Any]:
        metadata = self._metadata
        items = metadata.state_dict_metadata.items()
        values = {name: _StoredValue(name, stored) for name, stored in items}
        paths = metadata.planner_data
        if not isinstance(paths, Mapping):
            # The save stored no paths of nested values: use the nesting of the existing state.
            paths = flatten_state_dict(self._into)[1]
        try:
            self._parameters = parameter_names(self._reader.containers)
            return nest(values, paths, self._reader.containers)
        except ValueError as exc:
            raise CheckpointCorruptError(
                f"{self._uri} is damaged: its values cannot be nested: {exc}; load an earlier "
                "checkpoint"
            ) from exc

    @property
    def _uri(self) -> str:
        return self._reader.checkpoint_id

    def _match(
        self, existing: Any, stored: Any, path: tuple[Any, ...], *, is_whole: bool
    ) -> _Match:
        """Match an existing value or container with the stored one, and add targets for its values.

        `existing` is None if the state has no value at the path. If `is_whole` is True, load all
        values of a stored container, and remove all other values.
        """
        if isinstance(stored, _StoredValue):
            self._targets[stored.name] = self._target(existing, stored, path, is_whole=is_whole)
            return stored
        is_container = isinstance(existing, Mapping | list) and bool(existing)
        kind: type = list if isinstance(stored, list) else MutableMapping
        if not isinstance(existing, kind):
            if (is_container or isinstance(existing, torch.Tensor)) and not is_whole:
                raise self._mismatch(path, _differ(type(stored).__name__, existing))
            existing = None
        if isinstance(stored, list):
            old_list: list[Any] = [] if existing is None else existing
            padded = [*old_list, *[None] * len(stored)]
            return _ListMatch(
                old_list,
                [
                    self._match(old, new, (*path, index), is_whole=True)
                    for index, (old, new) in enumerate(zip(padded, stored, strict=False))
                ],
            )
        old_dict: MutableMapping[Any, Any] = type(stored)() if existing is None else existing
        has_text_keys = all(type(key) is str for key in (*old_dict, *stored))
        is_whole = is_whole or not old_dict or not has_text_keys
        return self._match_keys(old_dict, stored, path, is_whole=is_whole)

    def _match_keys(
        self,
        existing: MutableMapping[Any, Any],
        stored: dict[Any, Any],
        path: tuple[Any, ...],
        *,
        is_whole: bool,
    ) -> _DictMatch:
        values = dict(existing.items())
        # Checkpoints without stored containers, such as those of stock DCP, have string keys only.
        # There a stored "0" may mean the number 0, if the existing state has this key.
        by_text = {str(key): key for key in values}
        keys = {key: key if key in values else by_text.get(str(key), key) for key in stored}
        if not is_whole and (missing := values.keys() - set(keys.values())):
            raise self._mismatch((*path, min(missing)), "is not stored")
        matched = {
            key: self._match(values.get(key), stored[stored_key], (*path, key), is_whole=is_whole)
            for stored_key, key in keys.items()
            if is_whole or key in values
        }
        return _DictMatch(existing, matched, is_whole)

    def _target(
        self, existing: Any, value: _StoredValue, path: tuple[Any, ...], *, is_whole: bool
    ) -> Any:
        """Return the tensor to load a stored tensor into; None for a value that is not a tensor."""
        stored = value.stored
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if not isinstance(existing, torch.Tensor):
            if isinstance(existing, Mapping | list) and existing and not is_whole:
                raise self._mismatch(path, _differ("tensor", existing))
            if self._world_size > 1 and len(stored.chunks) > 1:
                raise self._mismatch(
                    path,
                    "is stored as a tensor sharded across ranks, and is not a tensor in this state",
                )
            empty = torch.empty(stored.size, dtype=stored.properties.dtype)
            return as_parameter(empty, stored) if value.name in self._parameters else empty
        if existing.shape != stored.size:
            raise self._mismatch(
                path,
                f"is stored with size {tuple(stored.size)}, and has size {tuple(existing.shape)} "
                "in this state",
            )
        # Two stored tensors in the same memory would overwrite each other.
        if is_whole and has_plain_memory(existing) and existing.numel():
            identity = storage_identity(self._metadata, value.name)
            if self._identities.setdefault(existing.data_ptr(), identity) != identity:
                return torch.empty_like(existing)
        return existing

    def _mismatch(self, path: tuple[Any, ...], reason: str) -> CheckpointError:
        name = ".".join(map(str, path))
        return CheckpointError(
            f"{self._uri} cannot be loaded into this state: {name!r} {reason}; load into a state "
            "of the saved structure, or without into="
        )


def _differ(stored_kind: str, existing: Any) -> str:
    return f"is stored as a {stored_kind}, and is a {type(existing).__name__} in this state"


def _set_values(match: _Match, loaded: Mapping[str, Any]) -> Any:
    """Set loaded values in a matched container and return it, or return a loaded value."""
    if isinstance(match, _StoredValue):
        return loaded[match.name]
    if isinstance(match, _ListMatch):
        match.existing[:] = [_set_values(child, loaded) for child in match.values]
        return match.existing
    values = {key: _set_values(child, loaded) for key, child in match.values.items()}
    if match.is_whole:
        match.existing.clear()
    for key, value in values.items():
        match.existing[key] = value
    return match.existing


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
