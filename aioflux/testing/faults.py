"""A storage service that fails as a script says: for tests of what is sent again or given up.

Faults on the wire are those of `GCSServer`; these are injected above it, without sockets or time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from aioflux._services.base import Body, Service
from aioflux._services.open import ServiceConfig, open_service
from aioflux._values.uri import parse_uri
from aioflux.errors import StorageError, TransientError
from aioflux.store import Store

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from aioflux._services.base import Into, Page, Precondition, Source, UploadedPart
    from aioflux._values.meta import ObjectMeta, OpenUpload

__all__ = ["Fault", "FlakyService", "FlakyStore", "random_faults"]

T = TypeVar("T")

_GARBAGE = 0xEE
"""What memory holds that a broken body never filled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What becomes of one call."""

    kind: Literal["refuse", "lose", "hang", "hang_after", "cut", "short", "flip"]
    """Refused before anything happens; done, but the answer lost; waiting before or after it is
    done; a body that breaks off, that is short without a word, or that has one wrong bit."""
    error: StorageError | None = None
    """Raised where the kind raises; a TransientError by default."""
    num_bytes: int = 0
    """Bytes of the body before it breaks off or ends, or the place of the wrong bit."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call hangs."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets a hanging call go on."""


Draw: TypeAlias = "Callable[[str], Fault | None]"
"""Decides what becomes of a call of an operation that no script says anything of."""


def random_faults(rng: random.Random, *, share: float, loses: bool = True) -> Draw:
    """Return what has a share of all calls fail, in every way that another attempt mends.

    Wrong bits are not among them: whether they are noticed depends on the read.

    Args:
        rng: Random numbers.
        share: From 0 to 1.
        loses: Whether answers to writes are lost, too.
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


class FlakyService(Service):
    """Passes every call on to another service, with the next fault of its operation.

    Args:
        inner: The other service.
        draw: Chooses the fault of a call where `fail` has ordered none.

    Attributes:
        calls: (operation, key) of every call, in order.
        num_faults: Calls that met a fault.
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
        """Have the next calls of an operation fail, one fault each; None lets one pass."""
        self._faults[operation].extend(faults)

    def count(self, operation: str) -> int:
        """Return how often an operation was called."""
        return sum(name == operation for name, _ in self.calls)

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

    async def unprobed_server(self) -> str:
        """Pass on."""
        server = await self._inner.unprobed_server()
        self.conditions_known = self._inner.conditions_known
        return server

    def set_conditions(self, *, create: bool, replace: bool, delete: bool) -> None:
        """Pass on."""
        self._inner.set_conditions(create=create, replace=replace, delete=delete)
        self.capabilities = self._inner.capabilities
        self.conditions_known = True

    def refuse_condition(self, key: str, precondition: Precondition, *, warns: bool = True) -> None:
        """Pass on."""
        self._inner.refuse_condition(key, precondition, warns=warns)

    async def compares_deletes(self, *, in_pages: bool = False) -> bool:
        """Pass on."""
        return await self._inner.compares_deletes(in_pages=in_pages)

    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        """Pass on, or fail."""
        return await self._run("head", key, lambda: self._inner.head(key, generation=generation))

    async def get(
        self,
        key: str,
        *,
        generation: str = "",
        start: int = 0,
        end: int | None = None,
        into: Into | None = None,
    ) -> Body:
        """Pass on, or fail."""

        def call() -> Awaitable[Body]:
            return self._inner.get(key, generation=generation, start=start, end=end, into=into)

        return await self._run("get", key, call)

    async def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        crc32c: int | None,
        precondition: Precondition,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        """Pass on, or fail."""
        settings: dict[str, Any] = {"content_type": content_type, "metadata": metadata}
        return await self._run(
            "put",
            key,
            lambda: self._inner.put(
                key, data, crc32c=crc32c, precondition=precondition, **settings
            ),
        )

    async def delete(self, key: str, *, generation: str = "") -> None:
        """Pass on, or fail."""
        await self._run("delete", key, lambda: self._inner.delete(key, generation=generation))

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        """Pass on, or fail."""
        return await self._run("delete", "", lambda: self._inner.delete_page(sources))

    async def list_page(
        self,
        prefix: str,
        *,
        start_offset: str = "",
        end_offset: str = "",
        delimiter: str = "",
        match_glob: str = "",
        page_token: str = "",
        page_size: int | None = None,
    ) -> Page:
        """Pass on, or fail."""
        return await self._run(
            "list_page",
            prefix,
            lambda: self._inner.list_page(
                prefix,
                start_offset=start_offset,
                end_offset=end_offset,
                delimiter=delimiter,
                match_glob=match_glob,
                page_token=page_token,
                page_size=page_size,
            ),
        )

    async def compose(
        self,
        key: str,
        sources: Sequence[Source],
        *,
        precondition: Precondition,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        """Pass on, or fail."""
        settings: dict[str, Any] = {"content_type": content_type, "metadata": metadata}
        return await self._run(
            "compose",
            key,
            lambda: self._inner.compose(key, sources, precondition=precondition, **settings),
        )

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        """Pass on, or fail."""
        return await self._run(
            "copy", key, lambda: self._inner.copy(source, key, precondition=precondition)
        )

    async def initiate_upload(
        self, key: str, *, content_type: str = "", metadata: Mapping[str, str] | None = None
    ) -> str:
        """Pass on, or fail."""
        settings: dict[str, Any] = {"content_type": content_type, "metadata": metadata}
        return await self._run(
            "initiate_upload", key, lambda: self._inner.initiate_upload(key, **settings)
        )

    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        pieces: Sequence[bytes | memoryview],
        *,
        offset: int,
        crc32c: int | None,
    ) -> UploadedPart:
        """Pass on, or fail."""

        def call() -> Awaitable[UploadedPart]:
            return self._inner.put_part(
                key, upload_id, number, pieces, offset=offset, crc32c=crc32c
            )

        return await self._run("put_part", key, call)

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[UploadedPart],
        *,
        precondition: Precondition,
    ) -> ObjectMeta:
        """Pass on, or fail."""
        return await self._run(
            "complete_upload",
            key,
            lambda: self._inner.complete_upload(key, upload_id, parts, precondition=precondition),
        )

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Pass on, or fail."""
        await self._run("abort_upload", key, lambda: self._inner.abort_upload(key, upload_id))

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """Pass on, or fail."""
        return await self._run("list_uploads", prefix, lambda: self._inner.list_uploads(prefix))

    async def granted_permissions(self, permissions: Sequence[str]) -> Sequence[str]:
        """Pass on, or fail."""
        return await self._run(
            "granted_permissions", "", lambda: self._inner.granted_permissions(permissions)
        )

    async def aclose(self) -> None:
        """Close the other service."""
        await self._inner.aclose()


def _altered(body: Body, fault: Fault, uri: str) -> Body:
    """Spoil a body, in the memory that it came in."""
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
    """A store on a `FlakyService` over the service that its uri means.

    Args:
        uri: As `aioflux.open_store` takes it.
        draw: As `FlakyService`.
        **settings: As `aioflux.Store`.
    """

    def __init__(self, uri: str, *, draw: Draw, **settings: Any) -> None:
        super().__init__(parse_uri(uri), **settings)
        self._draw = draw
        self.services: list[FlakyService] = []
        """One for each loop that the store was used on."""

    def _open_service(self, config: ServiceConfig) -> Service:
        service = FlakyService(open_service(config), draw=self._draw)
        self.services.append(service)
        return service
