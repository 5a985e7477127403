"""State of an epoch: the progress of every reader, so that another run can resume it.

A state has the number of the epoch, the settings of its order, and its phases. A phase is a period
in which the number of ranks and workers was the same: the rest of the epoch was shared among them,
and each has read part of its share. Everything else follows from these numbers:

    order of the epoch -> phase 1 shares it; its readers leave some unread
      -> phase 2 shares the unread ones among another number of readers; ...

To resume with as many ranks and workers, a reader needs its own progress only. With other numbers
it needs the progress of all readers: `merge_states`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from aioflux.data._sharding import Reader, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from aioflux.data._sharding import Tail

__all__ = [
    "ALL_RECORDS",
    "STATE_KEY",
    "VERSION",
    "Phase",
    "Progress",
    "RemainingRecords",
    "Share",
    "check_state",
    "merge_states",
    "plan_share",
]

STATE_KEY: Final = "aioflux_state"
"""Key of a state's version; distinguishes states from other dictionaries."""
VERSION: Final = 1


class RemainingRecords(NamedTuple):
    """Records of an object that are still to be read."""

    first: int | None
    """All from this record_index on; None if the rest of the object has been read."""
    also: tuple[int, ...] = ()
    """Indices of others, such as those that waited in a shuffle buffer."""

    def has(self, record_index: int) -> bool:
        """Return whether a record is among them."""
        return (self.first is not None and record_index >= self.first) or record_index in self.also

    def after(self, record_index: int) -> RemainingRecords:
        """Return the remaining records after a given one."""
        first = None if self.first is None else max(self.first, record_index + 1)
        return RemainingRecords(first, tuple(each for each in self.also if each > record_index))


ALL_RECORDS: Final = RemainingRecords(0)


@dataclass(slots=True)
class Progress:
    """The part of its share that a reader has read, by share_index."""

    num_started: int = 0
    """All objects before this share_index were started, except those in `skipped`."""
    skipped: set[int] = field(default_factory=set)
    """Objects before that which were not started: others arrived first."""
    partial: dict[int, RemainingRecords] = field(default_factory=dict)
    """Objects of which some records are still to be read."""

    def mark_started(self, share_index: int) -> None:
        """Note that an object was started."""
        if share_index >= self.num_started:
            self.skipped.update(range(self.num_started, share_index))
            self.num_started = share_index + 1
        else:
            self.skipped.discard(share_index)

    def remaining(self, share: Share) -> Iterator[tuple[int, RemainingRecords]]:
        """Yield the share_index of each object that is still to be read, and its records."""
        yield from sorted(self.partial.items())
        for share_index in sorted(self.skipped):
            yield share_index, share.partial.get(share_index, ALL_RECORDS)
        for share_index in range(self.num_started, len(share.listing_indices)):
            yield share_index, share.partial.get(share_index, ALL_RECORDS)

    def pack(self) -> list[Any]:
        """Return it as lists and numbers."""
        partial = [
            [share_index, remaining.first, list(remaining.also)]
            for share_index, remaining in sorted(self.partial.items())
        ]
        return [self.num_started, sorted(self.skipped), partial]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Progress:
        """Restore the result of `pack`."""
        num_started, skipped, partial = packed
        remaining = {index: RemainingRecords(first, tuple(also)) for index, first, also in partial}
        return cls(num_started, set(skipped), remaining)


@dataclass(frozen=True, slots=True)
class Phase:
    """A period in which the numbers of ranks and workers were the same."""

    world_size: int
    """Number of ranks."""
    num_workers: int
    """Workers of each rank."""
    readers: Mapping[tuple[int, int], Progress]
    """Progress by (rank, worker_id), as far as it is known."""

    def pack(self) -> list[Any]:
        """Return it as lists and numbers."""
        packed = [[*ids, *progress.pack()] for ids, progress in sorted(self.readers.items())]
        return [self.world_size, self.num_workers, packed]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Phase:
        """Restore the result of `pack`."""
        world_size, num_workers, readers = packed
        known = {(each[0], each[1]): Progress.unpack(each[2:]) for each in readers}
        return cls(world_size, num_workers, known)

    def has_numbers_of(self, reader: Reader) -> bool:
        """Return whether its numbers of ranks and workers are those of the reader."""
        return (self.world_size, self.num_workers) == (reader.world_size, reader.num_workers)

    def missing(self) -> list[tuple[int, int]]:
        """Return the (rank, worker_id) of readers whose progress is unknown."""
        everyone = [(r, w) for r in range(self.world_size) for w in range(self.num_workers)]
        return [each for each in everyone if each not in self.readers]


