"""State of an epoch: the progress of its readers, from which another run can resume the epoch.

A state contains the number of the epoch, the settings of its order, and its phases. A phase is a
part of the epoch that was read by the same number of ranks and workers. When a phase starts, the
unread objects are shared among its readers. When it ends, each reader has read a part of its share.
States do not store shares. Shares are computed from the order of the epoch and the phases:

    order of the epoch -> phase 1 shares all objects; its readers read some of them
      -> phase 2 shares the unread objects among another number of readers; ...

To resume with the same numbers of ranks and workers, a reader needs its own progress only. With
other numbers every reader needs the progress of all readers, in a state from `merge_states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from aioflux.data._sharding import Reader, shard

if TYPE_CHECKING:
    from aioflux.data._sharding import Tail

STATE_KEY: Final = "aioflux_state"
"""Key of the version in a state; only states have this key."""
VERSION: Final = 1


class RemainingRecords(NamedTuple):
    """Unread records of one object."""

    first: int | None
    """All records from this record_index on are unread; None if only `extra` is unread."""
    extra: tuple[int, ...] = ()
    """Indices of further unread records, which were in a shuffle buffer when progress was saved."""

    def has(self, record_index: int) -> bool:
        """Return whether a record is unread."""
        return (self.first is not None and record_index >= self.first) or record_index in self.extra

    def after(self, record_index: int) -> RemainingRecords:
        """Return the unread records with a greater index than `record_index`."""
        first = None if self.first is None else max(self.first, record_index + 1)
        return RemainingRecords(first, tuple(index for index in self.extra if index > record_index))


ALL_RECORDS: Final = RemainingRecords(0)


@dataclass(slots=True)
class ShareProgress:
    """The part of a share that its reader has read, by share_index."""

    num_started: int = 0
    """All objects before this share_index were started, except the objects in `skipped`."""
    skipped: set[int] = field(default_factory=set)
    """Objects before `num_started` that were not started, because later objects arrived first."""
    partial: dict[int, RemainingRecords] = field(default_factory=dict)
    """Unread records of objects that were started and not finished."""

    def mark_started(self, share_index: int) -> None:
        """Mark an object as started; without an entry in `partial` it counts as read."""
        if share_index >= self.num_started:
            self.skipped.update(range(self.num_started, share_index))
            self.num_started = share_index + 1
        else:
            self.skipped.discard(share_index)

    def remaining(self, share: Share) -> Iterator[tuple[int, RemainingRecords]]:
        """Yield the share_index and the unread records of each object that is not finished."""
        yield from sorted(self.partial.items())
        for share_index in sorted(self.skipped):
            yield share_index, share.partial.get(share_index, ALL_RECORDS)
        for share_index in range(self.num_started, len(share.listing_indices)):
            yield share_index, share.partial.get(share_index, ALL_RECORDS)

    def pack(self) -> list[Any]:
        """Return the progress as lists and numbers, for a state."""
        partial = [
            [share_index, remaining.first, list(remaining.extra)]
            for share_index, remaining in sorted(self.partial.items())
        ]
        return [self.num_started, sorted(self.skipped), partial]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> ShareProgress:
        """Restore the result of `pack`."""
        num_started, skipped, partial = packed
        unread = {index: RemainingRecords(first, tuple(extra)) for index, first, extra in partial}
        return cls(num_started, set(skipped), unread)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an epoch that was read by the same number of ranks and workers."""

    world_size: int
    """Number of ranks."""
    num_workers: int
    """Number of workers of each rank; 1 for ranks without workers."""
    readers: Mapping[tuple[int, int], ShareProgress]
    """Known progress of readers, by (rank, worker_id)."""

    def pack(self) -> list[Any]:
        """Return the phase as lists and numbers, for a state."""
        packed = [[*ids, *progress.pack()] for ids, progress in sorted(self.readers.items())]
        return [self.world_size, self.num_workers, packed]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Phase:
        """Restore the result of `pack`."""
        world_size, num_workers, readers = packed
        progress = {(entry[0], entry[1]): ShareProgress.unpack(entry[2:]) for entry in readers}
        return cls(world_size, num_workers, progress)

    def has_numbers_of(self, reader: Reader) -> bool:
        """Return whether `world_size` and `num_workers` are the same as the reader's."""
        return (self.world_size, self.num_workers) == (reader.world_size, reader.num_workers)

    def missing(self) -> list[tuple[int, int]]:
        """Return the (rank, worker_id) of readers whose progress is unknown."""
        expected = [(r, w) for r in range(self.world_size) for w in range(self.num_workers)]
        return [ids for ids in expected if ids not in self.readers]


