"""A probe of the preconditions that a server compares, before the first conditional write.

    require -> _load (once for each endpoint and bucket in this process) -> _probe -> _test

A server that ignores a precondition responds as if it was fulfilled. So the probe sends writes that
a server must reject. It writes to a temporary key, which listings leave out, and deletes the object
afterwards. If the delete fails, `Store.clean` deletes the object.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from aioflux._concurrency.single_flight import SingleFlight
from aioflux._services.base import Precondition, WriteRequest
from aioflux._transfer.admission import THROTTLED
from aioflux._transfer.ambiguous_writes import AmbiguousAttempts
from aioflux._transfer.retry import Backoff, with_retry
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
    from aioflux._services.base import Service
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

_log = logging.getLogger("aioflux")

T = TypeVar("T")

_CREATE: Final = Precondition(if_absent=True)
_STALE: Final = Precondition(if_generation_match=f"{'0' * 32}/1")
"""A generation that the temporary object never has: the probe writes no bytes of this MD5."""

_UNKNOWN_HEADER: Final = frozenset({400, 501})
"""Statuses of servers that reject an unknown header."""


class _Conditions(NamedTuple):
    """Kinds of requests whose precondition a server compares, as in `Capabilities`."""

    create: bool
    replace: bool
    delete: bool


_known: dict[str, _Conditions] = {}
"""Results of probes, by endpoint and bucket. They stay valid in a forked child."""

_probes: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[str, SingleFlight[_Conditions]]
] = weakref.WeakKeyDictionary()
"""Probes in progress, by endpoint and bucket: the writers of one event loop share a probe."""


def forget_servers() -> None:
    """Forget the results of all probes, for tests that start several servers on one port."""
    _known.clear()


async def require(session: Session, key: str, precondition: Precondition) -> None:
    """Reject a precondition that the server ignores, and probe an unknown server first.

    Raises:
        UnsupportedError: The server ignores the precondition, and `S3Access` does not allow that.
        StorageError: The probe failed; the next conditional write repeats it.
    """
    service = session.service
    if not service.conditions_known:
        await _load(session)
    known = service.capabilities
    if not (known.conditional_create if precondition.if_absent else known.conditional_replace):
        service.reject_condition(key, precondition)


async def check(session: Session) -> list[str]:
    """Return those of "create", "replace" and "delete" whose precondition the server ignores.

    Raises:
        UnsupportedError: The server ignores the precondition of "create" or "replace", and
            `S3Access` does not allow that.
        StorageError: The probe failed.
    """
    service = session.service
    if not service.conditions_known:
        await _load(session)
    known = service.capabilities
    ignored: list[str] = []
    if not known.conditional_create:
        ignored.append("create")
        service.reject_condition("", _CREATE, warns=False)
    if not known.conditional_replace:
        ignored.append("replace")
        service.reject_condition("", _STALE, warns=False)
    if not known.conditional_delete:
        ignored.append("delete")
    return ignored


async def _load(session: Session) -> None:
    await with_retry(
        lambda _: _load_once(session),
        session.retry,
        uri_of=session.service.uri,
        budget=session.admission.budget,
        count=session.count_retry,
        clock=session.clock,
    )


async def _load_once(session: Session) -> None:
    """Set the capabilities of the service, from an earlier probe or from a new one."""
    service = session.service
    server = await service.unprobed_server()
    if not server:
        return
    probe = _probes.setdefault(asyncio.get_running_loop(), {}).setdefault(server, SingleFlight())
    while server not in _known:
        is_shared = probe.is_running
        try:
            _known[server] = await probe.run(
                lambda: _probe(session), create_task=session.start_cleanup
            )
        except AiofluxError as exc:
            # The shared probe is of another store, which may have other credentials or be closed:
            # probe again with this store.
            if not is_shared or isinstance(exc, TransientError):
                raise
    service.set_conditions(**_known[server]._asdict())


async def _probe(session: Session) -> _Conditions:
    """Test which preconditions the server compares, and delete the temporary object afterwards."""
    service, key = session.service, new_temporary_key()
    exists = False
    try:
        meta = await _put_if_supported(service, key, b"1", _CREATE)
        exists = True
        conditions, is_removed = await _test(session, key, meta)
    except asyncio.CancelledError:
        await _remove(session, key, is_interrupted=True)
        raise
    except StorageError as exc:
        exc.add_note("the request was part of a probe of preconditions; see docs/s3.md")
        if exists or exc.maybe_done:
            # In the background: the write that waits for the probe need not wait for the delete.
            session.start_cleanup(_remove(session, key))
        raise
    if not is_removed:
        await _remove(session, key)
    _log.debug("preconditions that the server of %s compares: %s", service.uri(), conditions)
    return conditions


async def _remove(session: Session, key: str, *, is_interrupted: bool = False) -> None:
    async def remove() -> None:
        # Without a generation: the server may reject every delete that has one.
        with suppress(NotFoundError):
            await session.call(key, session.service.delete, key)

    try:
        await session.clean_up(remove, is_interrupted=is_interrupted)
    except (AiofluxError, TimeoutError) as exc:
        _log.warning(
            "the temporary object %s could not be deleted (%s); `Store.clean` deletes it later",
            session.service.uri(key),
            str(exc) or "no response from the service",
        )


async def _test(session: Session, key: str, meta: ObjectMeta | None) -> tuple[_Conditions, bool]:
    """Write and delete an object under preconditions that hold, and under some that do not hold.

    `meta` describes the object that the probe has created; it is None if the server rejected the
    precondition. Returns the preconditions that the server compares, and whether the object was
    deleted.
    """
    create = meta is not None
    if meta is None:
        meta = await _put(session, key, b"1", Precondition())
    elif not await _is_rejected(_put(session, key, b"2", _CREATE)):
        create, meta = False, await _head(session, key)
    replaced = await _replace(session, key, b"3", meta.generation)
    replace = replaced is not None and await _is_rejected(_put(session, key, b"4", _STALE))
    meta = replaced if replaced is not None and replace else await _head(session, key)
    delete, is_removed = await _test_delete(session, key, meta.generation)
    return _Conditions(create, replace, delete), is_removed


async def _test_delete(session: Session, key: str, generation: str) -> tuple[bool, bool]:
    """Return whether deletes compare the generation, and whether the object was deleted."""

    async def is_rejected(generation: str) -> bool:
        delete = session.service.delete
        return await _is_rejected(_send(session, lambda: delete(key, generation=generation)))

    try:
        if not await is_rejected(_STALE.if_generation_match or ""):
            return False, True
        is_removed = not await is_rejected(generation)
    except TransientError:
        raise
    except StorageError:  # such as a missing permission to delete
        return False, False
    return is_removed, is_removed


async def _send(session: Session, request: Callable[[], Awaitable[T]]) -> T:
    """Send one request of a probe, and retry it if the server throttles.

    The probe as a whole is not repeated instead, because it would be throttled again: Cloudflare R2
    returns 429 for more than one write of a key per second
    (developers.cloudflare.com/r2/platform/limits).
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
    return await _send(session, lambda: put(request, [data], crc32c=None))