@dataclass(frozen=True, slots=True)
class Share:
    """Objects that one reader reads in an epoch."""

    listing_indices: torch.Tensor
    """The listing_index of each share_index."""
    partial: Mapping[int, RemainingRecords]
    """Objects, by share_index, of which only some records are to be read."""


@dataclass(frozen=True, slots=True)
class _UnreadPart:
    """Unread objects of an epoch when a phase starts, numbered by epoch_index."""

    listing_indices: torch.Tensor
    """The listing_index of each epoch_index."""
    partial: dict[int, RemainingRecords]
    """Objects, by epoch_index, of which only some records are to be read."""

    def share_of(
        self, reader: Reader, tail: Tail, sizes: Callable[[torch.Tensor], list[int]] | None
    ) -> tuple[torch.Tensor, Share]:
        """Return the epoch_index of each share_index of one reader, and its share."""
        count = len(self.listing_indices)
        if not count:
            return self.listing_indices, Share(self.listing_indices, {})
        weights = None if sizes is None else sizes(self.listing_indices)
        epoch_indices = shard(count, reader, tail=tail, sizes=weights)
        partial: dict[int, RemainingRecords] = {}
        if self.partial:
            found = (self.partial.get(index % count) for index in epoch_indices.tolist())
            partial = {index: each for index, each in enumerate(found) if each is not None}
        return epoch_indices, Share(self.listing_indices[epoch_indices % count], partial)


def plan_share(
    order: torch.Tensor,
    phases: Sequence[Phase],
    reader: Reader,
    *,
    tail: Tail,
    sizes: Callable[[torch.Tensor], list[int]] | None = None,
) -> tuple[tuple[Phase, ...], Share, Progress]:
    """Return the share of a reader in an epoch that was partly read.

    Args:
        order: The listing_index of each epoch_index.
        phases: The phases in which the epoch was read until now.
        reader: The reader that resumes.
        tail: As in `shard`.
        sizes: Returns the sizes of objects by listing_index, to share by bytes; by count if None.

    Returns:
        The phases that are over, the reader's share, and its progress in that.

    Raises:
        ValueError: The numbers of ranks or workers changed, and not all progress is known.
    """
    unread = _UnreadPart(order, {})
    for number, phase in enumerate(phases):
        ids = (reader.rank, reader.worker_id)
        if number == len(phases) - 1 and phase.has_numbers_of(reader) and ids in phase.readers:
            _, share = unread.share_of(reader, tail, sizes)
            return tuple(phases[:number]), share, phase.readers[ids]
        if missing := phase.missing():
            raise ValueError(_missing_progress_message(phase, missing, reader))
        unread = _unread_after(unread, phase, tail, sizes)
    _, share = unread.share_of(reader, tail, sizes)
    return tuple(phases), share, Progress()


def _unread_after(
    unread: _UnreadPart,
    phase: Phase,
    tail: Tail,
    sizes: Callable[[torch.Tensor], list[int]] | None,
) -> _UnreadPart:
    """Return the objects and records that a phase left unread."""
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
        # An epoch_index beyond the count is a repeated object: only its first read counts.
        is_read &= epoch_indices < count
        is_unread[epoch_indices[is_read]] = False
        for share_index, remaining in progress.partial.items():
            if (epoch_index := int(epoch_indices[share_index])) < count:
                partial[epoch_index] = remaining
    kept = torch.nonzero(is_unread).flatten()
    kept_partial: dict[int, RemainingRecords] = {}
    if partial:
        found = (partial.get(epoch_index) for epoch_index in kept.tolist())
        kept_partial = {index: each for index, each in enumerate(found) if each is not None}
    return _UnreadPart(unread.listing_indices[kept], kept_partial)


