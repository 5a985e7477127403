"""Whether the server compares conditions of writes: found out by trying, before the first one.

    require -> learn (once for each endpoint and bucket in this process) -> _probe -> _try

A server that ignores a condition answers as if it held, so that only a write that must be refused
shows it. It is tried on a temporary key, which listings leave out and `Store.clean` finds.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from aioflux._concurrency.shielded import keep, see_through
from aioflux._services.base import Precondition, WriteRequest
from aioflux._transfer.ambiguous_writes import Fate
from aioflux._transfer.retry import Backoff, with_retry
from aioflux._transfer.session import THROTTLED
from aioflux._transfer.temp_keys import new_staged_key
from aioflux.errors import (
    AiofluxError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._services.base import Service
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["check", "forget_servers", "require"]

_log = logging.getLogger("aioflux")

T = TypeVar("T")

_CREATE: Final = Precondition(if_absent=True)
_STALE: Final = Precondition(if_generation_match=f"{'0' * 32}/1")
"""The generation of no object: the MD5 of nothing that is written here."""

_REMOVE_SECONDS: Final = 30.0
"""Time that removing the temporary object may take."""
_LAST_SECONDS: Final = 2.0
"""The same after a cancellation: the end of a loop is not to hang on a service that is away."""
_NOT_TAKEN: Final = frozenset({400, 501})
"""Statuses by which servers refuse a header that they do not know."""


class _Conditions(NamedTuple):
    """Conditions that a server compares, by the fields of `Capabilities`."""

    create: bool
    replace: bool
    delete: bool


_known: dict[str, _Conditions] = {}
"""What probes have found, by endpoint and bucket. A forked child keeps it."""

_running: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[str, asyncio.Task[_Conditions]]
] = weakref.WeakKeyDictionary()
"""Probes under way: writers of one loop share one."""


def forget_servers() -> None:
    """Forget what probes have found, for tests whose servers follow each other on one port."""
    _known.clear()


async def require(session: Session, key: str, precondition: Precondition) -> None:
    """Refuse a condition that the server ignores; the first one of a server is preceded by a probe.

    Raises:
        UnsupportedError: The server ignores it, and the caller does not allow that.
        StorageError: The probe failed; the next conditional write repeats it.
    """
    if not precondition:
        return
    service = session.service
    if not service.conditions_known:
        await _learn(session)
    can = service.capabilities
    if not (can.conditional_create if precondition.if_absent else can.conditional_replace):
        service.refuse_condition(key, precondition)


async def check(session: Session) -> list[str]:
    """Return the conditions that the server ignores, of "create", "replace" and "delete".

    Raises:
        UnsupportedError: It ignores one of writes, and the caller does not allow that.
        StorageError: The probe failed.
    """
    service = session.service
    if not service.conditions_known:
        await _learn(session)
    can = service.capabilities
    missing: list[str] = []
    if not can.conditional_create:
        missing.append("create")
        service.refuse_condition("", _CREATE, warns=False)
    if not can.conditional_replace:
        missing.append("replace")
        service.refuse_condition("", _STALE, warns=False)
    if not can.conditional_delete:
        missing.append("delete")
    return missing


async def _learn(session: Session) -> None:
    await with_retry(
        lambda _: _learn_once(session),
        session.retry,
        uri_of=session.service.uri,
        budget=session.budget,
    )


async def _learn_once(session: Session) -> None:
    service = session.service
    server = await service.unprobed_server()
    if not server:
        return
    running = _running.setdefault(asyncio.get_running_loop(), {})
    while server not in _known:
        is_other = server in running
        if not is_other:
            running[server] = task = keep(_probe(session), session.cleanups)
            task.add_done_callback(lambda task: _ended(task, running, server))
        try:
            _known[server] = await asyncio.shield(running[server])
        except AiofluxError as exc:
            # Another store may have other credentials, or be closed meanwhile.
            if not is_other or isinstance(exc, TransientError):
                raise
    service.set_conditions(**_known[server]._asdict())


def _ended(
    task: asyncio.Task[_Conditions], running: dict[str, asyncio.Task[_Conditions]], server: str
) -> None:
    del running[server]
    if not task.cancelled():
        task.exception()  # retrieved also if no writer waits any more


async def _probe(session: Session) -> _Conditions:
    """Try what the server compares, and remove what was written for it in any case."""
    service, key = session.service, new_staged_key()
    first, is_there = Fate(), False
    try:
        meta = await first.hear(_put_if_taken(service, key, b"1", _CREATE))
        is_there = True
        found, is_removed = await _try(session, key, meta)
    except asyncio.CancelledError:
        await _remove(session, key, _LAST_SECONDS)
        raise
    except StorageError as exc:
        exc.add_note("the request was to find out what the server compares; see docs/s3.md")
        if is_there or first.is_open:
            # The write that waits for the probe is not to wait for this, too.
            keep(_remove(session, key, _REMOVE_SECONDS), session.cleanups)
        raise
    if not is_removed:
        await _remove(session, key, _REMOVE_SECONDS)
    _log.debug("%s compares conditions so: %s", service.uri(), found)
    return found


async def _remove(session: Session, key: str, seconds: float) -> None:
    async def remove() -> None:
        # By name alone: whether the server takes a condition here is what was to be found out.
        with suppress(NotFoundError):
            await session.call(key, lambda _: session.service.delete(key))

    try:
        await see_through(remove, session.cleanups, seconds=seconds)
    except (AiofluxError, TimeoutError) as exc:
        _log.warning(
            "the temporary object %s may still be there, `Store.clean` removes it: %s",
            session.service.uri(key),
            str(exc) or "the service does not answer",
        )


async def _try(session: Session, key: str, meta: ObjectMeta | None) -> tuple[_Conditions, bool]:
    """Write and delete an object under conditions that hold, and under others that do not.

    Args:
        session: Where.
        key: Name of the object.
        meta: The object, created under a condition; None if the server did not take that.

    Returns:
        What the server compares, and whether the object is gone.

    Raises:
        StorageError: A request failed that has no condition, or may not be made at all.
    """
    create = meta is not None
    if meta is None:
        meta = await _put(session, key, b"1", Precondition())
    elif not await _is_refused(_put(session, key, b"2", _CREATE)):
        create, meta = False, await _head(session, key)
    replaced = await _replace(session, key, b"3", meta.generation)
    replace = replaced is not None and await _is_refused(_put(session, key, b"4", _STALE))
    meta = replaced if replaced is not None and replace else await _head(session, key)
    delete, is_removed = await _try_delete(session, key, meta.generation)
    return _Conditions(create, replace, delete), is_removed


async def _try_delete(session: Session, key: str, generation: str) -> tuple[bool, bool]:
    """Return whether the server compares the generation of a delete, and if the object is gone."""

    async def is_kept(generation: str) -> bool:
        delete = session.service.delete
        return await _is_refused(_send(session, lambda: delete(key, generation=generation)))

    try:
        if not await is_kept(_STALE.if_generation_match or ""):
            return False, True
        is_removed = not await is_kept(generation)
    except TransientError:
        raise
    except StorageError:  # such as credentials that may write and not delete
        return False, False
    return is_removed, is_removed


async def _send(session: Session, request: Callable[[], Awaitable[T]]) -> T:
    """Send one request of a probe, and again while the server says that it is too busy.

    A probe that began anew would not help: Cloudflare R2 answers 429 to more than one write of a
    key in a second (developers.cloudflare.com/r2/platform/limits).
    """
    backoff = Backoff(session.retry)
    while True:
        try:
            return await request()
        except TransientError as exc:
            if exc.status not in THROTTLED or not await backoff.pause():
                raise


async def _head(session: Session, key: str) -> ObjectMeta:
    return await _send(session, lambda: session.service.head(key))


async def _put(session: Session, key: str, data: bytes, precondition: Precondition) -> ObjectMeta:
    put = session.service.put
    request = WriteRequest(key, precondition)
    return await _send(session, lambda: put(request, data, crc32c=None))


async def _replace(session: Session, key: str, data: bytes, generation: str) -> ObjectMeta | None:
    """Replace the object under a condition that holds; None if the server does not take that."""
    same, fate = Precondition(if_generation_match=generation), Fate()
    replaced = await _send(
        session, lambda: fate.hear(_put_if_taken(session.service, key, data, same))
    )
    if replaced is None and fate.is_open:
        # It may be refused because an earlier attempt was carried out: nobody else writes this key.
        found = await _head(session, key)
        replaced = found if found.generation != generation else None
    return replaced


async def _put_if_taken(
    service: Service, key: str, data: bytes, precondition: Precondition
) -> ObjectMeta | None:
    """Write under a condition that holds; None if the server refuses it, or does not know it."""
    try:
        return await service.put(WriteRequest(key, precondition), data, crc32c=None)
    except PreconditionFailedError:
        return None
    except (TransientError, NotFoundError, PermissionDeniedError):
        raise
    except StorageError as exc:
        if exc.status not in _NOT_TAKEN:
            raise
        return None


async def _is_refused(request: Awaitable[object]) -> bool:
    """Return whether a condition that does not hold was compared, or was not taken at all."""
    try:
        await request
    except PreconditionFailedError:
        return True
    return False
