"""Record of the requests that a block of code sends, for assertions in tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Final

from aioflux._services.base import Body, Service, ServiceWrapper

_KINDS: Final = {
    "head": "head",
    "get": "get",
    "put": "put",
    "delete": "delete",
    "delete_page": "delete_many",
    "list_page": "list",
    "compose": "compose",
    "copy": "copy",
    "initiate_upload": "begin_upload",
    "put_part": "put_part",
    "put_part_copy": "put_part",
    "complete_upload": "complete_upload",
    "abort_upload": "abort_upload",
    "list_uploads": "list_uploads",
    "granted_permissions": "permissions",
}
"""Kinds of requests, by the methods of services that send one."""


@dataclass
class SentRequests:
    """Requests of all stores of a process while `record` was active."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Numbers of requests by kind, such as "get", "head", "list", "put", "put_part", "delete"."""
    bytes_received: int = 0
    """Bytes of objects in the responses."""
    bytes_sent: int = 0
    """Bytes of objects in the requests, also of those that failed."""

    @property
    def num_requests(self) -> int:
        """Number of requests, including those that repeat one."""
        return self.kinds.total()


_lock: Final = threading.Lock()
_active: Final[list[SentRequests]] = []
_undo: Final[list[Callable[[], None]]] = []


@contextmanager
def record() -> Iterator[SentRequests]:
    """Record the requests that all stores of this process send in a block.

        with record() as sent:
            run_epoch()
        assert sent.kinds == {"list": 1, "get": 12}

    Stores of any service are recorded, asynchronous and blocking ones, also those that are open
    already; child processes are not. A request is an attempt, as in `StoreStats.num_requests`.
    """
    sent = SentRequests()
    with _lock:
        if not _active:
            # Services are imported on first use, maybe in the block.
            _replace(Service, "__init_subclass__", classmethod(lambda cls: _watch_all(cls)))
            _watch_all(Service)  # type: ignore[type-abstract]
        _active.append(sent)
    try:
        yield sent
    finally:
        with _lock:
            # By identity: two records with the same numbers are equal.
            _active[:] = [each for each in _active if each is not sent]
            while _undo and not _active:
                _undo.pop()()


def _watch_all(service: type[Service]) -> None:
    """Watch the methods of all services; not of wrappers, which call another service."""
    if issubclass(service, ServiceWrapper):
        return
    for name, kind in _KINDS.items() if service is not Service else ():
        if name in vars(service):
            _replace(service, name, _watch(vars(service)[name], kind))
    if "begin_get" in vars(service) and service is not Service:
        _replace(service, "begin_get", _watch_begin(vars(service)["begin_get"]))
        _replace(service, "end_get", _watch_end(vars(service)["end_get"]))
    for subclass in service.__subclasses__():
        _watch_all(subclass)


def _replace(owner: type, name: str, value: object) -> None:
    """Replace an attribute of a class until no record is active."""
    has_own = name in vars(owner)
    undo = partial(setattr, owner, name, vars(owner)[name]) if has_own else None
    _undo.append(undo or partial(delattr, owner, name))
    setattr(owner, name, value)


def _add(kind: str = "", *, num_sent: int = 0, num_received: int = 0) -> None:
    with _lock:
        for sent in _active:
            sent.kinds.update([kind] if kind else [])
            sent.bytes_sent += num_sent
            sent.bytes_received += num_received


def _watch(method: Any, kind: str) -> Any:
    @wraps(method)
    async def call(service: Service, *arguments: Any, **settings: Any) -> Any:
        pieces = arguments[1] if kind == "put" else getattr(arguments[0], "pieces", ())
        _add(kind, num_sent=sum(memoryview(piece).nbytes for piece in pieces))
        result = await method(service, *arguments, **settings)
        if isinstance(result, Body):
            _add(num_received=len(result.data))
        return result

    return call


def _watch_begin(method: Any) -> Any:
    @wraps(method)
    def begin_get(*arguments: Any) -> Any:
        exchange = method(*arguments)
        if exchange is not None:
            _add("get")
        return exchange

    return begin_get


def _watch_end(method: Any) -> Any:
    @wraps(method)
    def end_get(*arguments: Any) -> Any:
        body = method(*arguments)
        if body is not None:
            _add(num_received=len(body.data))
        return body

    return end_get
