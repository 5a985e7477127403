"""Reads of many small objects by few requests: composed on the service, read as one, split here.

    metas -> groups of neighbours (pure) -> compose, each source pinned -> one read -> slices, each
                                                    compared with the listed crc32c
                                         -> delete, in any case

If a composite cannot be made or read, its objects are read one by one, so that an error names the
object.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterable
from contextlib import suppress
from datetime import UTC, datetime
from operator import length_hint
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import bounded_batches, gather
from aioflux._services.base import Precondition, Source, WriteRequest
from aioflux._transfer.compose import compose
from aioflux._transfer.composite_plan import Grouper, plan_groups, split
from aioflux._transfer.delete import delete
from aioflux._transfer.get import fetch
from aioflux._transfer.get_many import MIN_BATCHES
from aioflux._transfer.prefetch_budget import PrefetchBudget
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
    from collections.abc import AsyncGenerator, Iterable

    from aioflux._concurrency.fan_out import Items
    from aioflux._transfer.composite_plan import Group
    from aioflux._transfer.session import Session

__all__ = ["try_fetch_composed"]

_log = logging.getLogger("aioflux")

TriedBatch: TypeAlias = "list[tuple[ObjectMeta, bytes] | tuple[None, StorageError]]"

_EXPECTED = (NotFoundError, PreconditionFailedError, ChecksumError)
"""Errors that show that an object has changed since it was listed; reading each one shows which."""

_MAX_EAGER: Final = 4096
"""Fewer objects than this are grouped before the first read."""

_COMPOSE_WAIT_SECONDS = 1.0
"""Time that clean-up waits for the response to a compose; then it deletes whatever has the key."""


class _AsyncGroups:
    """Numbered groups of an asynchronous iterable.

    Not a generator, which would have to be closed.
    """

    def __init__(self, metas: AsyncIterable[ObjectMeta], grouper: Grouper) -> None:
        self._metas = aiter(metas)
        self._grouper = grouper
        self._ready: deque[Group] = deque()
        self._numbers = itertools.count()
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Group]:
        while not self._ready:
            if self._is_over:
                raise StopAsyncIteration
            try:
                self._ready += self._grouper.add(_checked(await anext(self._metas)))
            except StopAsyncIteration:
                self._is_over = True
                self._ready += self._grouper.rest()
        return next(self._numbers), self._ready.popleft()


def _numbered(
    metas: Items[ObjectMeta], grouper: Grouper
) -> Iterable[tuple[int, Group]] | AsyncIterable[tuple[int, Group]]:
    if isinstance(metas, AsyncIterable):
        return _AsyncGroups(metas, grouper)
    numbered = enumerate(plan_groups(map(_checked, metas), grouper))
    # For few objects, such as one batch, the number of groups limits the number of tasks.
    return list(numbered) if length_hint(metas, _MAX_EAGER) < _MAX_EAGER else numbered


def _checked(meta: object) -> ObjectMeta:
    if not isinstance(meta, ObjectMeta):
        raise TypeError(
            f"composed reads take the ObjectMeta of a listing, not {meta!r}: a composite is split "
            "by the listed sizes"
        )
    return meta


class Composites:
    """The composites of one iteration, each from before it is made until it is deleted.

    Each is made in a task of its own: if the request were cancelled before its response, the
    composite could not be deleted. Keys begin with a random run id, which spreads them over the
    service's index.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = uuid.uuid4().hex[:16]
        self._numbers = itertools.count()
        self._making: dict[str, asyncio.Task[ObjectMeta]] = {}
        self._deleting: dict[str, asyncio.Task[None]] = {}
        self._failure: StorageError | None = None
        self._is_over = False

    async def begin(self, group: Group) -> str:
        """Begin to make the composite of a group, and return its key.

        Waits while `max_in_flight` composites are being deleted.
        """
        while len(self._deleting) >= self._session.options.max_in_flight:
            await asyncio.wait(tuple(self._deleting.values()), return_when=asyncio.FIRST_COMPLETED)
        session = self._session
        session.require_own_process(group[0].key)
        if self._is_over:
            uri = session.service.uri(group[0].key)
            raise StorageError(f"could not read {uri}: its store was closed meanwhile", uri=uri)
        key = f"{COMPOSITE_PREFIX}{self._run}/{datetime.now(UTC):%Y%m%dT%H%M%SZ}-"
        key += f"{next(self._numbers):06}"
        request = WriteRequest(key, Precondition(if_absent=True))
        sources = [Source(key=meta.key, generation=meta.generation) for meta in group]
        session.open_transfers.add(self)
        making = compose(session, request, sources, metas=group)
        self._making[key] = session.start_cleanup(making)
        return key

    async def wait_for(self, key: str) -> ObjectMeta:
        """Wait until a composite is made, and return its metadata."""
        return await asyncio.shield(self._making[key])

    def delete(self, key: str) -> None:
        """Begin to delete a composite, unless that is under way or done."""
        deleting = self._deleting.get(key)
        if key in self._making and (deleting is None or deleting.done()):
            self._deleting[key] = self._session.start_cleanup(self._delete(key))

    def raise_failure(self) -> None:
        """Raise the error of a composite that could not be deleted; others could not be either."""
        if self._failure is not None:
            raise self._failure

    async def finish(self, reason: BaseException | None) -> None:
        """Delete the composites that remain; a failure is added to `reason` as a note, if given.

        Raises:
            StorageError: The service rejected a delete, and all else went well.
        """
        ends_early = isinstance(reason, (asyncio.CancelledError, GeneratorExit))
        try:
            await self._clear(can_wait=not ends_early)
            self.raise_failure()
        except (AiofluxError, TimeoutError) as exc:
            if reason is None and exc is self._failure:
                raise
            note = (
                f"composites below {self._session.service.uri(COMPOSITE_PREFIX + self._run)} "
                "may be left; `Store.clean` removes them: "
                f"{str(exc) or 'the service does not answer'}"
            )
            if reason is None or ends_early:
                _log.warning("%s", note)
            else:
                reason.add_note(note)

    async def end(self) -> None:
        """Delete the composites that remain because the store is closed."""
        try:
            await self._clear(can_wait=False)
        except TimeoutError:
            _log.warning(
                "composed reads were under way when their store was closed; their composites "
                "below %s are removed by `Store.clean`",
                self._session.service.uri(COMPOSITE_PREFIX + self._run),
            )

    async def _clear(self, *, can_wait: bool) -> None:
        self._is_over = True
        self._session.open_transfers.discard(self)
        if self._making and not self._session.is_inherited:
            wait_seconds = self._session.cleanup_timeouts.composite_wait_seconds
            await self._session.clean_up(
                self._delete_all, wait_seconds=None if can_wait else wait_seconds
            )

    async def _delete_all(self) -> None:
        """Delete the composites that remain. May be cancelled and called again."""
        while self._making:
            for key in tuple(self._making):
                self.delete(key)
            await asyncio.wait(tuple(self._deleting.values()))

    async def _delete(self, key: str) -> None:
        """Delete a composite, as soon as it is known whether it was made."""
        is_cancelled = False
        try:
            generation = await self._generation(key)
            if generation is not None:
                with suppress(NotFoundError):
                    await delete(self._session, key, generation=generation)
        except asyncio.CancelledError:
            is_cancelled = True  # the end of the iteration starts it anew
            raise
        except TransientError as exc:
            _log.warning("a composite stays until `Store.clean` removes it: %s", exc)
        except StorageError as exc:
            self._failure = self._failure or _undeletable(exc)
        finally:
            if not is_cancelled:
                del self._making[key], self._deleting[key]

    async def _generation(self, key: str) -> str | None:
        """Return the generation to delete, empty for any; None if nothing was made."""
        making = self._making[key]
        if not making.done():
            await asyncio.wait([making], timeout=_COMPOSE_WAIT_SECONDS)
            making.cancel()
            await asyncio.wait([making])
        if making.cancelled():
            return ""
        error = making.exception()
        if error is None:
            return making.result().generation
        return "" if isinstance(error, TransientError) else None


