"""Where every reader of an epoch is, so that another run can go on from there.

A state tells the epoch, how it was ordered, and its phases. A phase is a time in which the number
of ranks and workers was the same: what is left of the epoch was dealt out to them, and each has
read so much of its share. Everything else follows from these numbers:

    order of the epoch -> phase 1 deals it out; what its readers did not read
      -> phase 2 deals that out, to another number of readers; ...

Who goes on with as many ranks and workers needs its own progress only. With other numbers, what is
left is known when the progress of all readers is: `merge_states`.
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
    "MARK",
    "Left",
    "Phase",
    "Progress",
    "Share",
    "check_state",
    "merge_states",
    "take_share",
]

MARK: Final = "aioflux_state"
"""Key of a state's version; tells states from other dictionaries."""
VERSION: Final = 1


class Left(NamedTuple):
    """Records of an object that are still to be read."""

    first: int | None
    """All from this number on; None where the rest of the object has been read."""
    also: tuple[int, ...] = ()
    """Numbers of others, such as those that waited in a shuffle buffer."""

    def has(self, number: int) -> bool:
        """Tell whether record `number` is among them."""
        return (self.first is not None and number >= self.first) or number in self.also


WHOLE: Final = Left(0)


@dataclass(slots=True)
class Progress:
    """How much of its share a reader has read; objects are counted as they stand in the share."""

    num_taken: int = 0
    """All objects before this were begun, but for those that are open."""
    open: set[int] = field(default_factory=set)
    """Objects before that which were not begun: others arrived first."""
    begun: dict[int, Left] = field(default_factory=dict)
    """Objects of which some records are still to be read."""

    def take(self, index: int) -> None:
        """Count an object as begun."""
        if index >= self.num_taken:
            self.open.update(range(self.num_taken, index))
            self.num_taken = index + 1
        else:
            self.open.discard(index)

    def todo(self, share: Share) -> Iterator[tuple[int, Left]]:
        """Yield what is still to be read: index in the share, and which records."""
        yield from sorted(self.begun.items())
        for index in sorted(self.open):
            yield index, share.left.get(index, WHOLE)
        for index in range(self.num_taken, len(share.positions)):
            yield index, share.left.get(index, WHOLE)

    def pack(self) -> list[Any]:
        """Return it in lists and numbers."""
        begun = [[index, left.first, list(left.also)] for index, left in sorted(self.begun.items())]
        return [self.num_taken, sorted(self.open), begun]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Progress:
        """Return what was packed."""
        num_taken, open_, begun = packed
        lefts = {index: Left(first, tuple(also)) for index, first, also in begun}
        return cls(num_taken, set(open_), lefts)


@dataclass(frozen=True, slots=True)
class Phase:
    """A time in which the numbers of ranks and workers were the same."""

    world_size: int
    """Number of ranks."""
    num_workers: int
    """Workers of each rank."""
    readers: Mapping[tuple[int, int], Progress]
    """How far each (rank, worker_id) is; those that are known."""

    def pack(self) -> list[Any]:
        """Return it in lists and numbers."""
        packed = [[*who, *progress.pack()] for who, progress in sorted(self.readers.items())]
        return [self.world_size, self.num_workers, packed]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Phase:
        """Return what was packed."""
        world_size, num_workers, readers = packed
        known = {(each[0], each[1]): Progress.unpack(each[2:]) for each in readers}
        return cls(world_size, num_workers, known)

    def is_of(self, reader: Reader) -> bool:
        """Tell whether a reader is one of as many."""
        return (self.world_size, self.num_workers) == (reader.world_size, reader.num_workers)

    def missing(self) -> list[tuple[int, int]]:
        """Return the readers whose progress is not known."""
        everyone = [(r, w) for r in range(self.world_size) for w in range(self.num_workers)]
        return [each for each in everyone if each not in self.readers]


@dataclass(frozen=True, slots=True)
class Share:
    """What one reader reads of an epoch."""

    positions: torch.Tensor
    """Positions in the listing, in the order of reading."""
    left: Mapping[int, Left]
    """Objects, by index in the share, of which only some records are to be read."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is left of an epoch when a phase begins."""

    positions: torch.Tensor
    left: dict[int, Left]
    """By index among the positions."""

    def deal(
        self, reader: Reader, tail: Tail, sizes: Callable[[torch.Tensor], list[int]] | None
    ) -> tuple[torch.Tensor, Share]:
        """Return the places of one reader's share, and the share."""
        count = len(self.positions)
        if not count:
            return self.positions, Share(self.positions, {})
        weights = None if sizes is None else sizes(self.positions)
        places = shard(count, reader, tail=tail, sizes=weights)
        left: dict[int, Left] = {}
        if self.left:
            at = (self.left.get(place % count) for place in places.tolist())
            left = {index: each for index, each in enumerate(at) if each is not None}
        return places, Share(self.positions[places % count], left)