@dataclass(frozen=True, slots=True)
class Share:
    """Objects that one reader reads in an epoch, or in the rest of an epoch."""

    listing_indices: torch.Tensor
    """The listing_index of each share_index."""
    partial: Mapping[int, RemainingRecords]
    """Unread records by share_index, of objects that an earlier phase read in part."""


@dataclass(frozen=True, slots=True)
class _UnreadPart:
    """Unread objects at the start of a phase; here an epoch_index is a position among these."""

    listing_indices: torch.Tensor
    """The listing_index of each epoch_index."""
    partial: dict[int, RemainingRecords]
    """Unread records by epoch_index, of objects that an earlier phase read in part."""

    def share_of(
        self, reader: Reader, tail: Tail, sizes: Callable[[torch.Tensor], list[int]] | None
    ) -> tuple[torch.Tensor, Share]:
        """Return the epoch_index of each share_index, and the share of one reader."""
        count = len(self.listing_indices)
        if not count:
            return self.listing_indices, Share(self.listing_indices, {})
        weights = None if sizes is None else sizes(self.listing_indices)
        epoch_indices = shard(count, reader, tail=tail, sizes=weights)
        partial: dict[int, RemainingRecords] = {}
        if self.partial:
            unread = (self.partial.get(index % count) for index in epoch_indices.tolist())
            partial = {index: records for index, records in enumerate(unread) if records}
        return epoch_indices, Share(self.listing_indices[epoch_indices % count], partial)


def plan_share(
    order: torch.Tensor,
    phases: Sequence[Phase],
    reader: Reader,
    *,
    tail: Tail,
    sizes: Callable[[torch.Tensor], list[int]] | None = None,
) -> tuple[tuple[Phase, ...], Share, ShareProgress]:
    """Return the share of a reader in the rest of an epoch.

    Args:
        order: The listing_index of each epoch_index.
        phases: Phases of the epoch so far; empty to start the epoch.
        reader: Reader whose share is returned.
        tail: As in `shard`.
        sizes: Returns the sizes of objects by listing_index, to share by bytes; None shares by
            count.

    Returns:
        The phases that have ended, the reader's share, and its progress in this share.

    Raises:
        ValueError: The number of ranks or workers changed, and the progress of a reader is unknown.
    """
    unread = _UnreadPart(order, {})
    for number, phase in enumerate(phases):
        ids = (reader.rank, reader.worker_id)
        if number == len(phases) - 1 and phase.has_numbers_of(reader) and ids in phase.readers:
            _, share = unread.share_of(reader, tail, sizes)
            return tuple(phases[:number]), share, phase.readers[ids]
        if missing := phase.missing():
            rank, worker_id = missing[0]
            raise ValueError(
                f"the state was saved with world_size={phase.world_size} and num_workers="
                f"{phase.num_workers}, but this run has world_size={reader.world_size} and "
                f"num_workers={reader.num_workers}; to resume with other numbers, load the result "
                f"of merge_states([...]) with the states of all ranks and workers ({len(missing)} "
                f"missing, first rank {rank} worker {worker_id})"
            )
        unread = _unread_after(unread, phase, tail, sizes)
    _, share = unread.share_of(reader, tail, sizes)
    return tuple(phases), share, ShareProgress()


def _unread_after(
    unread: _UnreadPart,
    phase: Phase,
    tail: Tail,
    sizes: Callable[[torch.Tensor], list[int]] | None,
) -> _UnreadPart:
    """Return the objects and records that are unread after a phase."""
    count = len(unread.listing_indices)
    is_unread = torch.ones(count, dtype=torch.bool)
    partial: dict[int, RemainingRecords] = dict(unread.partial)
    for (rank, worker_id), progress in phase.readers.items():
        reader = Reader(rank, phase.world_size, worker_id, phase.num_workers)
        epoch_indices, _ = unread.share_of(reader, tail, sizes)
        is_read = torch.zeros(len(epoch_indices), dtype=torch.bool)
        is_read[: progress.num_started] = True
        is_read[sorted(progress.skipped)] = False
        is_read[sorted(progress.partial)] = False
        # With tail="pad", an epoch_index from `count` on repeats an object. Ignore repetitions.
        is_read &= epoch_indices < count
        is_unread[epoch_indices[is_read]] = False
        for share_index, remaining in progress.partial.items():
            if (epoch_index := int(epoch_indices[share_index])) < count:
                partial[epoch_index] = remaining
    unread_indices = torch.nonzero(is_unread).flatten()
    unread_records: dict[int, RemainingRecords] = {}
    if partial:
        in_order = (partial.get(epoch_index) for epoch_index in unread_indices.tolist())
        unread_records = {index: records for index, records in enumerate(in_order) if records}
    return _UnreadPart(unread.listing_indices[unread_indices], unread_records)


