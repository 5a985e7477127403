"""Reads of many small objects by few requests: compose on the service, read once, split here.

    metas -> groups of neighbours (pure) -> compose pinned sources -> one read -> slices
                                                                              -> delete composite

The crc32c of each slice is compared with the crc32c in the listing. The composite is deleted after
a failure, too.

If a composite cannot be created or read, the objects of its group are read one by one, so that an
error names the object. Only a missing permission ends the iteration.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from operator import length_hint
from typing import TYPE_CHECKING, Final, Self

from aioflux._concurrency.async_iteration import aclosing_inner
from aioflux._concurrency.byte_budget import PrefetchBudget
from aioflux._concurrency.fan_out import bounded_batches, gather
from aioflux._services.base import Precondition, Source, WriteRequest
from aioflux._transfer.compose import compose
from aioflux._transfer.composite_plan import Grouper, plan_groups, split
from aioflux._transfer.delete import delete
from aioflux._transfer.get_many import MIN_BATCHES
from aioflux._transfer.read import fetch
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX
from aioflux._values.meta import ObjectMeta
from aioflux.errors import (
    AiofluxError,
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._concurrency.fan_out import Items
    from aioflux._transfer.composite_plan import Group
    from aioflux._transfer.get_many import TriedBatch
    from aioflux._transfer.session import Session

_log = logging.getLogger("aioflux")

_EXPECTED = (NotFoundError, PreconditionFailedError, ChecksumError)
"""Errors of a composite if one of its objects was changed since the listing. No warning is logged:
the objects of the group are read one by one, and the error names the changed object."""

_MAX_EAGER: Final = 4096
"""If the number of objects is known and below this, all are divided into groups before the first
read."""

_COMPOSE_WAIT_SECONDS = 1.0
"""Time that clean-up waits for the response to a compose. After this time the compose is cancelled,
and its composite is deleted without a generation."""


class _AsyncGroups:
    """Numbered groups of an asynchronous iterable.

    This is an iterator class, because an asynchronous generator would have to be closed.
    """

    def __init__(self, metas: AsyncIterable[ObjectMeta], grouper: Grouper) -> None:
        self._metas = aiter(metas)
        self._grouper = grouper
        self._ready: deque[Group] = deque()
        self._numbers = itertools.count()
        self._is_exhausted = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Group]:
        while not self._ready:
            if self._is_exhausted:
                raise StopAsyncIteration
            try:
                self._ready += self._grouper.add(_checked(await anext(self._metas)))
            except StopAsyncIteration:
                self._is_exhausted = True
                self._ready += self._grouper.rest()
        return next(self._numbers), self._ready.popleft()


def _numbered(
    metas: Items[ObjectMeta], grouper: Grouper
) -> Iterable[tuple[int, Group]] | AsyncIterable[tuple[int, Group]]:
    if isinstance(metas, AsyncIterable):
        return _AsyncGroups(metas, grouper)
    numbered = enumerate(plan_groups(map(_checked, metas), grouper))
    # From a list, `bounded_batches` starts at most one task for each group: a batch needs few.
    return list(numbered) if length_hint(metas, _MAX_EAGER) < _MAX_EAGER else numbered


def _checked(meta: object) -> ObjectMeta:
    if not isinstance(meta, ObjectMeta):
        raise TypeError(
            f"composed reads take the ObjectMeta of a listing, not {meta!r}: a composite is split "
            "by the listed sizes"
        )
    return meta


class Composites:
    """The composites of one iteration: their creation and their deletion.

    Each composite is created in a task of its own. Otherwise a compose that is cancelled with the
    iteration, before its response, could create a composite that is never deleted. Keys begin with
    a random id of the iteration, which spreads the composites of many iterations over the service's
    index.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefix = f"{COMPOSITE_PREFIX}{os.urandom(8).hex()}"
        self._numbers = itertools.count()
        self._creating: dict[str, asyncio.Task[ObjectMeta]] = {}
        self._deleting: dict[str, asyncio.Task[None]] = {}
        self._failure: StorageError | None = None
        self._is_closed = False

    async def start(self, group: Group) -> str:
        """Start to create the composite of a group, and return its key.

        Waits while `max_in_flight` composites are being deleted.
        """
        while len(self._deleting) >= self._session.options.max_in_flight:
            await asyncio.wait(tuple(self._deleting.values()), return_when=asyncio.FIRST_COMPLETED)
        session = self._session
        session.require_own_process(group[0].key)
        if self._is_closed:
            uri = session.service.uri(group[0].key)
            raise StorageError(f"could not read {uri}: its store was closed meanwhile", uri=uri)
        time = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        key = f"{self._prefix}/{time}-{next(self._numbers):06}"
        request = WriteRequest(key, Precondition(if_absent=True))
        sources = [Source(key=meta.key, generation=meta.generation) for meta in group]
        session.open_transfers.add(self)
        composing = compose(session, request, sources, metas=group)
        self._creating[key] = session.start_cleanup(composing)
        return key

    async def wait_for(self, key: str) -> ObjectMeta:
        """Wait until a composite is created, and return its metadata."""
        return await asyncio.shield(self._creating[key])

    def start_delete(self, key: str) -> None:
        """Start to delete a composite, unless it is being deleted or is already deleted."""
        deleting = self._deleting.get(key)
        if key in self._creating and (deleting is None or deleting.done()):
            self._deleting[key] = self._session.start_cleanup(self._delete(key))

    def raise_failure(self) -> None:
        """Raise the error if a delete was rejected: the service would reject later ones, too."""
        if self._failure is not None:
            raise self._failure

    async def finish(self, reason: BaseException | None) -> None:
        """Delete the remaining composites at the end of the iteration.

        Args:
            reason: The exception that ended the iteration, if any. A failure of the deletes is
                added to it as a note. If the iteration was cancelled or left, or if there is no
                exception and the service has not responded, the failure is logged.

        Raises:
            StorageError: The service rejected a delete, and the iteration itself succeeded.
        """
        ends_early = isinstance(reason, (asyncio.CancelledError, GeneratorExit))
        try:
            await self._delete_remaining(can_wait=not ends_early)
            self.raise_failure()
        except (AiofluxError, TimeoutError) as exc:
            if reason is None and exc is self._failure:
                raise
            note = (
                f"composites below {self._session.service.uri(self._prefix)} "
                "may still exist; `Store.clean` removes them: "
                f"{str(exc) or 'no response from the service'}"
            )
            if reason is None or ends_early:
                _log.warning("%s", note)
            else:
                reason.add_note(note)

    async def on_store_close(self) -> None:
        """Delete the remaining composites, because the store is closed during the iteration."""
        try:
            await self._delete_remaining(can_wait=False)
        except TimeoutError:
            _log.warning(
                "composed reads were in progress when their store was closed; their composites "
                "below %s are removed by `Store.clean`",
                self._session.service.uri(self._prefix),
            )

    async def _delete_remaining(self, *, can_wait: bool) -> None:
        self._is_closed = True
        self._session.open_transfers.discard(self)
        if self._creating and not self._session.is_inherited:
            wait_seconds = self._session.cleanup_timeouts.composite_wait_seconds
            await self._session.clean_up(
                self._delete_all, wait_seconds=None if can_wait else wait_seconds
            )

    async def _delete_all(self) -> None:
        """Delete the remaining composites. May be cancelled and called again."""
        while self._creating:
            for key in tuple(self._creating):
                self.start_delete(key)
            await asyncio.wait(tuple(self._deleting.values()))

    async def _delete(self, key: str) -> None:
        """Wait for the compose, and delete the composite unless it was certainly not created."""
        is_cancelled = False
        try:
            generation = await self._generation_to_delete(key)
            if generation is not None:
                with suppress(NotFoundError):
                    await delete(self._session, key, generation=generation)
        except asyncio.CancelledError:
            is_cancelled = True  # `_delete_all` starts the delete again
            raise
        except TransientError as exc:
            _log.warning("a composite could not be deleted; `Store.clean` removes it: %s", exc)
        except StorageError as exc:
            self._failure = self._failure or type(exc)(
                f"{exc.message}; a composite is temporary and would be billed until it is deleted: "
                "composed reads need storage.objects.delete and a bucket without a retention "
                "policy; other reads need neither",
                uri=exc.uri,
                status=exc.status,
            )
        finally:
            if not is_cancelled:
                del self._creating[key], self._deleting[key]

    async def _generation_to_delete(self, key: str) -> str | None:
        """Return a composite's generation: empty if unknown, None if there is no composite."""
        creating = self._creating[key]
        if not creating.done():
            await asyncio.wait([creating], timeout=_COMPOSE_WAIT_SECONDS)
            creating.cancel()
            await asyncio.wait([creating])
        if creating.cancelled():
            return ""
        error = creating.exception()
        if error is None:
            return creating.result().generation
        is_ambiguous = isinstance(error, StorageError) and error.maybe_done
        return "" if is_ambiguous or isinstance(error, TransientError) else None


