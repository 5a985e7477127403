"""StateSpec and its plan: torch.distributed.checkpoint plans a state of one structure once.

    state -> leaves and their shapes -> the same as last time on all ranks? -> the plan of last time
                                     -> local plans -> gathered, replicas dropped -> one for each

DCP's own planner decides, so that whatever it can shard and deduplicate is saved alike here. It
costs 40 us for each tensor, and the comparison with the last state less than one.
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
from aioflux.checkpoint._save.items import TENSOR_TYPES, check_storable, find_ties
from aioflux.checkpoint._save.job import GlobalSavePlan
from aioflux.checkpoint._save.nesting import (
    CONTAINERS,
    KINDS,
    describe_containers,
    is_value,
    merge_containers,
)
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from aioflux.checkpoint._save.ranks import Ranks

__all__ = ["CachingPlanner", "PlannedItem", "RankSavePlan", "StateSpec", "describe_state"]

_LEAF: Final = None
"""Marks a value that is no container among the keys of one that is."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The leaves of a state, and its structure, which decides on its plan."""

    state: dict[str, Any]
    """The state, with the state_dict of each stateful object in its place."""
    leaves: list[Any]
    """The values that are saved, in the order in which DCP flattens a state."""
    structure: tuple[list[Any], list[Any]]
    """Keys and lengths of the containers, and of each leaf what decides how it is sharded."""


def describe_state(state: Mapping[str, Any]) -> StateSpec:
    """Return the spec of a state; costs about a microsecond for each tensor."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a state is a dictionary such as a state_dict, or has a state_dict(); this is a "
            f"{type(state).__name__}"
        )
    plain: Any = {
        key: value
        if type(value) in TENSOR_TYPES or isinstance(value, dict) or not isinstance(value, Stateful)
        else value.state_dict()
        for key, value in state.items()
    }
    kind: Any = type(state)
    if kind in KINDS:
        plain = kind(plain)
    keys: list[Any] = []
    leaves: list[Any] = []
    _walk_mapping(plain, keys, leaves)
    return StateSpec(plain, leaves, (keys, [_describe_leaf(leaf) for leaf in leaves]))


def _walk_mapping(node: Mapping[Any, Any], keys: list[Any], leaves: list[Any]) -> None:
    names = tuple(node)
    keys.append(names)
    # 1, True and 1.0 are equal, and not the same key.
    if not all(type(name) is str for name in names):
        keys.append(tuple(map(type, names)))
    if type(node) is not dict:
        keys.append(type(node))
    for value in node.values():
        if type(value) in TENSOR_TYPES:
            keys.append(_LEAF)
            leaves.append(value)
        else:
            _walk(value, keys, leaves)


def _walk(value: Any, keys: list[Any], leaves: list[Any]) -> None:
    if isinstance(value, Mapping):
        _walk_mapping(value, keys, leaves)
    elif isinstance(value, list) and not is_value(value):
        keys.append(len(value))
        for each in value:
            _walk(each, keys, leaves)
    else:
        keys.append(_LEAF)
        leaves.append(value)


def _describe_leaf(leaf: Any) -> Any:
    """Return what decides how a leaf is sharded; the same for all values that are no tensors."""
    kind = type(leaf)
    if kind in TENSOR_TYPES:
        return kind, leaf.dtype, leaf.shape, leaf.layout, leaf.requires_grad
    if kind is DTensor:
        is_parameter = isinstance(leaf, torch.nn.Parameter)
        return leaf.dtype, leaf.shape, leaf.placements, leaf.device_mesh, is_parameter
    if isinstance(leaf, torch.Tensor):
        return kind, leaf.dtype, leaf.shape, leaf.layout
    return None


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One item that this rank writes."""

    index: MetadataIndex
    """Its name, and its place in a sharded tensor."""
    is_tensor: bool
    """Whether it is a tensor, or a value that is pickled."""
    leaf: int
    """Its index among the leaves of the spec; -1 if only DCP's planner finds it."""


@dataclass(slots=True)
class RankSavePlan:
    """The plan of one save on this rank."""

    number: int
    """The same for two saves with the same plan."""
    items: tuple[PlannedItem, ...]
    """The items that this rank writes, tensors first."""
    tensors: list[torch.Tensor]
    """The tensors of these items: this rank's part of each."""
    values: list[Any]
    """The values of the other items."""
    global_plan: GlobalSavePlan | None
    """The plan of all ranks, on the coordinator."""


@dataclass(frozen=True, slots=True)
class _CachedPlan:
    structure: tuple[list[Any], list[Any]]
    number: int
    items: tuple[PlannedItem, ...]
    global_plan: GlobalSavePlan | None