def take_share(
    order: torch.Tensor,
    phases: Sequence[Phase],
    reader: Reader,
    *,
    tail: Tail,
    sizes: Callable[[torch.Tensor], list[int]] | None = None,
) -> tuple[tuple[Phase, ...], Share, Progress]:
    """Return what a reader reads of an epoch that others have begun.

    Args:
        order: All positions, in the order of the epoch.
        phases: How it was read until now.
        reader: Who goes on.
        tail: As `shard`.
        sizes: Gives the sizes at positions, to share by bytes; by count where it is None.

    Returns:
        The phases that are over, the reader's share, and how far it is in that.

    Raises:
        ValueError: The numbers of ranks or workers changed, and not all progress is known.
    """
    rest = _Rest(order, {})
    for number, phase in enumerate(phases):
        who = (reader.rank, reader.worker_id)
        if number == len(phases) - 1 and phase.is_of(reader) and who in phase.readers:
            _, share = rest.deal(reader, tail, sizes)
            return tuple(phases[:number]), share, phase.readers[who]
        if missing := phase.missing():
            raise ValueError(_tell_missing(phase, missing, reader))
        rest = _after(rest, phase, tail, sizes)
    _, share = rest.deal(reader, tail, sizes)
    return tuple(phases), share, Progress()


def _after(
    rest: _Rest,
    phase: Phase,
    tail: Tail,
    sizes: Callable[[torch.Tensor], list[int]] | None,
) -> _Rest:
    count = len(rest.positions)
    is_left = torch.ones(count, dtype=torch.bool)
    partly: dict[int, Left] = dict(rest.left)
    for (rank, worker_id), progress in phase.readers.items():
        reader = Reader(rank, phase.world_size, worker_id, phase.num_workers)
        places, _ = rest.deal(reader, tail, sizes)
        is_read = torch.zeros(len(places), dtype=torch.bool)
        is_read[: progress.num_taken] = True
        is_read[sorted(progress.open)] = False
        is_read[sorted(progress.begun)] = False
        # A place beyond the count is a second reading of one before: that one counts.
        is_read &= places < count
        is_left[places[is_read]] = False
        for index, left in progress.begun.items():
            if (place := int(places[index])) < count:
                partly[place] = left
    kept = torch.nonzero(is_left).flatten()
    left_now: dict[int, Left] = {}
    if partly:
        at = (partly.get(place) for place in kept.tolist())
        left_now = {index: each for index, each in enumerate(at) if each is not None}
    return _Rest(rest.positions[kept], left_now)


def _tell_missing(phase: Phase, missing: list[tuple[int, int]], reader: Reader) -> str:
    rank, worker_id = missing[0]
    return (
        f"the state was saved with world_size={phase.world_size} and "
        f"num_workers={phase.num_workers}, now they are {reader.world_size} and "
        f"{reader.num_workers}; to share anew what is left, the states of all ranks and workers "
        f"are needed: load merge_states([...]) of them ({len(missing)} missing, first rank {rank} "
        f"worker {worker_id})"
    )


def check_state(state: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Check that a state is of this dataset, as it is set up now.

    Args:
        state: What was saved.
        header: What must be the same, by name.

    Raises:
        ValueError: It is no state, or of other objects or another order.
    """
    if state.get(MARK) != VERSION:
        raise ValueError(
            "this is no state of a dataset of aioflux, or of another version; pass what "
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
    """Merge what ranks and workers saved into one state, which any of them can load.

    With it, the epoch goes on with other numbers of ranks and workers: what is left of it is dealt
    out anew, and each sample is still read once.

    Args:
        states: `dataset.state_dict()` of each rank; or `loader.state_dict()` of each rank's
            torchdata `StatefulDataLoader`, with the states of its workers inside.

    Raises:
        ValueError: There is none, or they are not of one time of one run.
    """
    found = [each for state in states for each in _states_in(state)]
    # A rank that has not yet begun to read says nothing of this phase.
    most = max((len(each["phases"]) for each in found), default=0)
    found = [each for each in found if len(each["phases"]) == most]
    if not found:
        raise ValueError("there is no state of a dataset of aioflux in what is to be merged")
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
                    f"states of different runs or times do not merge: {name} is {first[name]!r} "
                    f"in one and {each.get(name)!r} in another"
                )
    if not most:
        return dict(first)
    return {**first, "phases": [*first["phases"][:-1], _merged(found).pack()]}


def _merged(states: Sequence[Mapping[str, Any]]) -> Phase:
    last = [Phase.unpack(state["phases"][-1]) for state in states]
    readers: dict[tuple[int, int], Progress] = {}
    for phase in last:
        if (phase.world_size, phase.num_workers) != (last[0].world_size, last[0].num_workers):
            raise ValueError(
                "states of different times do not merge: one is of "
                f"{last[0].world_size} x {last[0].num_workers} ranks and workers, another of "
                f"{phase.world_size} x {phase.num_workers}"
            )
        for who, progress in phase.readers.items():
            if readers.setdefault(who, progress) != progress:
                raise ValueError(
                    f"two states of rank {who[0]} worker {who[1]} differ: take states of one time"
                )
    return Phase(last[0].world_size, last[0].num_workers, readers)


def _states_in(state: Any) -> Iterator[Mapping[str, Any]]:
    """Find the states of datasets in nested dictionaries, such as those of StatefulDataLoader."""
    if not isinstance(state, dict):
        return
    if MARK in state:
        check_state(state, {})
        yield state
        return
    if state.get("_steps_since_snapshot"):
        raise ValueError(
            "the loader has gone on since it took the states of its workers; build "
            "StatefulDataLoader with snapshot_every_n_steps=1 to merge its states"
        )
    for each in state.values():
        yield from _states_in(each)