def _num_bytes(tried: TriedBatch) -> int:
    return sum(len(data) for _, data in tried if isinstance(data, bytes))


class _GroupReader:
    """A reader of groups, which reads a group of several objects by a composite."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_warned = False
        self.composites = Composites(session)
        self.budget = PrefetchBudget(session.options.max_in_flight_bytes, ordered=True)

    async def read(self, numbered: tuple[int, Group]) -> TriedBatch:
        """Wait until the prefetch budget has memory for a group, and read the group."""
        index, group = numbered
        reservation = self.budget.reserve(index)
        try:
            await reservation.acquire(sum(meta.size for meta in group))
            if len(group) > 1 and (slices := await self._read_composed(group)) is not None:
                return [*zip(group, slices, strict=True)]
            tried = await gather(self._read_object(meta) for meta in group)
        except BaseException:
            reservation.set(0)
            raise
        reservation.set(_num_bytes(tried))
        return tried

    async def _read_object(
        self, meta: ObjectMeta
    ) -> tuple[ObjectMeta, bytes] | tuple[None, StorageError]:
        try:
            return meta, (await fetch(self._session, meta.key, meta)).data
        except StorageError as exc:
            return None, exc

    async def _read_composed(self, group: Group) -> list[bytes] | None:
        """Read a group by a composite; return None if its objects must be read one by one.

        Raises:
            PermissionDeniedError: The credentials may not create or read composites.
        """
        session = self._session
        key = await self.composites.start(group)
        try:
            try:
                composite = await self.composites.wait_for(key)
                data = (await fetch(session, key, composite)).data
            finally:
                self.composites.start_delete(key)
        except PermissionDeniedError as exc:
            raise PermissionDeniedError(
                f"{exc.message}; composed reads need storage.objects.create and "
                "storage.objects.delete; other reads need neither",
                uri=exc.uri,
                status=exc.status,
            ) from exc
        except _EXPECTED:
            return None
        except StorageError as exc:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("objects are read one by one, since composing them failed: %s", exc)
            return None
        slices = split(data, group, verify=session.options.verify)
        if slices is None:
            session.count_mismatch(group[0].key, "its composite has wrong bytes of an object")
        return slices


async def try_fetch_composed(
    session: Session, metas: Items[ObjectMeta], *, max_composite_bytes: int
) -> AsyncGenerator[TriedBatch, None]:
    """Yield lists of `(meta, data)` in the order of `metas`. A list has the objects that are ready.

    An object that cannot be read is yielded as `(None, error)`.

    Args:
        session: The session of a service that can compose.
        metas: Metadata of a listing.
        max_composite_bytes: Largest size of one composite.
    """
    grouper = Grouper(
        max_sources=session.service.capabilities.max_compose_sources,
        # While a composite is split, its bytes are in memory twice.
        max_bytes=min(max_composite_bytes, session.options.max_in_flight_bytes // 2),
    )
    reader = _GroupReader(session)
    full_batch_bytes = session.options.max_in_flight_bytes / MIN_BATCHES
    batches = bounded_batches(
        reader.read,
        _numbered(metas, grouper),
        max_in_flight=session.options.max_in_flight,
        weigh=_num_bytes,
        max_weight=full_batch_bytes,
    )
    try:
        async with aclosing_inner(batches) as inner:
            async for groups in inner:
                yield [pair for group in groups for pair in group]
                reader.budget.release_yielded(len(groups), sum(map(_num_bytes, groups)))
                del groups
                reader.composites.raise_failure()
    except BaseException as exc:
        await reader.composites.finish(exc)
        raise
    await reader.composites.finish(None)
