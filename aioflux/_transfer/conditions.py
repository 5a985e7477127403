"""A probe of the conditions of writes that a server compares, made before the first of them.

    require -> _learn (once for each endpoint and bucket in this process) -> _probe -> _try

A server that ignores a condition responds as if it held, so that only a write that must be
rejected shows it. It is tried on a temporary key, which listings leave out and `Store.clean` finds.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from aioflux._concurrency.single_flight import SingleFlight
from aioflux._services.base import Precondition, WriteRequest
from aioflux._transfer.ambiguous_writes import AmbiguousWrite
from aioflux._transfer.retry import Backoff, with_retry
from aioflux._transfer.session import THROTTLED
from aioflux._transfer.temp_keys import new_temporary_key
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
"""The generation of no object: no MD5 of bytes that are written here."""

_NOT_TAKEN: Final = frozenset({400, 501})
"""Statuses of servers that reject an unknown header."""


class _Conditions(NamedTuple):
    """Conditions that a server compares, by the fields of `Capabilities`."""

    create: bool
    replace: bool
    delete: bool


_known: dict[str, _Conditions] = {}
"""Results of probes, by endpoint and bucket. A forked child keeps them."""

_probes: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[str, SingleFlight[_Conditions]]
] = weakref.WeakKeyDictionary()
"""Probes by endpoint and bucket: writers of one loop share one."""


def forget_servers() -> None:
    """Forget the results of probes, for tests whose servers follow each other on one port."""
    _known.clear()


async def require(session: Session, key: str, precondition: Precondition) -> None:
    """Reject a condition that the server ignores; before the first one of a server, probe it.

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
        clock=session.clock,
    )


async def _learn_once(session: Session) -> None:
    service = session.service
    server = await service.unprobed_server()
    if not server:
        return
    probe = _probes.setdefault(asyncio.get_running_loop(), {}).setdefault(server, SingleFlight())
    while server not in _known:
        is_other = probe.is_running
        try:
            _known[server] = await probe.run(
                lambda: _probe(session), create_task=session.start_cleanup
            )
        except AiofluxError as exc:
            # Another store may have other credentials, or be closed meanwhile.
            if not is_other or isinstance(exc, TransientError):
                raise
    service.set_conditions(**_known[server]._asdict())


async def _probe(session: Session) -> _Conditions:
    """Try which conditions the server compares, and remove the temporary object in any case."""
    service, key = session.service, new_temporary_key()
    ambiguous, exists = AmbiguousWrite(), False
    try:
        meta = await ambiguous.watch(_put_if_supported(service, key, b"1", _CREATE))
        exists = True
        found, is_removed = await _try(session, key, meta)
    except asyncio.CancelledError:
        await _remove(session, key, is_interrupted=True)
        raise
    except StorageError as exc:
        exc.add_note("the request was to find out what the server compares; see docs/s3.md")
        if exists or ambiguous.maybe_done:
            # The write that waits for the probe must not wait for this, too.
            session.start_cleanup(_remove(session, key))
        raise
    if not is_removed:
        await _remove(session, key)
    _log.debug("%s compares conditions so: %s", service.uri(), found)
    return found


async def _remove(session: Session, key: str, *, is_interrupted: bool = False) -> None:
    async def remove() -> None:
        # By name alone: the server may reject a condition here, which is what the probe shows.
        with suppress(NotFoundError):
            await session.call(key, lambda _: session.service.delete(key))

    try:
        await session.clean_up(remove, is_interrupted=is_interrupted)
    except (AiofluxError, TimeoutError) as exc:
        _log.warning(
            "the temporary object %s may still be there, `Store.clean` removes it: %s",
            session.service.uri(key),
            str(exc) or "the service does not answer",
        )


async def _try(session: Session, key: str, meta: ObjectMeta | None) -> tuple[_Conditions, bool]:
    """Write and delete an object under conditions that hold, and under others that do not.

    `meta` is the object, created under a condition; None if the server rejected that. Returns the
    conditions that the server compares, and whether the object is gone.
    """
    create = meta is not None
    if meta is None:
        meta = await _put(session, key, b"1", Precondition())
    elif not await _is_rejected(_put(session, key, b"2", _CREATE)):
        create, meta = False, await _head(session, key)
    replaced = await _replace(session, key, b"3", meta.generation)
    replace = replaced is not None and await _is_rejected(_put(session, key, b"4", _STALE))
    meta = replaced if replaced is not None and replace else await _head(session, key)
    delete, is_removed = await _try_delete(session, key, meta.generation)
    return _Conditions(create, replace, delete), is_removed


async def _try_delete(session: Session, key: str, generation: str) -> tuple[bool, bool]:
    """Return whether the server compares the generation of a delete, and if the object is gone."""

    async def is_kept(generation: str) -> bool:
        delete = session.service.delete
        return await _is_rejected(_send(session, lambda: delete(key, generation=generation)))

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
    """Send one request of a probe, and repeat it while the server throttles.

    To repeat the whole probe would not help: Cloudflare R2 returns 429 for more than one write of a
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
    """Replace the object under a condition that holds; None if the server rejects that."""
    same, ambiguous = Precondition(if_generation_match=generation), AmbiguousWrite()
    replaced = await _send(
        session, lambda: ambiguous.watch(_put_if_supported(session.service, key, data, same))
    )
    if replaced is None and ambiguous.maybe_done:
        # Rejected, maybe because an earlier attempt was carried out: no other writer has this key.
        found = await _head(session, key)
        replaced = found if found.generation != generation else None
    return replaced


async def _put_if_supported(
    service: Service, key: str, data: bytes, precondition: Precondition
) -> ObjectMeta | None:
    """Write under a condition that holds; None if the server rejects or does not know it."""
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


async def _is_rejected(request: Awaitable[object]) -> bool:
    """Return whether a write is rejected whose condition does not hold."""
    try:
        await request
    except PreconditionFailedError:
        return True
    return False
