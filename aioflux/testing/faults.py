"""Storage services and stores with injected faults, to test what is retried or raised.

Faults of connections are those of `GCSServer`; these are injected above, without sockets or time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
)

from aioflux._services.base import (
    Body,
    ListRequest,
    ReadRequest,
    Service,
    ServiceConfig,
    WriteRequest,
)
from aioflux._services.open import open_service
from aioflux._values.uri import parse_uri
from aioflux.errors import StorageError, TransientError
from aioflux.store import Store

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Coroutine

    from aioflux._services.base import Precondition

__all__ = ["Fault", "FlakyService", "FlakyStore", "random_faults"]

P = ParamSpec("P")
T = TypeVar("T")

_GARBAGE = 0xEE
"""Byte in memory that a truncated body leaves unfilled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of one call."""

    kind: Literal["refuse", "lose", "hang", "hang_after", "cut", "short", "flip"]
    """`refuse` fails before the call, `lose` after it; `hang` waits before the call, `hang_after`
    after it; `cut` breaks a body off, `short` truncates it silently, `flip` flips one bit."""
    error: StorageError | None = None
    """Error of `refuse`, `lose` and `cut`; a TransientError by default."""
    num_bytes: int = 0
    """Bytes of the body before its end, or the position of the wrong bit."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call hangs."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets a hanging call continue."""


Draw: TypeAlias = "Callable[[str], Fault | None]"
"""Returns the fault of a call of an operation, or None."""


def random_faults(rng: random.Random, *, share: float, loses: bool = True) -> Draw:
    """Return a function that draws faults which another attempt mends, for a share of all calls.

    Flipped bits are not among them: whether they are noticed depends on the read.

    Args:
        rng: Random numbers.
        share: From 0 to 1.
        loses: Lose responses to writes, too.
    """

    def draw(operation: str) -> Fault | None:
        if rng.random() >= share:
            return None
        kinds: list[Any] = ["refuse"]
        if operation == "get":
            kinds += ["lose", "cut", "short"]
        elif loses:
            kinds.append("lose")
        return Fault(kind=rng.choice(kinds), num_bytes=rng.choice((0, 1, 1000, 50_000)))

    return draw


def _key_of(argument: object) -> str | None:
    """Return the key or prefix that an argument of a service names, if it names one."""
    match argument:
        case str():
            return argument
        case ReadRequest() | WriteRequest():
            return argument.key
        case ListRequest():
            return argument.prefix
    return None


def _forward(
    method: Callable[Concatenate[Service, P], Awaitable[T]], operation: str = ""
) -> Callable[Concatenate[FlakyService, P], Coroutine[Any, Any, T]]:
    """Return a method that calls that of the inner service, with the next fault of an operation."""
    name = method.__name__

    async def call(self: FlakyService, /, *args: P.args, **settings: P.kwargs) -> T:
        key = next((key for value in args if (key := _key_of(value)) is not None), "")
        inner = cast("Callable[P, Awaitable[T]]", getattr(self._inner, name))
        return await self._run(operation or name, key, lambda: inner(*args, **settings))

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class FlakyService(Service):
    """A service that forwards calls to another one, with faults.

    Args:
        inner: The other service.
        draw: Chooses the fault of a call for which `fail` has set none.

    Attributes:
        calls: (operation, key) of every call, in order.
        num_faults: Calls with a fault.
    """

    def __init__(self, inner: Service, *, draw: Draw | None = None) -> None:
        super().__init__(root_uri=inner.uri(), prefix="")
        self.capabilities = inner.capabilities
        self.conditions_known = inner.conditions_known
        self.calls: list[tuple[str, str]] = []
        self.num_faults = 0
        self._inner = inner
        self._draw = draw
        self._faults: defaultdict[str, deque[Fault | None]] = defaultdict(deque)

    def fail(self, operation: str, *faults: Fault | None) -> None:
        """Let the next calls of an operation fail, one fault each; with None a call succeeds."""
        self._faults[operation].extend(faults)

    def count(self, operation: str) -> int:
        """Return how often an operation was called."""
        return sum(name == operation for name, _ in self.calls)

    head = _forward(Service.head)
    get = _forward(Service.get)
    put = _forward(Service.put)
    delete = _forward(Service.delete)
    delete_page = _forward(Service.delete_page, "delete")
    list_page = _forward(Service.list_page)
    compose = _forward(Service.compose)
    copy = _forward(Service.copy)
    initiate_upload = _forward(Service.initiate_upload)
    put_part = _forward(Service.put_part)
    complete_upload = _forward(Service.complete_upload)
    abort_upload = _forward(Service.abort_upload)
    list_uploads = _forward(Service.list_uploads)
    granted_permissions = _forward(Service.granted_permissions)

    async def unprobed_server(self) -> str:
        """See base class."""
        server = await self._inner.unprobed_server()
        self.conditions_known = self._inner.conditions_known
        return server

    def set_conditions(self, *, create: bool, replace: bool, delete: bool) -> None:
        """See base class."""
        self._inner.set_conditions(create=create, replace=replace, delete=delete)
        self.capabilities = self._inner.capabilities
        self.conditions_known = True

    def refuse_condition(self, key: str, precondition: Precondition, *, warns: bool = True) -> None:
        """See base class."""
        self._inner.refuse_condition(key, precondition, warns=warns)

    async def compares_deletes(self, *, in_pages: bool = False) -> bool:
        """See base class."""
        return await self._inner.compares_deletes(in_pages=in_pages)

    async def aclose(self) -> None:
        """Close the inner service."""
        await self._inner.aclose()

    async def _run(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls.append((operation, key))
        faults = self._faults[operation]
        if faults:
            fault = faults.popleft()
        else:
            fault = None if self._draw is None else self._draw(operation)
        if fault is None:
            return await call()
        self.num_faults += 1
        uri = self.uri(key)
        error = fault.error or TransientError(
            f"could not {operation} {uri}: a fault", uri=uri, maybe_done=fault.kind == "lose"
        )
        if fault.kind == "refuse":
            raise error
        if fault.kind == "hang":
            fault.reached.set()
            await fault.released.wait()
        result = await call()
        if fault.kind == "hang_after":
            fault.reached.set()
            await fault.released.wait()
        if fault.kind == "lose":
            raise error
        return cast("T", _altered(result, fault, uri)) if isinstance(result, Body) else result


def _altered(body: Body, fault: Fault, uri: str) -> Body:
    """Return a body with a fault, in the same memory."""
    data = memoryview(body.data)
    if data.readonly:
        data = memoryview(bytearray(data))
    if fault.kind == "flip":
        data[fault.num_bytes] ^= 1
        return replace(body, data=data)
    if fault.kind in {"cut", "short"}:
        size = min(fault.num_bytes, data.nbytes)
        data[size:] = bytes([_GARBAGE]) * (data.nbytes - size)
        if fault.kind == "short":
            return replace(body, data=data[:size])
        raise fault.error or TransientError(
            f"could not read {uri}: the body broke off",
            uri=uri,
            num_bytes_received=size,
            generation=body.generation,
        )
    return body


class FlakyStore(Store):
    """A store on a `FlakyService` over the service of its uri.

    Args:
        uri: As for `aioflux.open_store`.
        draw: As for `FlakyService`.
        **settings: As for `aioflux.Store`.
    """

    def __init__(self, uri: str, *, draw: Draw, **settings: Any) -> None:
        super().__init__(parse_uri(uri), **settings)
        self._draw = draw
        self.services: list[FlakyService] = []
        """One for each event loop of the store."""

    def _open_service(self, config: ServiceConfig) -> Service:
        service = FlakyService(open_service(config), draw=self._draw)
        self.services.append(service)
        return service
