"""Who writes what: plans of torch.distributed.checkpoint, made once for a state of one structure.

    state -> leaves and their shapes -> the same as last time on all ranks? -> the plan of last time
                                     -> local plans -> gathered, replicas dropped -> one for each

DCP's own planner decides, so that whatever it can shard and deduplicate is saved alike here. Asking
it costs 40 us for each tensor, and looking whether anything changed less than one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from aioflux.checkpoint._format.dcp_metadata import pickle_index, pickle_metadata
from aioflux.checkpoint._save.items import check_storable, find_ties
from aioflux.checkpoint._save.job import Whole
from aioflux.checkpoint._save.nesting import (
    CONTAINERS,
    KINDS,
    merge_containers,
    tell_containers,
)
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from aioflux.checkpoint._save.ranks import Ranks

__all__ = ["Planned", "Planner", "Resolved", "Survey", "survey"]

_LEAF: Final = None
"""Stands among keys for what is no container: which of several is one must not be mistaken."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@dataclass(frozen=True, slots=True)
class Survey:
    """A state seen from above: what it holds, and what decides on its plan."""

    state: dict[str, Any]
    """The state, with the state_dict of each stateful object in its place."""
    leaves: list[Any]
    """What is saved, in the order in which DCP flattens a state."""
    structure: tuple[list[Any], list[Any]]
    """Keys and lengths of the containers, and what tells of each leaf how it is cut."""


def survey(state: Mapping[str, Any]) -> Survey:
    """Look at a state; costs about a microsecond for each tensor."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a state is a dictionary such as a state_dict, or has a state_dict(); this is a "
            f"{type(state).__name__}"
        )
    plain: Any = {
        key: value
        if type(value) in _PLAIN or isinstance(value, dict) or not isinstance(value, Stateful)
        else value.state_dict()
        for key, value in state.items()
    }
    kind: Any = type(state)
    if kind in KINDS:
        plain = kind(plain)
    keys: list[Any] = []
    leaves: list[Any] = []
    _walk_mapping(plain, keys, leaves)
    return Survey(plain, leaves, (keys, [_tell(leaf) for leaf in leaves]))


def _walk_mapping(node: Mapping[Any, Any], keys: list[Any], leaves: list[Any]) -> None:
    names = tuple(node)
    keys.append(names)
    # 1, True and 1.0 are equal, and not the same key.
    if not all(type(name) is str for name in names):
        keys.append(tuple(map(type, names)))
    if type(node) is not dict:
        keys.append(type(node))
    for value in node.values():
        if type(value) in _PLAIN:
            keys.append(_LEAF)
            leaves.append(value)
        else:
            _walk(value, keys, leaves)


def _walk(value: Any, keys: list[Any], leaves: list[Any]) -> None:
    if isinstance(value, Mapping):
        _walk_mapping(value, keys, leaves)
    elif isinstance(value, list) and not _is_whole(value):
        keys.append(len(value))
        for each in value:
            _walk(each, keys, leaves)
    else:
        keys.append(_LEAF)
        leaves.append(value)


def _is_whole(values: list[Any]) -> bool:
    """Tell whether DCP saves a list as one value: no tensor, mapping or such list is in it."""
    for each in values:
        if isinstance(each, torch.Tensor | Mapping):
            return False
        if isinstance(each, list) and not _is_whole(each):
            return False
    return True


def _tell(leaf: Any) -> Any:
    """Return what decides how a leaf is cut; the same for all values that are no tensors."""
    kind = type(leaf)
    if kind in _PLAIN:
        return kind, leaf.dtype, leaf.shape, leaf.layout, leaf.requires_grad
    if kind is DTensor:
        is_parameter = isinstance(leaf, torch.nn.Parameter)
        return leaf.dtype, leaf.shape, leaf.placements, leaf.device_mesh, is_parameter
    if isinstance(leaf, torch.Tensor):
        return kind, leaf.dtype, leaf.shape, leaf.layout
    return None


@dataclass(frozen=True, slots=True)
class Planned:
    """One thing that this rank writes."""

    index: MetadataIndex
    """Its name, and where it lies in a tensor that is cut."""
    is_tensor: bool
    """Whether it is a tensor, or a value that is pickled."""
    leaf: int
    """Which of the leaves of a survey it is; -1 where only DCP's planner finds it."""


@dataclass(slots=True)
class Resolved:
    """The plan of one save."""

    number: int
    """The same for two saves with the same plan."""
    items: tuple[Planned, ...]
    """What this rank writes, tensors first."""
    tensors: list[torch.Tensor]
    """Those tensors: this rank's part of each."""
    values: list[Any]
    """And what else it writes."""
    whole: Whole | None
    """The plan of all ranks, on the coordinator."""


@dataclass(frozen=True, slots=True)
class _Cached:
    structure: tuple[list[Any], list[Any]]
    number: int
    items: tuple[Planned, ...]
    whole: Whole | None