def check_state(state: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Check that a state has the current version and the entries of `header`.

    Raises:
        ValueError: `state` is not a state, or was saved for other objects or another order.
    """
    if state.get(STATE_KEY) != VERSION:
        raise ValueError(
            "this is not a state of a dataset of this version of aioflux; pass the result of "
            "state_dict() or merge_states()"
        )
    for name, value in header.items():
        if state.get(name) != value:
            hint = (
                "the objects or their order changed; to keep both, save a manifest of the listing "
                "and build the dataset with from_manifest()"
                if name in {"num_objects", "listing"}
                else f"build the dataset with {name}={state.get(name)!r}"
            )
            raise ValueError(
                f"the state was saved with {name}={state.get(name)!r}, but this dataset has "
                f"{name}={value!r}: {hint}"
            )


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks and workers into one state, which every rank can load.

    The merged state can be loaded by another number of ranks and workers. The unread objects are
    shared among the new readers. Each sample is still read once, apart from the few objects that
    `tail` repeats or leaves out.

    Args:
        states: `dataset.state_dict()` of each rank; or `loader.state_dict()` of the torchdata
            `StatefulDataLoader` of each rank, which contains the states of its workers.

    Raises:
        ValueError: `states` contains no state, or states of different runs or times.
    """
    inner = [inner_state for state in states for inner_state in _states_in(state)]
    # Ignore ranks that had not started to read: their states do not contain the last phase.
    num_phases = max((len(state["phases"]) for state in inner), default=0)
    inner = [state for state in inner if len(state["phases"]) == num_phases]
    if not inner:
        raise ValueError("none of the states to merge is a state of a dataset of aioflux")
    first = inner[0]
    for state in inner[1:]:
        for name in first:
            is_same = (
                first[name][:-1] == state[name][:-1]
                if name == "phases"
                else (first[name] == state.get(name))
            )
            if not is_same:
                raise ValueError(
                    f"states of different runs or times cannot be merged: {name} is "
                    f"{first[name]!r} in one and {state.get(name)!r} in another"
                )
    if not num_phases:
        return dict(first)
    return {**first, "phases": [*first["phases"][:-1], _merge_last_phases(inner).pack()]}


def _merge_last_phases(states: Sequence[Mapping[str, Any]]) -> Phase:
    phases = [Phase.unpack(state["phases"][-1]) for state in states]
    world_size, num_workers = phases[0].world_size, phases[0].num_workers
    readers: dict[tuple[int, int], ShareProgress] = {}
    for phase in phases:
        if (phase.world_size, phase.num_workers) != (world_size, num_workers):
            raise ValueError(
                "states of different times cannot be merged: one is of "
                f"{world_size} x {num_workers} ranks and workers, another of "
                f"{phase.world_size} x {phase.num_workers}"
            )
        for ids, progress in phase.readers.items():
            if readers.setdefault(ids, progress) != progress:
                raise ValueError(
                    f"two states of rank {ids[0]} worker {ids[1]} differ: pass states that were "
                    "saved at the same time"
                )
    return Phase(world_size, num_workers, readers)


def _states_in(state: Any) -> Iterator[Mapping[str, Any]]:
    """Find the states of datasets in nested dictionaries, such as a state of StatefulDataLoader."""
    if not isinstance(state, dict):
        return
    if STATE_KEY in state:
        check_state(state, {})
        yield state
        return
    if state.get("_steps_since_snapshot"):
        raise ValueError(
            "a state of StatefulDataLoader is newer than the worker states in it, and cannot be "
            "merged; build StatefulDataLoader with snapshot_every_n_steps=1"
        )
    for value in state.values():
        yield from _states_in(value)
