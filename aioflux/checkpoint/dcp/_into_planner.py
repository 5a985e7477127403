"""IntoPlanner: which stored values a load puts where in a state that is there already.

    metadata + containers -> the stored state, nested, with a `_Slot` for each value
    the state to fill     -> matched with it, key by key -> targets by stored name -> DCP's planner
    what was read         -> put into the containers of the state

DCP's own planner names the values of both states with text for keys, and puts what is no tensor
back under that text, beside a key that was a number.
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
class _Slot:
    """A stored value."""

    name: str
    stored: TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, slots=True)
class _Dict:
    """A dictionary of the filled state."""

    there: MutableMapping[Any, Any]
    """The dictionary that is filled."""
    values: dict[Any, _Node]
    is_whole: bool
    """What is not among `values` is removed."""


@dataclass(frozen=True, slots=True)
class _List:
    """A list of the filled state, which gets the stored length."""

    there: list[Any]
    values: list[_Node]


_Node: TypeAlias = "_Slot | _Dict | _List"


class IntoPlanner(DefaultLoadPlanner):
    """Plans a load into a nested state; `fill` puts what was read where it belongs.

    Dictionaries with text for keys say what is loaded: their keys must be stored, and what is
    stored beside is left out. Everything else becomes what was saved, with all that is below: lists
    get the saved length, dictionaries with numbers for keys the saved keys, and what is empty or no
    container is replaced. Tensors are filled where they are.
    """

    def __init__(self, into: dict[Any, Any], reader: StorageReader, world_size: int) -> None:
        super().__init__(flatten_state_dict=False)
        self._into = into
        self._reader = reader
        self._world_size = world_size
        self._targets: dict[str, Any] = {}
        self._parameters: set[str] = set()
        self._places: dict[int, Any] = {}
        self._root: _Node | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the metadata, which the reader has not looked at yet. See base class."""
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Match the state with what is stored. See base class.

        Raises:
            CheckpointError: Something is not stored, or in another size.
            CheckpointCorruptError: The checkpoint contradicts itself.
        """
        self._root = self._match(self._into, self._stored(), (), is_whole=False)
        super().set_up_planner(self._targets, self.metadata, self.is_coordinator)
        return super().create_local_plan()

    def fill(self) -> None:
        """Put what was read into the state."""
        assert self._root is not None
        _put(self._root, self.state_dict)

    @property
    def _metadata(self) -> Metadata:
        assert self.metadata is not None
        return self.metadata

    def _stored(self) -> dict[Any, Any]:
        """Return the stored state, with slots for its values."""
        metadata = self._metadata
        slots = {name: _Slot(name, each) for name, each in metadata.state_dict_metadata.items()}
        ways = metadata.planner_data
        if not isinstance(ways, Mapping):
            # Saved without ways: those of the state that is filled are as good.
            ways = flatten_state_dict(self._into)[1]
        try:
            self._parameters = parameter_names(self._reader.containers)
            return nest(slots, ways, self._reader.containers)
        except ValueError as exc:
            raise CheckpointCorruptError(
                f"{self._uri} is damaged: its values do not nest: {exc}; load an earlier checkpoint"
            ) from exc

    @property
    def _uri(self) -> str:
        return self._reader.checkpoint_id

    def _match(self, there: Any, stored: Any, way: tuple[Any, ...], *, is_whole: bool) -> _Node:
        """Return what becomes of a value of the state, and note the targets in it.

        Args:
            there: The value, `None` for one that is made.
            stored: What is stored for it.
            way: The keys that lead to it, for errors.
            is_whole: All that is stored is loaded, and what is not stored goes.
        """
        if isinstance(stored, _Slot):
            self._targets[stored.name] = self._target(there, stored, way, is_whole=is_whole)
            return stored
        is_named = isinstance(there, torch.Tensor) or (isinstance(there, Mapping | list) and there)
        kind: type = list if isinstance(stored, list) else MutableMapping
        if not isinstance(there, kind):
            if is_named and not is_whole:
                raise self._mismatch(
                    way, f"is a {type(stored).__name__} there, and a {type(there).__name__} here"
                )
            there = None
        if isinstance(stored, list):
            mine: list[Any] = [] if there is None else there
            padded = [*mine, *[None] * len(stored)]
            return _List(
                mine,
                [
                    self._match(one, each, (*way, at), is_whole=True)
                    for at, (one, each) in enumerate(zip(padded, stored, strict=False))
                ],
            )
        node: MutableMapping[Any, Any] = type(stored)() if there is None else there
        is_whole = is_whole or not node or not all(type(key) is str for key in (*node, *stored))
        return self._match_keys(node, stored, way, is_whole=is_whole)

    def _match_keys(
        self,
        there: MutableMapping[Any, Any],
        stored: dict[Any, Any],
        way: tuple[Any, ...],
        *,
        is_whole: bool,
    ) -> _Dict:
        values = dict(there.items())
        # Without what we tell of containers, as in checkpoints of stock DCP, numbers were stored as
        # text: then the state that is filled says what they were.
        texts = {str(key): key for key in values}
        keys = {key: key if key in values else texts.get(str(key), key) for key in stored}
        if not is_whole and (missing := values.keys() - set(keys.values())):
            raise self._mismatch((*way, min(missing)), "is not there")
        matched = {
            mine: self._match(values.get(mine), stored[key], (*way, mine), is_whole=is_whole)
            for key, mine in keys.items()
            if is_whole or mine in values
        }
        return _Dict(there, matched, is_whole)

    def _target(self, there: Any, slot: _Slot, way: tuple[Any, ...], *, is_whole: bool) -> Any:
        """Return what a stored value is read into: `None` for what is no tensor."""
        stored = slot.stored
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if not isinstance(there, torch.Tensor):
            if isinstance(there, Mapping | list) and there and not is_whole:
                raise self._mismatch(way, f"is a tensor there, and a {type(there).__name__} here")
            if self._world_size > 1 and len(stored.chunks) > 1:
                raise self._mismatch(way, "is cut across ranks there, and no tensor here to fill")
            made = torch.empty(stored.size, dtype=stored.properties.dtype)
            return as_parameter(made, stored) if slot.name in self._parameters else made
        if there.shape != stored.size:
            raise self._mismatch(
                way, f"has the size {tuple(stored.size)} there, and {tuple(there.shape)} here"
            )
        # Tensors that are stored apart must not share memory: the last would overwrite the others.
        if is_whole and has_plain_memory(there) and there.numel():
            place = storage_identity(self._metadata, slot.name)
            if self._places.setdefault(there.data_ptr(), place) != place:
                return torch.empty_like(there)
        return there

    def _mismatch(self, way: tuple[Any, ...], what: str) -> CheckpointError:
        name = ".".join(map(str, way))
        return CheckpointError(
            f"{self._uri} cannot be loaded into this state: {name!r} {what}; load into a state of "
            "the saved structure, or without into="
        )


def _put(node: _Node, read: Mapping[str, Any]) -> Any:
    """Return what a value of the state becomes."""
    if isinstance(node, _Slot):
        return read[node.name]
    if isinstance(node, _List):
        node.there[:] = [_put(each, read) for each in node.values]
        return node.there
    values = {key: _put(each, read) for key, each in node.values.items()}
    if node.is_whole:
        node.there.clear()
    for key, value in values.items():
        node.there[key] = value
    return node.there