class CachingPlanner:
    """Plans saves, and keeps the last plan."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._cached: _CachedPlan | None = None
        self._number = 0

    def is_known(self, spec: StateSpec) -> bool:
        """Return whether the last plan of this rank fits."""
        return self._cached is not None and self._cached.structure == spec.structure

    def plan(self, spec: StateSpec, *, is_known: bool) -> RankSavePlan:
        """Return the plan of a state.

        One that `is_known` on every rank is used without communication.

        Raises:
            CheckpointError: A rank has a state that DCP cannot plan.
        """
        if is_known and self._cached is not None:
            return _pick(self._cached, spec, None)
        planner = DefaultSavePlanner()
        report = _RankReport(SavePlan([]))
        try:
            report.containers = describe_containers(spec.state)
            planner.set_up_planner(spec.state, None, self._ranks.is_coordinator)
            for name, value in planner.state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_storable(name, value)
            report.plan = planner.create_local_plan()
            if self._ranks.world_size > 1:
                report.ties = _tied_names(planner.state_dict)
        except Exception as exc:
            report.failure = f"rank {self._ranks.rank}: {type(exc).__name__}: {exc}"
        final, global_plan, failure = self._exchange(planner, report)
        if failure:
            raise CheckpointError(f"the state cannot be planned: {failure}")
        items = _ordered(planner.finish_plan(final).items)
        self._number += 1
        found = _find_leaves(items, planner, spec)
        cached = _CachedPlan(spec.structure, self._number, found, global_plan)
        is_ours = all(each.leaf >= 0 for each in found)
        self._cached = cached if is_ours else None
        return _pick(cached, spec, planner)

    def _exchange(
        self, planner: DefaultSavePlanner, report: _RankReport
    ) -> tuple[SavePlan, GlobalSavePlan | None, str]:
        reports = self._ranks.gather(report)
        answers: list[tuple[SavePlan, str]] = []
        global_plan: GlobalSavePlan | None = None
        if self._ranks.is_coordinator:
            failure = "; ".join(each.failure for each in reports if each.failure)
            plans = [each.plan for each in reports]
            if not failure:
                try:
                    plans, metadata = planner.create_global_plan(plans)
                    plans = _join_tied(plans, [each.ties for each in reports])
                    containers = merge_containers(each.containers for each in reports)
                    global_plan = _global_plan(metadata, plans, containers)
                except Exception as exc:
                    failure = f"{type(exc).__name__}: {exc}"
            answers = [(plan, failure) for plan in plans]
        final, failure = self._ranks.scatter(answers)
        return final, global_plan, failure


@dataclass(slots=True)
class _RankReport:
    """The local plan of a rank, for the coordinator."""

    plan: SavePlan
    containers: str = ""
    """Types of containers, which the plan lacks, by `describe_containers`."""
    ties: dict[str, str] = field(default_factory=dict)
    """Names of tensors that are tied to an earlier one, with the name of that."""
    failure: str = ""


def _tied_names(values: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name, value in values.items() if type(value) in TENSOR_TYPES]
    ties = find_ties([values[name] for name in names])
    return {names[number]: names[first] for number, first in ties.items()}


def _join_tied(plans: list[SavePlan], ties: list[dict[str, str]]) -> list[SavePlan]:
    """Return plans in which the rank that writes a tensor writes those that are tied to it, too.

    DCP assigns each tensor that several ranks have to any one of them.
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


def _global_plan(metadata: Metadata, plans: list[SavePlan], containers: str) -> GlobalSavePlan:
    metadata.storage_meta = StorageMeta()
    metadata.version = "1.0.0"
    orders = (tuple(pickle_index(i.index) for i in _ordered(plan.items)) for plan in plans)
    return GlobalSavePlan(pickle_metadata(metadata), tuple(orders), {CONTAINERS: containers})


def _ordered(items: list[WriteItem]) -> list[WriteItem]:
    """Return items in the order of the data object: tensors, then values, which vary in size."""
    return sorted(items, key=lambda item: item.type is WriteItemType.BYTE_IO)


def _find_leaves(
    items: list[WriteItem], planner: DefaultSavePlanner, spec: StateSpec
) -> tuple[PlannedItem, ...]:
    """Return items with the leaves of the spec that they are."""
    flat = planner.state_dict
    leaves = spec.leaves
    is_alike = len(flat) == len(leaves) and all(
        value is other for value, other in zip(leaves, flat.values(), strict=True)
    )
    places = {name: at for at, name in enumerate(flat)} if is_alike else {}
    found = []
    for item in items:
        at = places.get(item.index.fqn, -1)
        is_tensor = item.type is not WriteItemType.BYTE_IO
        is_direct = at >= 0 and (
            not is_tensor or type(leaves[at]) is DTensor or _is_one_piece(leaves[at])
        )
        found.append(PlannedItem(item.index, is_tensor, at if is_direct else -1))
    return tuple(found)


def _is_one_piece(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not hasattr(leaf, "__create_write_items__")


def _pick(cached: _CachedPlan, spec: StateSpec, planner: DefaultSavePlanner | None) -> RankSavePlan:
    """Return a plan with its tensors and values, taken out of the state."""
    leaves = spec.leaves
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    with torch.no_grad():  # so that the local part of a DTensor comes without a graph
        for each in cached.items:
            if each.leaf < 0:
                assert planner is not None
                value = planner.lookup_object(each.index)
            else:
                value = leaves[each.leaf]
                if type(value) is DTensor:
                    value = value.to_local()
            (tensors if each.is_tensor else values).append(value)
    return RankSavePlan(cached.number, cached.items, tensors, values, cached.global_plan)
