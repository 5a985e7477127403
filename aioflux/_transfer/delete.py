"""Deleting objects."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from aioflux._concurrency.fan_out import bounded_map
from aioflux._services.base import ListRequest, Source
from aioflux._transfer.ambiguous_writes import Fate
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
"""Fewer objects are deleted one by one: to list what there is, and to delete it, are two requests
after each other."""
_MAX_PAGES: Final = 8
"""Requests at once that delete many."""
_PINNED_TRIES: Final = (False, False, True)
"""Tries to delete by name the generation that was seen; True is the last of them."""
_MAX_LOOKS: Final = 3
"""Pages that are listed for one such request."""


async def delete(session: Session, key: str, *, generation: str = "") -> None:
    """Delete an object; never one that was written since.

    A name is looked up first and that generation deleted, where the service has generations and a
    request may be sent again: a repeated delete of whatever has the name could remove what somebody
    wrote after the first, whose answer was lost. Metadata of a listing saves the look.

    If the object is replaced between look and delete, both are repeated after a pause. While others
    write without end no look is ever in time: after three tries whatever has the name is deleted,
    by one request that is not sent again unless it never left.

    Args:
        session: Where.
        key: Name of the object.
        generation: Delete this generation and no other; empty for the one there is.

    Raises:
        NotFoundError: No object has this key, and no attempt whose answer was lost can have deleted
            it.
        PreconditionFailedError: The object has another generation, and no attempt whose answer was
            lost can have deleted that one.
    """
    is_pinned = generation or not session.service.capabilities.generations
    if is_pinned or session.retry.max_attempts == 1:
        await _delete_once(session, key, generation)
        return
    backoff = Backoff(session.retry)
    for is_last in _PINNED_TRIES:
        meta = await session.call(key, lambda _: session.service.head(key))
        try:
            await _delete_once(session, key, meta.generation, is_seen=True)
        except (NotFoundError, PreconditionFailedError):
            if is_last or not await backoff.pause():
                break
        else:
            return
    await _delete_unpinned(session, key)


async def _delete_unpinned(session: Session, key: str) -> None:
    """Delete whatever has a name, and never by two requests that may both have been carried out."""

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
    """Delete one generation of an object.

    Args:
        session: Where.
        key: Name of the object.
        generation: The generation; empty for any.
        is_seen: The object had that generation a moment ago.
    """
    service = session.service
    fate = Fate()

    async def attempt(number: int) -> None:
        try:
            if generation and not (await service.compares_deletes() or (is_seen and number == 1)):
                await _require_generation(session, key, generation)
            await fate.hear(service.delete(key, generation=generation))
        except (NotFoundError, PreconditionFailedError):
            # Gone, or replaced since: that generation is deleted.
            if not fate.is_open:
                raise

    await session.call(key, attempt)


async def _require_generation(session: Session, key: str, generation: str) -> None:
    """Look at an object that a server would delete in whatever generation it is.

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
    """What became of the keys of a `delete_many` so far."""

    deleted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    errors: dict[str, StorageError] = field(default_factory=dict)

    def note(self, key: str, error: StorageError | None) -> None:
        """Note how the attempt to delete a key has ended."""
        if error is None:
            self.deleted.append(key)
        elif isinstance(error, NotFoundError):
            self.missing.append(key)
        else:
            self.errors[key] = error


async def delete_many(
    session: Session, sources: Iterable[Source], *, max_in_flight: int
) -> DeleteResult:
    """Delete each source, and tell what became of it; one that fails does not keep the others.

    Where one request deletes many, it is listed first what there is: such a request tells neither
    what was missing, nor does every server keep what was replaced since it was seen.
    """
    outcome = _Outcome()

    async def one(source: Source, *, may_be_done: bool = False) -> None:
        try:
            await delete(session, source.key, generation=source.generation)
        except StorageError as exc:
            is_done = may_be_done and isinstance(exc, NotFoundError | PreconditionFailedError)
            outcome.note(source.key, None if is_done else exc)
        else:
            outcome.note(source.key, None)

    async def page(batch: Sequence[Source]) -> None:
        fate = Fate()
        for source in await _delete_page(session, batch, outcome, fate):
            await one(source, may_be_done=fate.is_open)

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
    session: Session, batch: Sequence[Source], outcome: _Outcome, fate: Fate
) -> Sequence[Source]:
    """Delete what is there of a batch by one request, and return what is to be deleted singly.

    Args:
        session: Where.
        batch: What is to be deleted.
        outcome: Takes what became of it.
        fate: Takes whether a request was sent whose answer was lost: of what is to be deleted
            singly, what is gone, or was replaced since, may have been deleted by it.
    """
    try:
        found = await _look(session, batch)
    except StorageError:
        return batch  # each tells by itself why it cannot be looked at
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
        if fate.is_open and not await session.service.compares_deletes(in_pages=True):
            raise StorageError("what was deleted may have been written anew: each is looked at")
        return await fate.hear(session.service.delete_page(there))

    try:
        failed = await session.call(there[0].key, attempt)
    except StorageError:
        return there
    again: list[Source] = []
    is_open = fate.is_open
    named = {source.key for source in batch if not source.generation}
    for source in there:
        error = failed.get(source.key)
        # Gone, or replaced since, where an attempt was lost: that generation is deleted.
        is_done = isinstance(error, NotFoundError | PreconditionFailedError) and is_open
        if isinstance(error, TransientError):
            fate.note(error)
            again.append(source)
        elif isinstance(error, PreconditionFailedError) and source.key in named and not is_done:
            again.append(Source(key=source.key))
        else:
            outcome.note(source.key, None if is_done else error)
    return again


async def _look(session: Session, batch: Sequence[Source]) -> dict[str, str] | None:
    """Return the generations of what there is of a batch; None where too much else lies between."""
    first, last = batch[0].key, batch[-1].key
    pairs = enumerate(zip(first, last, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))
    prefix = first[:same]
    found: dict[str, str] = {}
    request = ListRequest(prefix, first, last + "\0")
    for _ in range(_MAX_LOOKS):
        page = await session.call(
            prefix,
            lambda _, request=request: session.service.list_page(request),  # type: ignore[misc]
        )
        found.update((meta.key, meta.generation) for meta in page.objects)
        if not page.next_token:
            return found
        request = replace(request, page_token=page.next_token)
    return None
