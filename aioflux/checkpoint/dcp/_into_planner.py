"""IntoPlanner: a load into an existing nested state.

    metadata + containers -> the stored state, nested, with a `_StoredValue` for each value
    existing state        -> matched with it, key by key -> targets by stored name -> DCP's planner
    loaded values         -> set in the containers of the state

DCP's own planner turns the keys of both states into strings. It would set a value that is no tensor
under the string "0", and keep the old one under the number 0.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from aioflux.checkpoint._load.state import as_parameter, storage_identity
from aioflux.checkpoint._save.items import has_plain_memory
from aioflux.checkpoint._save.nesting import nest, parameter_names
from aioflux.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import LoadPlan

    from aioflux.checkpoint.dcp import StorageReader

__all__ = ["IntoPlanner"]


@dataclass(frozen=True, slots=True)
class _StoredValue:
    """A stored value."""

    name: str
    stored: TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, slots=True)
class _DictMatch:
    """A dictionary of the state, matched with a stored one."""

    existing: MutableMapping[Any, Any]
    values: dict[Any, _Match]
    is_whole: bool
    """Keys that are not among `values` are removed."""


@dataclass(frozen=True, slots=True)
class _ListMatch:
    """A list of the state, which gets the stored length."""

    existing: list[Any]
    values: list[_Match]


_Match: TypeAlias = "_StoredValue | _DictMatch | _ListMatch"


class IntoPlanner(DefaultLoadPlanner):
    """Plans a load into a nested state; `fill` sets the loaded values.

    Dictionaries with text for keys select what is loaded: their keys must be stored, and other
    stored keys are ignored. Everything else becomes what was saved, with all values below: lists
    get the saved length, dictionaries with numbers for keys the saved keys, and empty containers
    and values are replaced. Tensors are loaded in place.
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
        """Keep the metadata, which `create_local_plan` needs. See base class."""
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Match the state with the stored one. See base class.

        Raises:
            CheckpointError: A value is not stored, or is of another size.
            CheckpointCorruptError: The checkpoint contradicts itself.
        """
        self._root = self._match(self._into, self._stored(), (), is_whole=False)
        super().set_up_planner(self._targets, self.metadata, self.is_coordinator)
        return super().create_local_plan()

    def fill(self) -> None:
        """Set the loaded values in the state."""
        assert self._root is not None
        _set_values(self._root, self.state_dict)

    @property
    def _metadata(self) -> Metadata:
        assert self.metadata is not None
        return self.metadata

    def _stored(self) -> dict[Any, Any]:
        """Return the stored state, nested."""
        metadata = self._metadata
        values = {name: _StoredValue(name, e) for name, e in metadata.state_dict_metadata.items()}
        paths = metadata.planner_data
        if not isinstance(paths, Mapping):
            # The stored state was not flattened by DCP: use the nesting of the existing state.
            paths = flatten_state_dict(self._into)[1]
        try:
            self._parameters = parameter_names(self._reader.containers)
            return nest(values, paths, self._reader.containers)
        except ValueError as exc:
            raise CheckpointCorruptError(
                f"{self._uri} is damaged: its values do not nest: {exc}; load an earlier checkpoint"
            ) from exc

    @property
    def _uri(self) -> str:
        return self._reader.checkpoint_id

    def _match(
        self, existing: Any, stored: Any, path: tuple[Any, ...], *, is_whole: bool
    ) -> _Match:
        """Match a value of the state, or None, with a stored one, and add its targets.

        `is_whole`: load all stored values below it, and remove all others.
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
            mine: list[Any] = [] if existing is None else existing
            padded = [*mine, *[None] * len(stored)]
            return _ListMatch(
                mine,
                [
                    self._match(one, each, (*path, at), is_whole=True)
                    for at, (one, each) in enumerate(zip(padded, stored, strict=False))
                ],
            )
        node: MutableMapping[Any, Any] = type(stored)() if existing is None else existing
        is_whole = is_whole or not node or not all(type(key) is str for key in (*node, *stored))
        return self._match_keys(node, stored, path, is_whole=is_whole)

    def _match_keys(
        self,
        existing: MutableMapping[Any, Any],
        stored: dict[Any, Any],
        path: tuple[Any, ...],
        *,
        is_whole: bool,
    ) -> _DictMatch:
        values = dict(existing.items())
        # If the commit has no containers, as in checkpoints of stock DCP, all keys were stored as
        # strings: the keys of the existing state show which of them are numbers.
        texts = {str(key): key for key in values}
        keys = {key: key if key in values else texts.get(str(key), key) for key in stored}
        if not is_whole and (missing := values.keys() - set(keys.values())):
            raise self._mismatch((*path, min(missing)), "is not stored")
        matched = {
            mine: self._match(values.get(mine), stored[key], (*path, mine), is_whole=is_whole)
            for key, mine in keys.items()
            if is_whole or mine in values
        }
        return _DictMatch(existing, matched, is_whole)

    def _target(
        self, existing: Any, value: _StoredValue, path: tuple[Any, ...], *, is_whole: bool
    ) -> Any:
        """Return the tensor that a stored value is loaded into; None for another value."""
        stored = value.stored
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if not isinstance(existing, torch.Tensor):
            if isinstance(existing, Mapping | list) and existing and not is_whole:
                raise self._mismatch(path, _differ("tensor", existing))
            if self._world_size > 1 and len(stored.chunks) > 1:
                raise self._mismatch(
                    path, "is sharded across ranks, and is no tensor in this state"
                )
            made = torch.empty(stored.size, dtype=stored.properties.dtype)
            return as_parameter(made, stored) if value.name in self._parameters else made
        if existing.shape != stored.size:
            raise self._mismatch(
                path,
                f"is stored in size {tuple(stored.size)}, and has {tuple(existing.shape)} here",
            )
        # Tensors that are stored apart must not share memory: the last would overwrite the others.
        if is_whole and has_plain_memory(existing) and existing.numel():
            identity = storage_identity(self._metadata, value.name)
            if self._identities.setdefault(existing.data_ptr(), identity) != identity:
                return torch.empty_like(existing)
        return existing

    def _mismatch(self, path: tuple[Any, ...], what: str) -> CheckpointError:
        name = ".".join(map(str, path))
        return CheckpointError(
            f"{self._uri} cannot be loaded into this state: {name!r} {what}; load into a state of "
            "the saved structure, or without into="
        )


def _differ(stored_kind: str, existing: Any) -> str:
    return f"is stored as a {stored_kind}, and is a {type(existing).__name__} in this state"


def _set_values(node: _Match, read: Mapping[str, Any]) -> Any:
    """Return a matched value or container with the loaded values."""
    if isinstance(node, _StoredValue):
        return read[node.name]
    if isinstance(node, _ListMatch):
        node.existing[:] = [_set_values(each, read) for each in node.values]
        return node.existing
    values = {key: _set_values(each, read) for key, each in node.values.items()}
    if node.is_whole:
        node.existing.clear()
    for key, value in values.items():
        node.existing[key] = value
    return node.existing