class Planner:
    """Plans saves, and remembers the last plan."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._cached: _Cached | None = None
        self._number = 0

    def is_known(self, seen: Survey) -> bool:
        """Tell whether the last plan of this rank fits."""
        return self._cached is not None and self._cached.structure == seen.structure

    def resolve(self, seen: Survey, *, is_known: bool) -> Resolved:
        """Return the plan of a state.

        Args:
            seen: The state.
            is_known: On every rank the last plan fits, and so it is used and nobody is asked.

        Raises:
            CheckpointError: A rank has a state that DCP cannot plan.
        """
        if is_known and self._cached is not None:
            return _pick(self._cached, seen, None)
        planner = DefaultSavePlanner()
        mine = _Told(SavePlan([]))
        try:
            mine.containers = tell_containers(seen.state)
            planner.set_up_planner(seen.state, None, self._ranks.is_coordinator)
            for name, value in planner.state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_storable(name, value)
            mine.plan = planner.create_local_plan()
            if self._ranks.world_size > 1:
                mine.ties = _tied_names(planner.state_dict)
        except Exception as exc:
            mine.failure = f"rank {self._ranks.rank}: {type(exc).__name__}: {exc}"
        final, whole, failure = self._exchange(planner, mine)
        if failure:
            raise CheckpointError(f"the state cannot be planned: {failure}")
        items = _ordered(planner.finish_plan(final).items)
        self._number += 1
        found = _find(items, planner, seen)
        planned = _Cached(seen.structure, self._number, found, whole)
        is_ours = all(each.leaf >= 0 for each in found)
        self._cached = planned if is_ours else None
        return _pick(planned, seen, planner)

    def _exchange(
        self, planner: DefaultSavePlanner, mine: _Told
    ) -> tuple[SavePlan, Whole | None, str]:
        told = self._ranks.gather(mine)
        answers: list[tuple[SavePlan, str]] = []
        whole: Whole | None = None
        if self._ranks.is_coordinator:
            failure = "; ".join(each.failure for each in told if each.failure)
            plans = [each.plan for each in told]
            if not failure:
                try:
                    plans, metadata = planner.create_global_plan(plans)
                    plans = _join_tied(plans, [each.ties for each in told])
                    containers = merge_containers(each.containers for each in told)
                    whole = _whole(metadata, plans, containers)
                except Exception as exc:
                    failure = f"{type(exc).__name__}: {exc}"
            answers = [(plan, failure) for plan in plans]
        final, failure = self._ranks.scatter(answers)
        return final, whole, failure


@dataclass(slots=True)
class _Told:
    """What a rank tells the coordinator of its state."""

    plan: SavePlan
    containers: str = ""
    """What the plan does not tell of dictionaries, by `tell_containers`."""
    ties: dict[str, str] = field(default_factory=dict)
    """Names of tensors that are tied to an earlier one, and its name."""
    failure: str = ""


def _tied_names(values: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name, value in values.items() if type(value) in _PLAIN]
    ties = find_ties([values[name] for name in names])
    return {names[number]: names[first] for number, first in ties.items()}


def _join_tied(plans: list[SavePlan], ties: list[dict[str, str]]) -> list[SavePlan]:
    """Return plans in which the rank that writes a tensor writes those that are tied to it, too.

    DCP gives each tensor that several ranks have to any one of them.

    Args:
        plans: What each rank writes.
        ties: What each rank told of its own tensors.
    """
    owners = {
        item.index.fqn: rank
        for rank, plan in enumerate(plans)
        for item in plan.items
        if item.type is WriteItemType.TENSOR
    }
    moves = {
        name: rank
        for rank, tied in enumerate(ties)
        for name, first in tied.items()
        if owners.get(first) == rank != owners.get(name, rank)
    }
    if not moves:
        return plans
    moved: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            is_whole = item.type is WriteItemType.TENSOR
            moved[moves.get(item.index.fqn, rank) if is_whole else rank].append(item)
    return [
        dataclasses.replace(plan, items=items) for plan, items in zip(plans, moved, strict=True)
    ]


def _whole(metadata: Metadata, plans: list[SavePlan], containers: str) -> Whole:
    metadata.storage_meta = StorageMeta()
    metadata.version = "1.0.0"
    orders = (tuple(pickle_index(i.index) for i in _ordered(plan.items)) for plan in plans)
    return Whole(pickle_metadata(metadata), tuple(orders), {CONTAINERS: containers})


def _ordered(items: list[WriteItem]) -> list[WriteItem]:
    """Return what a rank writes in the order of its object: tensors, then what varies in size."""
    return sorted(items, key=lambda item: item.type is WriteItemType.BYTE_IO)


def _find(items: list[WriteItem], planner: DefaultSavePlanner, seen: Survey) -> tuple[Planned, ...]:
    """Find the leaves that planned items are."""
    flat = planner.state_dict
    leaves = seen.leaves
    is_alike = len(flat) == len(leaves) and all(
        mine is theirs for mine, theirs in zip(leaves, flat.values(), strict=True)
    )
    places = {name: at for at, name in enumerate(flat)} if is_alike else {}
    found = []
    for item in items:
        at = places.get(item.index.fqn, -1)
        is_tensor = item.type is not WriteItemType.BYTE_IO
        is_direct = at >= 0 and (
            not is_tensor or type(leaves[at]) is DTensor or _is_one_piece(leaves[at])
        )
        found.append(Planned(item.index, is_tensor, at if is_direct else -1))
    return tuple(found)


def _is_one_piece(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not hasattr(leaf, "__create_write_items__")


def _pick(planned: _Cached, seen: Survey, planner: DefaultSavePlanner | None) -> Resolved:
    """Return a plan with what it is about taken out of the state."""
    leaves = seen.leaves
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    with torch.no_grad():  # so that the local part of a DTensor comes without a graph
        for each in planned.items:
            if each.leaf < 0:
                assert planner is not None
                value = planner.lookup_object(each.index)
            else:
                value = leaves[each.leaf]
                if type(value) is DTensor:
                    value = value.to_local()
            (tensors if each.is_tensor else values).append(value)
    return Resolved(planned.number, planned.items, tensors, values, planned.whole)
