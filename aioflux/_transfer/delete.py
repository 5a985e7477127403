"""Deletes of objects."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from aioflux._concurrency.fan_out import bounded_map
from aioflux._services.base import ListRequest, Source
from aioflux._transfer.ambiguous_writes import AmbiguousWrite
from aioflux._transfer.retry import Backoff
from aioflux._values.meta import DeleteResult
from aioflux.errors import (
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aioflux._transfer.session import Session

__all__ = ["delete", "delete_many"]

_MIN_PAGE: Final = 8
"""Fewer objects are deleted one by one: a listing and a delete are two requests in sequence."""
_MAX_PAGES: Final = 8
"""Requests in flight that delete many."""
_NUM_PINNED_TRIES: Final = 3
"""Tries to delete by name the generation that was seen."""
_MAX_LIST_PAGES: Final = 3
"""Pages that are listed for one such request."""


async def delete(session: Session, key: str, *, generation: str = "") -> None:
    """Delete an object; never one that was written since.

    If the service has generations and a request may be repeated, the generation is read first and
    pinned: a repeated delete by name could remove what another writer wrote after the first, whose
    response was lost. Metadata of a listing saves that request.

    If the object is replaced between the two, both are repeated after a pause. While others write
    without end no generation is ever current: after three tries whatever has the key is deleted, by
    one request that is repeated only if it was never sent.

    Args:
        session: The session.
        key: Name of the object.
        generation: Delete this generation and no other; empty for the current one.

    Raises:
        NotFoundError: No object has this key, and no ambiguous attempt can have deleted it.
        PreconditionFailedError: The object has another generation, and no ambiguous attempt can
            have deleted the expected one.
    """
    is_pinned = generation or not session.service.capabilities.generations
    if is_pinned or session.retry.max_attempts == 1:
        await _delete_once(session, key, generation)
        return
    backoff = Backoff(session.retry)
    for number in range(1, _NUM_PINNED_TRIES + 1):
        meta = await session.head(key)
        try:
            await _delete_once(session, key, meta.generation, is_seen=True)
        except (NotFoundError, PreconditionFailedError):
            if number == _NUM_PINNED_TRIES or not await backoff.pause():
                break
        else:
            return
    await _delete_unpinned(session, key)


async def _delete_unpinned(session: Session, key: str) -> None:
    """Delete whatever has a key, and never by two requests that may both have been carried out."""

    async def attempt(_: int) -> TransientError | None:
        try:
            await session.service.delete(key)
        except TransientError as exc:
            if not exc.maybe_done:
                raise
            return exc
        return None

    error = await session.call(key, attempt)
    if error is not None:
        raise error


async def _delete_once(
    session: Session, key: str, generation: str, *, is_seen: bool = False
) -> None:
    """Delete one generation of an object, or any; with `is_seen` it was there a moment ago."""
    service = session.service
    ambiguous = AmbiguousWrite()

    async def attempt(number: int) -> None:
        try:
            if generation and not (await service.compares_deletes() or (is_seen and number == 1)):
                await _require_generation(session, key, generation)
            await ambiguous.watch(service.delete(key, generation=generation))
        except (NotFoundError, PreconditionFailedError):
            # Gone or replaced: the ambiguous attempt has deleted that generation.
            if not ambiguous.maybe_done:
                raise

    await session.call(key, attempt)


async def _require_generation(session: Session, key: str, generation: str) -> None:
    """Check the generation of an object for a server that deletes without comparing it.

    Raises:
        NotFoundError: It is gone.
        PreconditionFailedError: It has another generation.
    """
    try:
        await session.service.head(key, generation=generation)
    except NotFoundError as exc:
        if exc.status != 412:
            raise
        raise PreconditionFailedError(
            f"could not delete {exc.uri}: it was replaced since it was seen",
            uri=exc.uri,
            status=exc.status,
        ) from exc


@dataclass(slots=True)
class _Outcome:
    """Outcomes of the keys of a `delete_many` so far."""

    deleted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    errors: dict[str, StorageError] = field(default_factory=dict)

    def add(self, key: str, error: StorageError | None) -> None:
        """Add the outcome of a key."""
        if error is None:
            self.deleted.append(key)
        elif isinstance(error, NotFoundError):
            self.missing.append(key)
        else:
            self.errors[key] = error


async def delete_many(
    session: Session, sources: Iterable[Source], *, max_in_flight: int
) -> DeleteResult:
    """Delete all sources and return their outcomes; a failure does not stop the others.

    If one request deletes many, the keys are listed first: the response does not say which were
    missing, and not every server keeps objects that were replaced meanwhile.
    """
    outcome = _Outcome()

    async def one(source: Source, *, may_be_done: bool = False) -> None:
        try:
            await delete(session, source.key, generation=source.generation)
        except StorageError as exc:
            is_done = may_be_done and isinstance(exc, NotFoundError | PreconditionFailedError)
            outcome.add(source.key, None if is_done else exc)
        else:
            outcome.add(source.key, None)

    async def page(batch: Sequence[Source]) -> None:
        ambiguous = AmbiguousWrite()
        for source in await _delete_page(session, batch, outcome, ambiguous):
            await one(source, may_be_done=ambiguous.maybe_done)

    size = session.service.capabilities.delete_page_size
    if size:
        sources = list({source.key: source for source in sources}.values())
        if len(sources) >= _MIN_PAGE:
            sources.sort(key=lambda source: source.key)
            batches = [sources[at : at + size] for at in range(0, len(sources), size)]
            most = min(max_in_flight, _MAX_PAGES)
            async for _ in bounded_map(page, batches, max_in_flight=most, ordered=False):
                pass
            sources = ()
    async for _ in bounded_map(one, sources, max_in_flight=max_in_flight, ordered=False):
        pass
    return DeleteResult(
        deleted=tuple(sorted(outcome.deleted)),
        missing=tuple(sorted(outcome.missing)),
        errors=outcome.errors,
    )


async def _delete_page(
    session: Session, batch: Sequence[Source], outcome: _Outcome, ambiguous: AmbiguousWrite
) -> Sequence[Source]:
    """Delete the existing objects of a batch by one request; return those to delete singly.

    If an attempt was ambiguous, it may have deleted those of them that are gone or replaced.
    """
    try:
        found = await _list_generations(session, batch)
    except StorageError:
        return batch  # each raises by itself why it cannot be read
    if found is None:
        return batch
    there: list[Source] = []
    for source in batch:
        seen = found.get(source.key)
        uri = session.service.uri(source.key)
        if seen is None:
            outcome.missing.append(source.key)
        elif source.generation and source.generation != seen:
            outcome.errors[source.key] = PreconditionFailedError(
                f"could not delete {uri}: it was replaced since it was seen", uri=uri
            )
        else:
            there.append(Source(key=source.key, generation=seen))
    if not there:
        return ()

    async def attempt(_: int) -> Mapping[str, StorageError]:
        if ambiguous.maybe_done and not await session.service.compares_deletes(in_pages=True):
            raise StorageError("objects may have been written anew: each is deleted by itself")
        return await ambiguous.watch(session.service.delete_page(there))

    try:
        failed = await session.call(there[0].key, attempt)
    except StorageError:
        return there
    again: list[Source] = []
    maybe_done = ambiguous.maybe_done
    named = {source.key for source in batch if not source.generation}
    for source in there:
        error = failed.get(source.key)
        # Gone or replaced: an ambiguous attempt has deleted that generation.
        is_done = isinstance(error, NotFoundError | PreconditionFailedError) and maybe_done
        if isinstance(error, TransientError):
            ambiguous.add(error)
            again.append(source)
        elif isinstance(error, PreconditionFailedError) and source.key in named and not is_done:
            again.append(Source(key=source.key))
        else:
            outcome.add(source.key, None if is_done else error)
    return again


async def _list_generations(session: Session, batch: Sequence[Source]) -> dict[str, str] | None:
    """Return the generations of the existing objects; None if too many others lie between."""
    first, last = batch[0].key, batch[-1].key
    pairs = enumerate(zip(first, last, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))
    prefix = first[:same]
    found: dict[str, str] = {}
    request = ListRequest(prefix, first, last + "\0")
    for _ in range(_MAX_LIST_PAGES):
        page = await session.call(
            prefix,
            lambda _, request=request: session.service.list_page(request),  # type: ignore[misc]
        )
        found.update((meta.key, meta.generation) for meta in page.objects)
        if not page.next_token:
            return found
        request = replace(request, page_token=page.next_token)
    return None
