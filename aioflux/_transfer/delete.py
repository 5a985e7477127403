"""Deletes of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from aioflux._concurrency.fan_out import bounded_map
from aioflux._services.base import ListRequest, Source
from aioflux._transfer.ambiguous_writes import AmbiguousAttempts, mark_maybe_done
from aioflux._transfer.retry import Backoff
from aioflux._values.meta import DeleteResult
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

_MIN_PAGE: Final = 8
"""Fewest objects for a page delete, which is one request for many objects. A page delete needs a
listing first, so that fewer objects are deleted faster one by one."""
_MAX_PAGES: Final = 8
"""Maximum number of page deletes in flight."""
_REPLACED: Final = "it was replaced since its generation was read"
_NUM_PINNED_TRIES: Final = 3
"""Maximum number of tries to read the current generation of an object and to delete this
generation."""
_MAX_LIST_PAGES: Final = 3
"""Maximum number of pages that are listed before one page delete."""


async def delete(
    session: Session, key: str, *, generation: str = "", is_latest: bool = True
) -> None:
    """Delete an object, so that a retry cannot delete an object that was written later.

    If no generation is given, the service has generations and the policy allows retries, then the
    current generation is read first and then deleted. Without a generation, a retry after a lost
    response could delete an object that another writer created after the first attempt. A caller
    that passes the generation from a listing saves the first request.

    If the object is replaced between the two requests, both are repeated after a pause. After three
    tries, or earlier if the policy allows no further pause, the current object is deleted without a
    generation, because other writers replace it too often. This request is retried only if it
    cannot have been carried out.

    Args:
        session: The session.
        key: Name of the object.
        generation: Delete only this generation; empty for the current one.
        is_latest: False if the generation is known to be noncurrent.

    Raises:
        NotFoundError: No object has this key, and no ambiguous attempt can have deleted it.
        PreconditionFailedError: The object has another generation, and no ambiguous attempt can
            have deleted the given generation.
    """
    is_pinned = generation or not session.service.capabilities.generations
    if is_pinned or session.retry.max_attempts == 1:
        await _delete_once(session, key, generation, is_latest=is_latest)
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


async def delete_if_damaged(session: Session, meta: ObjectMeta, checksum: int) -> None:
    """Delete an object that was just written if its checksum is not that of the sent bytes.

    Before the delete, the metadata is read again, because the response could be damaged instead.

    Raises:
        ChecksumError: The stored object was damaged.
    """
    if not session.options.verify or meta.crc32c in {None, checksum}:
        return
    error = ChecksumError(
        f"could not write {meta.uri}: the stored object has crc32c {meta.crc32c:#010x}, but the "
        f"sent bytes have {checksum:#010x}; write it again",
        uri=meta.uri,
    )
    try:
        stored = await session.head(meta.key, meta.generation)
        if (stored.generation, stored.crc32c) == (meta.generation, checksum):
            return
        await delete(session, meta.key, generation=meta.generation)
    except StorageError as exc:
        error.add_note(f"the stored object may still exist: {exc}")
    else:
        error.add_note("the stored object was removed")
    raise error


async def _delete_unpinned(session: Session, key: str) -> None:
    """Delete the current object of a key, without a retry after an ambiguous attempt."""

    async def attempt() -> TransientError | None:
        try:
            await session.service.delete(key)
        except TransientError as exc:
            if not exc.maybe_done:
                raise
            return exc
        return None

    error = await session.call(key, attempt)
    if error is not None:
        mark_maybe_done(error)
        raise error


async def _delete_once(
    session: Session,
    key: str,
    generation: str,
    *,
    is_seen: bool = False,
    is_latest: bool = True,
) -> None:
    """Delete one generation of an object, or any generation if `generation` is empty.

    With `is_seen` the caller has just read that the generation is current.
    """
    service = session.service
    call = service.delete if is_latest else service.delete_version
    ambiguous = AmbiguousAttempts()

    async def attempt() -> None:
        nonlocal is_seen
        was_seen, is_seen = is_seen, False
        try:
            if generation and not (await service.has_conditional_delete() or was_seen):
                await _require_generation(session, key, generation)
            await ambiguous.run_attempt(call(key, generation=generation))
        except (NotFoundError, PreconditionFailedError):
            # The generation no longer exists: after an ambiguous attempt that is a success.
            if not ambiguous.maybe_done:
                raise

    try:
        await session.call(key, attempt)
    except StorageError as exc:
        if ambiguous.maybe_done:
            mark_maybe_done(exc)
        raise


async def _require_generation(session: Session, key: str, generation: str) -> None:
    """Check the generation of an object, for a server whose deletes do not compare generations.

    Raises:
        NotFoundError: No object has this key.
        PreconditionFailedError: The object has another generation.
    """
    try:
        await session.service.head(key, generation=generation)
    except NotFoundError as exc:
        if exc.status != 412:
            raise
        raise PreconditionFailedError.of("delete", exc.uri, _REPLACED, status=412) from exc


@dataclass(slots=True)
class _Outcome:
    """Outcomes of `delete_many` by key, so far."""

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
    """Delete many objects and return the outcome of each; a failure does not stop other deletes.

    Before a page delete the keys are listed: the response to a page delete does not say which
    objects were missing, and some servers ignore the generations in the request.
    """
    outcome = _Outcome()

    async def delete_one(source: Source, *, maybe_done: bool = False) -> None:
        try:
            await delete(
                session, source.key, generation=source.generation, is_latest=source.is_latest
            )
        except StorageError as exc:
            is_done = maybe_done and isinstance(exc, NotFoundError | PreconditionFailedError)
            outcome.add(source.key, None if is_done else exc)
        else:
            outcome.add(source.key, None)

    async def delete_page(batch: Sequence[Source]) -> None:
        ambiguous = AmbiguousAttempts()
        for source in await _delete_page(session, batch, outcome, ambiguous):
            await delete_one(source, maybe_done=ambiguous.maybe_done)

    size = session.service.capabilities.delete_page_size
    sources = list(sources)
    if size and all(source.is_latest for source in sources):
        sources = list({source.key: source for source in sources}.values())
        if len(sources) >= _MIN_PAGE:
            sources.sort(key=lambda source: source.key)
            batches = [sources[start : start + size] for start in range(0, len(sources), size)]
            most = min(max_in_flight, _MAX_PAGES)
            async for _ in bounded_map(delete_page, batches, max_in_flight=most, ordered=False):
                pass
            sources = ()
    async for _ in bounded_map(delete_one, sources, max_in_flight=max_in_flight, ordered=False):
        pass
    return DeleteResult(
        deleted=tuple(sorted(outcome.deleted)),
        missing=tuple(sorted(outcome.missing)),
        errors=outcome.errors,
    )


async def _delete_page(
    session: Session, batch: Sequence[Source], outcome: _Outcome, ambiguous: AmbiguousAttempts
) -> Sequence[Source]:
    """Delete the existing objects of a batch by one request; return those to delete one by one.

    After an ambiguous attempt, a returned object that no longer exists counts as deleted.
    """
    try:
        listed = await _list_generations(session, batch)
    except StorageError:
        return batch  # the delete of each object raises the error of its own key
    if listed is None:
        return batch
    existing: list[Source] = []
    for source in batch:
        current = listed.get(source.key)
        uri = session.service.uri(source.key)
        if current is None:
            outcome.missing.append(source.key)
        elif source.generation and source.generation != current:
            outcome.errors[source.key] = PreconditionFailedError.of("delete", uri, _REPLACED)
        else:
            existing.append(Source(key=source.key, generation=current))
    if not existing:
        return ()

    async def attempt() -> Mapping[str, StorageError]:
        if ambiguous.maybe_done and not await session.service.has_conditional_delete(in_pages=True):
            raise StorageError("objects may have been replaced; delete each by its own request")
        return await ambiguous.run_attempt(session.service.delete_page(existing))

    try:
        failed = await session.call(existing[0].key, attempt)
    except StorageError:
        return existing
    remaining: list[Source] = []
    maybe_done = ambiguous.maybe_done
    unpinned = {source.key for source in batch if not source.generation}
    for source in existing:
        error = failed.get(source.key)
        # The generation no longer exists: after an ambiguous attempt that is a success.
        is_done = isinstance(error, NotFoundError | PreconditionFailedError) and maybe_done
        if isinstance(error, TransientError):
            ambiguous.add_failure(error)
            remaining.append(source)
        elif isinstance(error, PreconditionFailedError) and source.key in unpinned and not is_done:
            remaining.append(Source(key=source.key))
        else:
            outcome.add(source.key, None if is_done else error)
    return remaining


async def _list_generations(session: Session, batch: Sequence[Source]) -> dict[str, str] | None:
    """Return the generations of the existing objects by key, from a listing of the keys' range.

    Returns None if the listing has more than `_MAX_LIST_PAGES` pages, because too many other
    objects are in the range.
    """
    first, last = batch[0].key, batch[-1].key
    pairs = enumerate(zip(first, last, strict=False))
    num_common = next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))
    prefix = first[:num_common]
    generations: dict[str, str] = {}
    request = ListRequest(prefix, first, last + "\0")
    for _ in range(_MAX_LIST_PAGES):
        page = await session.call(prefix, session.service.list_page, request)
        generations.update((meta.key, meta.generation) for meta in page.objects)
        if not page.next_token:
            return generations
        request = replace(request, page_token=page.next_token)
    return None
