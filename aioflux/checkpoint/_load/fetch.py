"""Bring what a load wants: all of it is planned first, then read in parallel on one store.

    wanted -> where its memory lies -> units -> reads of each object -> the event loop: ranges,
                                                                        verified, decoded
    thread that loads <- several at a time: copied to their targets, items done

What lies as it is needed goes from the socket into the target's memory; the rest through buffers,
no more than `TransferOptions.max_in_flight_bytes` of them, that are used again.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from aioflux import _bridge
from aioflux._values.meta import ObjectMeta
from aioflux.checkpoint._format.tensor_zip import HEAD_SIZE_BYTES
from aioflux.checkpoint._load.decode import copy_item, find_memory, untransform
from aioflux.checkpoint._load.plan import plan_reads
from aioflux.checkpoint._load.run_reads import Job, run_jobs
from aioflux.checkpoint._load.units import Frames, Unit, Wanted, item_unit, tensor_units
from aioflux.checkpoint._store.commits import each_bounded, uri_below
from aioflux.checkpoint._store.objects import read_range
from aioflux.errors import CheckpointCorruptError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    from aioflux.checkpoint._load.source import Source, Stored
    from aioflux.store import Store

__all__ = ["WantedValue", "fetch"]

_SMALL_BYTES: Final = 64 * 1024
"""Items of stock DCP up to here are read whole: finding the tensor first costs a request."""


@dataclass(frozen=True, slots=True)
class WantedValue:
    """A value that is no tensor, and who takes the bytes of its item."""

    name: str
    stored: Stored
    take: Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class _Place:
    """One data object, as it is read."""

    meta: ObjectMeta
    block_size: int = 1


def fetch(
    store: Store,
    source: Source,
    wants: Sequence[Wanted | WantedValue],
    *,
    registry: ExtensionRegistry,
    done: Callable[[int], None],
    is_verified: bool = True,
) -> None:
    """Bring all that is wanted into its targets.

    Args:
        store: Opened at the checkpoint, by `open_checkpoint`.
        source: The checkpoint.
        wants: What is wanted.
        registry: Transforms of items that stock DCP wrote.
        done: Called in this thread with the number of each want whose target is complete.
        is_verified: Compare blocks with the checksums of the commit, where there is one.

    Raises:
        CheckpointCorruptError: What is stored is not what was saved. Targets may hold parts of it.
        StorageError: It could not be read.
    """
    _Load(store, source, registry, is_verified).run(wants, done)


@dataclass
class _Load:
    store: Store
    source: Source
    registry: ExtensionRegistry
    is_verified: bool
    places: dict[str, _Place] = field(default_factory=dict)

    def run(self, wants: Sequence[Wanted | WantedValue], done: Callable[[int], None]) -> None:
        keys = sorted({each.stored.key for each in wants})
        self.places = _bridge.run(self._find(keys))
        for want in wants:
            self._check_bounds(want.name, want.stored)
        starts = self._find_memories(wants)
        units, owners, missing = list[Unit](), dict[int, int](), [0] * len(wants)
        keys_of: list[str] = []
        for number, want in enumerate(wants):
            for unit in self._units(want, starts.get(number)):
                owners[id(unit)] = number
                units.append(unit)
                keys_of.append(want.stored.key)
        jobs = self._jobs(units, keys_of)
        for job in jobs:
            for unit in job.units:
                missing[owners[id(unit)]] += 1
        for number, num_missing in enumerate(missing):
            if not num_missing:  # nothing of it is stored: it has no elements
                done(number)

        def finished(unit: Unit) -> None:
            number = owners[id(unit)]
            missing[number] -= 1
            if not missing[number]:
                done(number)

        self._execute(jobs, finished)

    async def _find(self, keys: Sequence[str]) -> dict[str, _Place]:
        """Return what is known of each object; those of stock DCP are asked for, and pinned."""

        async def find(key: str) -> _Place:
            stored = self.source.objects.get(key)
            if stored is None:
                return _Place(await self._head(key))
            uri = uri_below(self.store, key)
            generation = stored.generation if self.source.is_pinned else ""
            meta = ObjectMeta(key=key, uri=uri, size=stored.size, generation=generation)
            return _Place(meta, stored.block_size if self.is_verified else 1)

        found = await each_bounded(find, keys)
        return dict(zip(keys, found, strict=True))

    async def _head(self, key: str) -> ObjectMeta:
        try:
            return await self.store.head(key)
        except NotFoundError as exc:
            raise self._missing(uri_below(self.store, key)) from exc

    def _missing(self, uri: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{uri} is missing, or not the object that was there when the load began; load an "
            "earlier checkpoint"
        )

    def _check_bounds(self, name: str, stored: Stored) -> None:
        meta = self.places[stored.key].meta
        if stored.offset + stored.length > meta.size:
            raise CheckpointCorruptError(
                f"{meta.uri} was cut off: it has {meta.size} bytes, and {name!r} in it ends at "
                f"{stored.offset + stored.length}; load an earlier checkpoint"
            )

    def _find_memories(self, wants: Sequence[Wanted | WantedValue]) -> dict[int, int]:
        """Return where in its object the memory of each tensor begins, as far as that is told."""
        starts: dict[int, int] = {}
        unknown: list[tuple[int, Wanted]] = []
        for number, want in enumerate(wants):
            if not isinstance(want, Wanted):
                continue
            if want.stored.item is not None:
                if start := self._told_memory(want):
                    starts[number] = start
            elif want.stored.length > _SMALL_BYTES and not want.stored.descriptors:
                unknown.append((number, want))
        if unknown:
            self._look(unknown, starts)
        return starts

    def _told_memory(self, want: Wanted) -> int:
        item = want.stored.item
        assert item is not None
        end = item.data_start + (item.frame_ends or (item.data_size,))[-1]
        is_within = item.offset <= item.data_start <= end <= item.offset + item.length
        if item.data_start and not (is_within and item.data_size == want.shape.num_bytes):
            raise self.source.corrupt(f"commit and metadata differ in what {want.name!r} is")
        return item.data_start

    def _look(self, unknown: Sequence[tuple[int, Wanted]], starts: dict[int, int]) -> None:
        """Read the first bytes of items of stock DCP, which tell where the memory begins."""

        def see(number: int, want: Wanted, head: torch.Tensor) -> None:
            start = find_memory(head, want, self.places[want.stored.key].meta.uri)
            if start is not None:
                starts[number] = want.stored.offset + start

        units = [
            item_unit(want.stored._replace(length=HEAD_SIZE_BYTES), partial(see, number, want))
            for number, want in unknown
        ]
        self._execute(self._jobs(units, [want.stored.key for _, want in unknown]), lambda _: None)

    def _units(self, want: Wanted | WantedValue, start: int | None) -> Iterator[Unit]:
        uri = self.places[want.stored.key].meta.uri
        if isinstance(want, WantedValue):
            take = want.take
            if want.stored.descriptors:
                take = partial(self._take_transformed, want, uri)
            yield item_unit(want.stored, take)
        elif start is not None:
            try:
                yield from tensor_units(want, start)
            except CheckpointCorruptError as exc:
                raise self.source.corrupt(f"{want.name!r} in {uri}: {exc}") from exc
        else:
            yield item_unit(
                want.stored,
                partial(copy_item, wanted=want, uri=uri, registry=self.registry),
            )

    def _take_transformed(self, want: WantedValue, uri: str, data: torch.Tensor) -> None:
        want.take(untransform(data, want.name, want.stored, uri, self.registry))

    def _jobs(self, units: Sequence[Unit], keys: Sequence[str]) -> list[Job]:
        of_key: dict[str, list[Unit]] = {}
        for unit, key in zip(units, keys, strict=True):
            of_key.setdefault(key, []).append(unit)
        return [
            Job(key, read, tuple(group[part.piece] for part in read.parts))
            for key, group in of_key.items()
            for read in plan_reads(
                [unit.piece for unit in group],
                size=self.places[key].meta.size,
                block_size=self.places[key].block_size,
            )
        ]

    def _execute(self, jobs: Sequence[Job], finished: Callable[[Unit], None]) -> None:
        with ExitStack() as stack:
            codec = None
            if any(isinstance(unit, Frames) for job in jobs for unit in job.units):
                from aioflux.checkpoint._format.codec import Codec

                codec = stack.enter_context(Codec())
            for batch in _bridge.iterate(run_jobs(self, jobs, codec, self.store.transfer)):
                for unit, start, data in batch:
                    if data is not None:
                        unit.finish(start, data)
                    finished(unit)

    def uri(self, key: str) -> str:
        """Return the whole uri of an object."""
        return uri_below(self.store, key)

    async def read(self, key: str, start: int, into: memoryview) -> None:
        """Read bytes of an object, verified as far as the commit lets them be."""
        place = self.places[key]
        stored = self.source.objects.get(key)
        if stored is not None and self.is_verified:
            pinned = self.source.is_pinned
            await read_range(self.store, stored, start=start, into=into, is_pinned=pinned)
            return
        try:
            pin = place.meta if place.meta.generation else key
            num_read = await self.store.get_into(pin, into, start=start)
        except (NotFoundError, PreconditionFailedError) as exc:
            raise self._missing(place.meta.uri) from exc
        if num_read < into.nbytes:
            raise CheckpointCorruptError(
                f"{place.meta.uri} was cut off: it ends at byte {start + num_read}; load an "
                "earlier checkpoint"
            )