async def _replace(session: Session, key: str, data: bytes, generation: str) -> ObjectMeta | None:
    """Replace the given generation of the object; return None if the server rejects that."""
    same, ambiguous = Precondition(if_generation_match=generation), AmbiguousAttempts()
    replaced = await _send(
        session, lambda: ambiguous.run_attempt(_put_if_supported(session.service, key, data, same))
    )
    if replaced is None and ambiguous.maybe_done:
        # An ambiguous attempt may have replaced the object before. No other writer uses the key.
        current = await _head(session, key)
        replaced = current if current.generation != generation else None
    return replaced


async def _put_if_supported(
    service: Service, key: str, data: bytes, precondition: Precondition
) -> ObjectMeta | None:
    """Write under a precondition that holds; return None if the server rejects it."""
    try:
        return await service.put(WriteRequest(key, precondition), [data], crc32c=None)
    except PreconditionFailedError:
        return None
    except (TransientError, NotFoundError, PermissionDeniedError):
        raise
    except StorageError as exc:
        if exc.status not in _UNKNOWN_HEADER:
            raise
        return None


async def _is_rejected(request: Awaitable[object]) -> bool:
    """Return whether the server rejects a request for its precondition."""
    try:
        await request
    except PreconditionFailedError:
        return True
    return False