def _undeletable(error: StorageError) -> StorageError:
    """Return the error of a composite that cannot be deleted."""
    return type(error)(
        f"{error.message}; a composite is temporary and would be billed until it is deleted: "
        "composed reads need storage.objects.delete and a bucket without a retention policy; other "
        "reads need neither",
        uri=error.uri,
        status=error.status,
    )


def _num_bytes(tried: TriedBatch) -> int:
    return sum(len(data) for _, data in tried if isinstance(data, bytes))


class _GroupReader:
    """Reads groups, each by a composite if it has several objects."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_warned = False
        self.composites = Composites(session)
        self.budget = PrefetchBudget(session.options.max_in_flight_bytes, ordered=True)

    async def read(self, numbered: tuple[int, Group]) -> TriedBatch:
        """Read one group within the budget, after a wait until it fits."""
        index, group = numbered
        reservation = self.budget.reserve(index)
        try:
            await reservation.acquire(sum(meta.size for meta in group))
            if len(group) > 1 and (slices := await self._composed(group)) is not None:
                return [*zip(group, slices, strict=True)]
            tried = await gather(self._direct(meta) for meta in group)
        except BaseException:
            reservation.set(0)
            raise
        reservation.set(_num_bytes(tried))
        return tried

    async def _direct(
        self, meta: ObjectMeta
    ) -> tuple[ObjectMeta, bytes] | tuple[None, StorageError]:
        """Read one object by itself."""
        try:
            return meta, (await fetch(self._session, meta.key, meta)).data
        except StorageError as exc:
            return None, exc

    async def _composed(self, group: Group) -> list[bytes] | None:
        """Read a group by a composite; None if each object must be read by itself.

        Raises:
            PermissionDeniedError: Composites may not be made, or not be read.
        """
        session = self._session
        key = await self.composites.begin(group)
        try:
            try:
                made = await self.composites.wait_for(key)
                data = (await fetch(session, key, made)).data
            finally:
                self.composites.delete(key)
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
        return split(data, group, verify=session.options.verify)


async def try_fetch_composed(
    session: Session, metas: Items[ObjectMeta], *, max_composite_bytes: int
) -> AsyncGenerator[TriedBatch, None]:
    """Yield lists of `(meta, data)` in the order of `metas`, each of the objects that are ready.

    `(None, error)` is yielded in place of an object that cannot be read.

    Args:
        session: The session of a service that can compose.
        metas: Metadata of a listing.
        max_composite_bytes: Largest size of one composite.
    """
    grouper = Grouper(
        max_sources=session.service.capabilities.max_compose_sources,
        # While one is split, it and its objects are in memory.
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
        async with nested(batches) as inner:
            async for groups in inner:
                yield [pair for group in groups for pair in group]
                reader.budget.release_yielded(len(groups), sum(map(_num_bytes, groups)))
                del groups
                reader.composites.raise_failure()
    except BaseException as exc:
        await reader.composites.finish(exc)
        raise
    await reader.composites.finish(None)
