"""Services and stores that fail on purpose, to test how a program handles storage errors.

The faults are injected into method calls: no socket is involved and no time passes. For faults of
the network connection, see `aioflux.testing.GCSServer`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
)

from aioflux._services.base import (
    Body,
    ListRequest,
    PartRequest,
    ReadRequest,
    Service,
    ServiceConfig,
    ServiceWrapper,
    WriteRequest,
)
from aioflux._services.open import open_service
from aioflux._values.uri import parse_uri
from aioflux.errors import StorageError, TransientError
from aioflux.options import RetryPolicy, Timeouts, TransferOptions
from aioflux.store import Store

if TYPE_CHECKING:
    import random

    from aioflux._services.base import Into
    from aioflux.options import StoreOptions

__all__ = ["Fault", "FlakyService", "FlakyStore", "random_faults"]

P = ParamSpec("P")
T = TypeVar("T")

_GARBAGE = 0xEE
"""Byte that overwrites the missing end of a truncated body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, injected into one call of a service."""

    kind: Literal["refuse", "lose", "hang", "hang_after", "cut", "short", "flip"]
    """Effect of the fault:

    * `refuse`: raise `error` and do not call the service.
    * `lose`: call the service, then raise `error` in place of the result.
    * `hang`, `hang_after`: wait for `released` before or after calling the service.
    * `cut`: truncate the body after `num_bytes` and raise `error`.
    * `short`: truncate the body after `num_bytes` and return it as if it were complete.
    * `flip`: flip one bit of the body.
    """
    error: StorageError | None = None
    """Error that `refuse`, `lose` and `cut` raise. By default a TransientError."""
    num_bytes: int = 0
    """Length of the truncated body for `cut` and `short`; position of the wrong byte for
    `flip`, which is the last byte of a shorter body."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that the fault sets when the call starts to hang."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that the test sets to let the hanging call continue."""


Draw: TypeAlias = "Callable[[str], Fault | None]"
"""Function from the name of an operation to the fault of its next call; None means no fault."""


def random_faults(rng: random.Random, *, share: float, loses: bool = True) -> Draw:
    """Return a `draw` function that makes a random share of all calls fail.

    Every fault is transient: it affects one call. A retry is another call, and fails with the same
    probability. Bits are never flipped, because not every read compares checksums.

    Args:
        rng: Random number generator.
        share: Share of the calls that fail, from 0 to 1.
        loses: Whether operations except `get` may also raise after the service has executed them.
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
    """Return the key or prefix in an argument of a service method; None if it has neither."""
    match argument:
        case str():
            return argument
        case ReadRequest() | WriteRequest() | PartRequest():
            return argument.key
        case ListRequest():
            return argument.prefix
    return None


def _forward(
    method: Callable[Concatenate[Service, P], Awaitable[T]], operation: str = ""
) -> Callable[Concatenate[FlakyService, P], Coroutine[Any, Any, T]]:
    """Return a method that forwards calls to the inner service and injects faults."""
    name = method.__name__

    async def call(self: FlakyService, /, *args: P.args, **settings: P.kwargs) -> T:
        key = next((key for value in args if (key := _key_of(value)) is not None), "")
        inner = cast("Callable[P, Awaitable[T]]", getattr(self.inner, name))
        return await self._run(operation or name, key, lambda: inner(*args, **settings))

    call.__name__, call.__doc__ = name, method.__doc__
    return call


class FlakyService(ServiceWrapper):
    """Wrapper that forwards every call to another service and injects faults.

    Args:
        inner: Service that is wrapped.
        draw: Function that chooses the fault of each call. Faults queued by `fail` come first.

    Attributes:
        calls: Operation and key of every call, in order.
        num_faults: Number of injected faults.
    """

    def __init__(self, inner: Service, *, draw: Draw | None = None) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self.num_faults = 0
        self._draw = draw
        self._faults: defaultdict[str, deque[Fault | None]] = defaultdict(deque)

    def fail(self, operation: str, *faults: Fault | None) -> None:
        """Queue faults for the next calls of an operation, one per call; None for no fault."""
        self._faults[operation].extend(faults)

    def count(self, operation: str) -> int:
        """Return how often an operation was called."""
        return sum(name == operation for name, _ in self.calls)

    head = _forward(Service.head)
    put = _forward(Service.put)
    delete = _forward(Service.delete)
    delete_version = _forward(Service.delete_version, "delete")
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

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        """See base class."""

        def allocate(num_bytes: int) -> memoryview:
            assert callable(into)
            return into(num_bytes)

        # Not `into` itself, which may compute the checksum of bytes that a fault changes later.
        memory = allocate if callable(into) else into
        return await self._run("get", request.key, lambda: self.inner.get(request, into=memory))

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
            f"could not {operation} {uri}: injected fault",
            uri=uri,
            maybe_done=fault.kind == "lose",
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
        return cast("T", _damage_body(result, fault, uri)) if isinstance(result, Body) else result


def _damage_body(body: Body, fault: Fault, uri: str) -> Body:
    """Apply a fault to a body, in place if its memory is writable."""
    data = memoryview(body.data)
    if data.readonly:
        data = memoryview(bytearray(data))
    if fault.kind == "flip":
        data[min(fault.num_bytes, data.nbytes - 1)] ^= 1
        return replace(body, data=data)
    if fault.kind in {"cut", "short"}:
        size = min(fault.num_bytes, data.nbytes)
        data[size:] = bytes([_GARBAGE]) * (data.nbytes - size)
        if fault.kind == "short":
            return replace(body, data=data[:size])
        raise fault.error or TransientError(
            f"could not read {uri}: the body ended early",
            uri=uri,
            num_bytes_received=size,
            generation=body.generation,
        )
    return body


class FlakyStore(Store):
    """Store whose calls to the storage service fail as `draw` chooses.

    Args:
        uri: Uri of the store, as for `aioflux.open_store`.
        draw: Function that chooses the fault of each call, as for `FlakyService`.
        **options: Keywords of `aioflux.open_store`, with the same defaults.
    """

    def __init__(self, uri: str, *, draw: Draw, **options: Unpack[StoreOptions]) -> None:
        defaults = {
            "transfer": TransferOptions(),
            "retry": RetryPolicy(),
            "timeouts": Timeouts(),
        }
        given = {name: each for name, each in options.items() if each is not None}
        settings: Any = defaults | given
        super().__init__(parse_uri(uri), **settings)
        self._draw = draw
        self.services: list[FlakyService] = []
        """The wrapped services, one for each event loop that has used the store."""

    def _open_service(self, config: ServiceConfig) -> Service:
        service = FlakyService(open_service(config), draw=self._draw)
        self.services.append(service)
        return service