def _missing_progress_message(phase: Phase, missing: list[tuple[int, int]], reader: Reader) -> str:
    rank, worker_id = missing[0]
    return (
        f"the state was saved with world_size={phase.world_size} and "
        f"num_workers={phase.num_workers}, now they are {reader.world_size} and "
        f"{reader.num_workers}; to share the rest of the epoch anew, the states of all ranks and "
        f"workers are needed: load merge_states([...]) of them ({len(missing)} missing, first rank "
        f"{rank} worker {worker_id})"
    )


def check_state(state: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Check that a state is of this dataset: that the entries of `header` are the same.

    Raises:
        ValueError: It is not a state, or one of other objects or another order.
    """
    if state.get(STATE_KEY) != VERSION:
        raise ValueError(
            "this is not a state of a dataset of aioflux, or one of another version; pass what "
            "state_dict() or merge_states() returned"
        )
    for name, value in header.items():
        if state.get(name) != value:
            hint = (
                "the objects or their order changed; list once, save a manifest and build the "
                "dataset from that"
                if name in {"num_objects", "listing"}
                else f"build the dataset with {name}={state.get(name)!r}"
            )
            raise ValueError(
                f"the state was saved with {name}={state.get(name)!r}, and the dataset has "
                f"{value!r}: {hint}"
            )


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of ranks and workers into one state, which any of them can load.

    With it, the epoch is resumed with other numbers of ranks and workers: the rest of it is shared
    anew, and each sample is still read once.

    Args:
        states: `dataset.state_dict()` of each rank; or `loader.state_dict()` of each rank's
            torchdata `StatefulDataLoader`, with the states of its workers inside.

    Raises:
        ValueError: There is no state, or they were saved by different runs or at different times.
    """
    found = [each for state in states for each in _states_in(state)]
    # The state of a rank that has not started to read lacks this phase.
    most = max((len(each["phases"]) for each in found), default=0)
    found = [each for each in found if len(each["phases"]) == most]
    if not found:
        raise ValueError("none of the states to merge is a state of a dataset of aioflux")
    first = found[0]
    for each in found[1:]:
        for name in first:
            same = (
                first[name][:-1] == each[name][:-1]
                if name == "phases"
                else (first[name] == each.get(name))
            )
            if not same:
                raise ValueError(
                    f"states of different runs or times cannot be merged: {name} is "
                    f"{first[name]!r} in one and {each.get(name)!r} in another"
                )
    if not most:
        return dict(first)
    return {**first, "phases": [*first["phases"][:-1], _merge_last_phases(found).pack()]}


def _merge_last_phases(states: Sequence[Mapping[str, Any]]) -> Phase:
    last = [Phase.unpack(state["phases"][-1]) for state in states]
    readers: dict[tuple[int, int], Progress] = {}
    for phase in last:
        if (phase.world_size, phase.num_workers) != (last[0].world_size, last[0].num_workers):
            raise ValueError(
                "states of different times cannot be merged: one is of "
                f"{last[0].world_size} x {last[0].num_workers} ranks and workers, another of "
                f"{phase.world_size} x {phase.num_workers}"
            )
        for ids, progress in phase.readers.items():
            if readers.setdefault(ids, progress) != progress:
                raise ValueError(
                    f"two states of rank {ids[0]} worker {ids[1]} differ: use states that were "
                    "saved at the same time"
                )
    return Phase(last[0].world_size, last[0].num_workers, readers)


def _states_in(state: Any) -> Iterator[Mapping[str, Any]]:
    """Find the states of datasets in nested dictionaries, such as those of StatefulDataLoader."""
    if not isinstance(state, dict):
        return
    if STATE_KEY in state:
        check_state(state, {})
        yield state
        return
    if state.get("_steps_since_snapshot"):
        raise ValueError(
            "the loader has advanced since it saved the states of its workers; build "
            "StatefulDataLoader with snapshot_every_n_steps=1 to merge its states"
        )
    for each in state.values():
        yield from _states_in(each)
