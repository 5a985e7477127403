"""A service that reads bytes twice if no checksum covers them (`TransferOptions.verify_ranges`).

request -> first copy  [start, end)         --+
        -> second copy [start - 1, end + 1) --+--> equal: the bytes
                                              +--> different: a third copy decides

Services return checksums of whole objects only. In the second copy each byte except the first and
the last of the object has another position, counted from the beginning of the response and from its
end, so that a fault at a fixed position changes different bytes. At the edge of an object, where no
byte is before or after the range, the second copy is read by several requests.

Not found are a first or last byte of the object that is wrong in every response, and responses
whose bytes are all wrong in the same way, or every second one.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflux._concurrency.fan_out import pair
from aioflux._concurrency.loop_threads import run_on
from aioflux._http import HashedMemory
from aioflux._http.memory import new_buffer
from aioflux._services.base import ReadRequest, ServiceWrapper
from aioflux._values.checksums import crc32c
from aioflux.errors import ChecksumError, NotFoundError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aioflux._services.base import Body, Into, Service
    from aioflux._transfer.admission import Admission

_THIRD_MARGIN: Final = 2


def copy_pieces(start: int, end: int, size: int, margin: int) -> list[tuple[int, int]]:
    """Return the ranges of the requests for another copy of `[start, end)`.

    Args:
        start: First byte of the range.
        end: One past its last byte.
        size: Size of the object.
        margin: Number of bytes that the copy has before and after the range. If the object has no
            such bytes, its first or last `margin` bytes are requested by themselves.
    """
    cuts = {max(0, start - margin), min(end + margin, size)}
    if start < margin:
        cuts.add(min(margin, end))
    if end + margin > size:
        cuts.add(max(start, size - margin))
    return list(pairwise(sorted(cuts)))


class _Copy(NamedTuple):
    """Another copy of a range."""

    uri: str
    start: int
    """Position of the first byte in the object."""
    memory: memoryview
    bodies: Sequence[Body]
    """Responses, whose bytes are in `memory`."""

    def of(self, request: ReadRequest, body: Body) -> memoryview:
        """Return the bytes that the response `body` has, too.

        Raises:
            TransientError: The copy is of another generation, or too short.
        """
        kinds = {(each.generation, each.size) for each in (body, *self.bodies)}
        is_short = sum(len(each.data) for each in self.bodies) < self.memory.nbytes
        if is_short or len(kinds) > 1:
            raise _replaced(self.uri) if len(kinds) > 1 else _failed(self.uri, "bytes are missing")
        begin = request.start - self.start
        return self.memory[begin : begin + len(body.data)]


def _replaced(uri: str) -> TransientError:
    return _failed(uri, "the object was replaced meanwhile")


def _failed(uri: str, why: str) -> TransientError:
    return TransientError(f"could not read {uri} a second time: {why}", uri=uri)


class ReadingTwice(ServiceWrapper):
    """The service of a store that compares the bytes of reads with a second copy.

    The second copy is read at the same time if a request slot is free, and otherwise after the
    first, within its slot.

    Args:
        inner: The service.
        admission: Admission of the store's requests.
        loop: Event loop of `admission`; reads may run on another one.
        on_mismatch: Called with a key and a reason if two copies differ.
    """

    def __init__(
        self,
        inner: Service,
        admission: Admission,
        loop: asyncio.AbstractEventLoop,
        on_mismatch: Callable[[str, str], None],
    ) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, guarded_transport=True)
        self._admission = admission
        self._loop = loop
        self._on_mismatch = on_mismatch

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        start, end, is_pinned = request.start, request.end, bool(request.generation)
        if request.is_covered and is_pinned:
            return await self.inner.get(request, into=into)
        if end is None or not (start or is_pinned):
            # The response may have the whole object, and its checksum.
            body, checksum = await self._read(request, into)
            is_sure = await self._has_checksum(request, body)
        elif end - start <= self.capabilities.max_checked_range_bytes:
            body, checksum = await self._read(replace(request, wants_checksum=True), into)
            is_sure = body.is_verified
        elif start < (size := request.object_size or 0) and self._try_acquire_slot():
            try:
                pieces = copy_pieces(start, min(end, size), size, 1)
                reading, copying = self._read(request, into), self._try_pieces(request, pieces)
                (body, checksum), copy = await pair(reading, copying)
            finally:
                self._admission.slots.release()
            if copy is not None:
                return await self._compare(request, body, checksum, copy.of(request, body))
            is_sure = False
        else:
            body, checksum = await self._read(request, into)
            is_sure = False
        if is_sure or not body.data:
            return body
        return await self._compare(request, body, checksum, await self._read_copy(request, body, 1))

    def _try_acquire_slot(self) -> bool:
        """Acquire a slot for a second copy; return False if none is free on this event loop."""
        slots = self._admission.slots
        if asyncio.get_running_loop() is not self._loop or not slots.try_acquire():
            return False
        if slots.rate is not None:
            slots.rate.restore()  # `_start_another` acquires a token for each request
        return True

    async def _start_another(self, num_bytes: int) -> None:
        """Wait until one more request may be sent, and count it."""
        if asyncio.get_running_loop() is self._loop:
            await self._admission.start_another(num_bytes)
        else:
            await run_on(self._loop, lambda: self._admission.start_another(num_bytes))

    async def _has_checksum(self, request: ReadRequest, body: Body) -> bool:
        """Return whether the caller compares the bytes with a checksum of the object."""
        if not (request.is_covered or len(body.data) == body.size):
            return body.is_verified
        can_ask = self.capabilities.checksums and body.generation
        if body.crc32c is None and can_ask and not body.is_verified:
            with self._same_object(request):
                await self._start_another(0)
                meta = await self.inner.head(request.key, generation=body.generation)
            body.crc32c = meta.crc32c
        return body.is_verified or body.crc32c is not None

    async def _read(self, request: ReadRequest, into: Into | None) -> tuple[Body, int]:
        """Read the first copy; return it, and its crc32c."""
        placed: list[memoryview] = []
        hashed: HashedMemory | None = None
        if into is not None:
            allocate = HashedMemory(into)

            def place(num_bytes: int) -> memoryview:
                placed[:] = [allocate(num_bytes)]
                return placed[0]

            hashed = HashedMemory(place)
        try:
            body = await self.inner.get(request, into=hashed)
        except TransientError as exc:
            await self._check_received(request, placed, exc)
            raise
        data = memoryview(body.data)
        return body, crc32c(data) if hashed is None else hashed.crc32c(data)

    async def _check_received(
        self, request: ReadRequest, placed: list[memoryview], error: TransientError
    ) -> None:
        """Let the next attempt keep the bytes of a response that broke off if a copy has them."""
        num_bytes, generation = error.num_bytes_received - 2, error.generation
        # Requests as long as the response that broke off, because the copy may break off there too.
        if generation and placed and num_bytes > 0:
            start, end = request.start, request.start + num_bytes
            pinned = replace(request, generation=generation)
            try:
                copy = await self._read_pieces(pinned, copy_pieces(start, end, end + 1, 1))
            except (TransientError, NotFoundError):
                copy = None
            if copy is not None:
                view = copy.memory[start - copy.start :][:num_bytes]
                if crc32c(view) == crc32c(placed[0][:num_bytes]):
                    error.num_bytes_received = num_bytes
                    return
                self._on_mismatch(request.key, f"two reads of the bytes from {start} on differ")
        error.generation = ""

    async def _read_copy(self, request: ReadRequest, body: Body, margin: int) -> memoryview:
        """Read the bytes of a response once more; `margin` as for `copy_pieces`."""
        pieces = copy_pieces(request.start, request.start + len(body.data), body.size, margin)
        pinned = replace(request, generation=body.generation)
        with self._same_object(request):
            return (await self._read_pieces(pinned, pieces)).of(pinned, body)

    @contextmanager
    def _same_object(self, request: ReadRequest) -> Iterator[None]:
        """Raise TransientError if a read by name is continued, and its object was replaced."""
        try:
            yield
        except NotFoundError as exc:
            if request.generation:
                raise
            raise _replaced(self.uri(request.key)) from exc

    async def _try_pieces(
        self, request: ReadRequest, pieces: Sequence[tuple[int, int]]
    ) -> _Copy | None:
        """Read another copy; return None if it breaks off, so that the first copy is not lost."""
        try:
            return await self._read_pieces(request, pieces)
        except TransientError:
            return None

    async def _read_pieces(self, request: ReadRequest, pieces: Sequence[tuple[int, int]]) -> _Copy:
        first, last = pieces[0][0], pieces[-1][1]
        memory = memoryview(new_buffer(last - first))
        bodies: list[Body] = []
        for start, end in pieces:
            piece = replace(request, start=start, end=end)
            await self._start_another(end - start)
            try:
                bodies.append(await self.inner.get(piece, into=memory[start - first : end - first]))
            except TransientError as exc:
                exc.generation = ""  # its bytes are not those of the read
                raise
        return _Copy(self.uri(request.key), first, memory, bodies)

    async def _compare(
        self, request: ReadRequest, body: Body, checksum: int, copy: memoryview
    ) -> Body:
        """Return the response, with the bytes that two of up to three copies have.

        Raises:
            ChecksumError: Three reads returned three different contents.
        """
        key, start, end = request.key, request.start, request.start + len(body.data)
        other = crc32c(copy)
        if checksum == other:
            return body
        self._on_mismatch(key, f"two reads of the bytes from {start} on differ")
        edges = {*range(_THIRD_MARGIN), *range(body.size - _THIRD_MARGIN, body.size)}
        if any(body.data[at - start] != copy[at - start] for at in edges if start <= at < end):
            # A third copy would have these bytes at a position that one of the others has.
            third = await self._read_copy(request, body, 0)
            is_decided = crc32c(third) == crc32c(await self._read_copy(request, body, 1))
        else:
            third = await self._read_copy(request, body, _THIRD_MARGIN)
            is_decided = crc32c(third) in {checksum, other}
        if not is_decided:
            self._on_mismatch(key, "three reads differ")
            uri = self.uri(key)
            raise ChecksumError(
                f"could not read bytes [{start}, {end}) of {uri}: three reads returned three "
                "different contents; the network, or a proxy in between, changes bytes",
                uri=uri,
            )
        data = memoryview(body.data)
        if data.readonly:
            return replace(body, data=bytes(third))
        data[:] = third
        return body
