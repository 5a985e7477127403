"""One HTTP/1.1 connection: a body is received into the memory it is meant for.

    kernel --recv--> scratch --head--> parse --+-- small body: copied out of the same recv
                                               +-- large body: the next recv has the destination
    caller's memory --slices--> transport.write --> kernel

Nothing here allocates a timer. The pool asks every connection now and then whether it moved
(`check`), and the hot path only sets a flag.

Over 500 lines because it is one state machine, whose callbacks share the state of one request: cut
in two, the halves would reach into each other on the hot path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, cast

from aioflux._http.body import (
    MAX_ERROR_BODY_BYTES,
    Buffer,
    Destination,
    StreamedBody,
    check_length,
    new_buffer,
    place,
)
from aioflux._http.codec import (
    MAX_HEAD_BYTES,
    Headers,
    ResponseHead,
    Shape,
    match_head,
    parse_head,
)
from aioflux._http.errors import (
    ConnectionLostError,
    ProtocolError,
    StalledError,
    TransportError,
)
from aioflux._http.memory import BytesBuffer

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.options import Timeouts

__all__ = ["Connection", "Response", "Waiter"]

# One recv takes the head and a body of up to about this size; a larger body costs a copy of at
# most this much.
_SCRATCH_BYTES: Final = MAX_HEAD_BYTES
# After a body of more than `_LARGE_BYTES` the next head is received nearly by itself: what comes
# with it would be copied.
_HEAD_BYTES: Final = 4096
_LARGE_BYTES: Final = 32 * 1024
# Most body bytes handed to the transport at once: what it may hold of the caller's memory.
# 32 MiB PUTs to nginx on loopback: 0.91 GB/s in slices of 256 KiB, 0.97 of 1 MiB, 0.87 of 4 MiB,
# which is within the noise of that machine.
_SLICE_BYTES: Final = 1024 * 1024
# TLS encrypts a copy of a whole slice, which then leaves unseen: so the slice bounds both memory
# and the slowest link that is not taken for a stall (256 KiB in `progress_seconds`).
_TLS_SLICE_BYTES: Final = 256 * 1024
_MAX_INTERIM_RESPONSES: Final = 16
_INT: Final = struct.Struct("i")
_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)  # Linux alone has it
# A server holds back less than a segment: 1,460 bytes on most networks, 8,948 with jumbo frames.
_SEGMENT_BYTES: Final = 16 * 1024


class Waiter(Protocol):
    """Who is told of a response: a future, or what is called as one at once."""

    def done(self) -> bool:
        """Whether it waits no more."""

    def set_result(self, result: Response, /) -> None:
        """Take a whole response; the connection is free by then."""

    def set_exception(self, exception: Exception, /) -> None:
        """Take the reason why there is none."""


@dataclass(slots=True)
class Response:
    """A whole response."""

    status: int
    """HTTP status, not judged here."""
    headers: Headers
    """Fields, names in lower case."""
    body: Buffer
    """The body; a view of `into` where that was memory and the status is 2xx."""
    num_bytes: int
    """Length of the body, in bytes."""
    connection: Connection | None = field(default=None, compare=False, repr=False)
    """The connection that it came over; None for aiohttp's."""

    def discard_connection(self) -> None:
        """Send no further request over the connection: its answers are not to be trusted."""
        if self.connection is not None:
            self.connection.retire()


class Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time.

    Attributes:
        is_usable: Another request may be sent.
        is_lost: The transport is closed for good; `on_lost` has been or is being called.
        num_requests: Requests sent so far, the one under way included.
        response_begun: The server has answered the request under way with at least one byte.
        request_left: The last request may have left whole; otherwise its server never had all of
            it, and a request that is not whole is not acted on.
    """

    def __init__(self, *, on_lost: Callable[[Connection], None], is_tls: bool) -> None:
        self.is_usable = False
        self.is_lost = False
        self.num_requests = 0
        self.response_begun = False
        self.request_left = False
        self._on_lost = on_lost
        self._is_tls = is_tls
        self._slice_bytes = _TLS_SLICE_BYTES if is_tls else _SLICE_BYTES
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._poll: select.poll | None = None
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._num_scratch = 0
        self._room = _SCRATCH_BYTES
        # The request under way.
        self._waiter: Waiter | None = None
        self._is_head_request = False
        self._into: Destination | None = None
        self._max_body_bytes: int | None = None
        self._head_seconds = 0.0
        self._held = b""
        self._outgoing: deque[memoryview] = deque()
        self._has_body = False
        self._write_paused = False
        # The response under way.
        self._head: ResponseHead | None = None
        self._shape: Shape | None = None
        self._num_interim = 0
        self._body: Buffer = b""
        self._own: BytesBuffer | None = None
        self._destination: memoryview | None = None
        self._num_received = 0
        self._num_expected = 0
        self._streamed: StreamedBody | None = None
        # What the ticker sees.
        self._moved = True
        self._moved_at = 0.0
        self._num_unsent = 0

    # What the pool calls.

    def send(
        self,
        request_head: bytes,
        body: list[memoryview] | None,
        *,
        is_head: bool,
        into: Destination | None,
        max_body_bytes: int | None,
        head_seconds: float,
        waiter: Waiter,
        is_held: bool = False,
    ) -> None:
        """Send a request; `waiter` is told of its response, or of the `TransportError`.

        One that is held leaves with `write_held`.

        Whoever wants to hear no more calls `abort`. By the time the waiter is told, the transport
        reads none of the body's memory any more.
        """
        self._waiter = waiter
        self._is_head_request = is_head
        self._into = into
        self._max_body_bytes = max_body_bytes
        self._head_seconds = head_seconds
        self.num_requests += 1
        self.response_begun = False
        self.request_left = True
        self._moved = True
        if body:
            self._has_body = True
            self._outgoing.extend(body)
        self._held = request_head
        if not is_held:
            self.write_held()

    def write_held(self) -> None:
        """Let the request leave that is held, if it was not dropped meanwhile."""
        request_head, self._held = self._held, b""
        try:
            if self._has_body:
                self._send_slices(request_head)
            elif request_head:
                self._transport.write(request_head)
        except Exception as error:  # the requests of others are written after it
            self._fail(error)

    @property
    def is_stale(self) -> bool:
        """Whether the request that has failed met a connection closed while it was idle."""
        return self.num_requests > 1 and not self.response_begun

    def has_spoken(self) -> bool:
        """Whether the kernel holds something that the server sent unasked: its end, as a rule.

        The loop tells of it when it turns next. One system call, worth it where a request cannot
        be sent twice.
        """
        if self._poll is None:
            shared = self._transport.get_extra_info("socket")
            if shared is None or shared.fileno() < 0:
                return True
            self._poll = select.poll()
            self._poll.register(shared.fileno(), select.POLLIN)
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """Close now, whatever is under way; no memory of a request is read or written after."""
        self.is_usable = False
        transport = self._transport
        if self._has_body and not transport.is_closing() and transport.get_write_buffer_size():
            self._stop_sending()
        transport.abort()
        self._reset()

    def retire(self) -> None:
        """Take no further request: close now, or when the request under way has ended."""
        self.is_usable = False
        if self._waiter is None:
            self.abort()

    def check(self, now: float, timeouts: Timeouts, *, slept_seconds: float = 0.0) -> None:
        """Fail or close what has stood still for too long.

        Args:
            now: Time of the loop's clock, in seconds.
            timeouts: The limits.
            slept_seconds: Time of late in which the loop stood still itself: no server is blamed
                for it.
        """
        if self._moved:
            self._moved = False
            self._moved_at = now
            return
        if self._waiter is None:
            if now - self._moved_at >= timeouts.idle_seconds:
                self.abort()
            return
        self._moved_at += slept_seconds
        silent_seconds = now - self._moved_at
        doing, limit = "sending the request body", timeouts.progress_seconds
        if self.response_begun:
            doing = "receiving the response"
        else:
            num_unsent = self._count_unsent() if self._has_body else 0
            if num_unsent != self._num_unsent:
                self._num_unsent = num_unsent
                self._moved_at = now
                return
            if not num_unsent and not self._outgoing:
                doing, limit = "waiting for the response to begin", self._head_seconds
        if silent_seconds >= limit:
            self._fail(StalledError(f"nothing moved for {limit:g} s while {doing}"))

    def _count_unsent(self) -> int:
        """Return the bytes that the transport holds, and on Linux those that the kernel holds.

        The kernel takes some MiB of a body at once, also for a server that reads nothing.
        """
        num_unsent = self._transport.get_write_buffer_size()
        shared = self._transport.get_extra_info("socket")
        if sys.platform == "linux" and shared is not None and shared.fileno() >= 0:
            # SIOCOUTQ: what the peer has not acknowledged (tcp(7)).
            (num_held,) = _INT.unpack(
                fcntl.ioctl(shared.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
            )
            num_unsent += num_held
        return num_unsent

    def fail_closed(self) -> None:
        """Fail the request under way because its pool closes."""
        if self._waiter is not None:
            self._fail(ConnectionLostError("the pool was closed while the request was under way"))
        else:
            self.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_usable = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Memory for the next recv: the rest of the destination, or scratch."""
        if self._destination is not None:
            return self._destination[self._num_received :]
        return self._scratch_view[self._num_scratch : self._room]

    def buffer_updated(self, nbytes: int) -> None:
        """Account for bytes that the kernel has put into the last `get_buffer`."""
        self._moved = True
        if self._destination is not None:
            self._num_received += nbytes
            if self._num_received >= self._num_expected:
                if self._num_received > self._num_expected and self._own is not None:
                    # More than the response: whatever it is, the next one would begin with it.
                    self._own.seal()
                    self.is_usable = False
                self._finish(self._num_expected)
            elif self._num_expected - self._num_received < _SEGMENT_BYTES:
                self._acknowledge()
        elif self._waiter is None:
            # Bytes that nobody asked for: no telling what a next response would begin with.
            self.abort()
        elif self._held:
            # The same; the request has not left, and goes over another connection.
            self._fail(ConnectionLostError("the server sent bytes that nobody had asked for"))
        else:
            try:
                if self._streamed is None:
                    self._take_head(nbytes)
                else:
                    self._take_streamed(self._streamed, 0, nbytes)
            except Exception as error:  # also what the caller's allocator raises
                self._fail(error)

    def eof_received(self) -> None:
        """The server sends no more: the end of a body until close, or of the connection."""
        self.is_usable = False
        streamed = self._streamed
        if streamed is not None and self._head is not None and not self._head.chunked:
            try:
                self._body = streamed.finish()
                self._finish(streamed.num_bytes)
            except Exception as error:  # what the caller's allocator raises
                self._fail(error)
        elif self._waiter is not None:
            # Left alone, the transport would go on sending the body to a server that has left.
            self._fail(
                ConnectionLostError("the server closed the connection before it had answered whole")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request under way, and tell the pool."""
        self.is_usable = False
        self.is_lost = True
        if self._has_body and exc is not None:
            self._read_what_is_left()
        if self._waiter is not None:
            error = ConnectionLostError("the connection was closed before the response was whole")
            if exc is not None:
                error = ConnectionLostError(f"the connection was lost: {exc}")
                error.__cause__ = exc
            self._fail(error)
        self._on_lost(self)

    def pause_writing(self) -> None:
        """The transport holds enough."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The transport has sent what it held: it may have more."""
        self._write_paused = False
        self._moved = True
        if self._outgoing and not self._held:
            self._send_slices()

    # Sending.

    def _send_slices(self, request_head: bytes = b"") -> None:
        """Hand slices of the body to the transport until it has enough."""
        outgoing = self._outgoing
        while outgoing and not self._write_paused:
            pieces: list[bytes | memoryview] = []
            room = self._slice_bytes
            if request_head:
                pieces.append(request_head)
                request_head = b""
            while outgoing and room:
                view = outgoing.popleft()
                if len(view) > room:
                    outgoing.appendleft(view[room:])
                    view = view[:room]
                room -= len(view)
                pieces.append(view)
            if len(pieces) == 1:
                self._transport.write(pieces[0])
            else:
                self._transport.writelines(pieces)

    def _stop_sending(self) -> None:
        """Make sure that nothing more of the caller's memory leaves.

        `abort` closes the socket in the next turn of the loop, and until then the transport may
        send what it holds; the caller may change that memory as soon as we return. A shutdown
        through a second descriptor works at once.
        """
        shared = self._transport.get_extra_info("socket")
        if shared is not None and shared.fileno() >= 0:
            with socket.socket(fileno=os.dup(shared.fileno())) as own:
                try:
                    own.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # Not connected any more, which is what we want.
                    return

    # Receiving.

    def _read_what_is_left(self) -> None:
        """Read an answer that came before the write that failed.

        A server that refuses an upload may answer and close; a write then fails, and the transport
        gives up with the answer unread in the kernel. Under TLS only the transport could read it.
        """
        shared = self._transport.get_extra_info("socket")
        if self._is_tls or shared is None or shared.fileno() < 0:
            return
        with socket.socket(fileno=os.dup(shared.fileno())) as own:
            try:
                while self._waiter is not None and (
                    num_bytes := own.recv_into(self.get_buffer(-1))
                ):
                    self.buffer_updated(num_bytes)
            except OSError:
                # No more is here, or the reset itself has come to the front.
                return
        if self._waiter is not None:
            self.eof_received()

    def _take_head(self, num_new: int) -> None:
        """Look for the end of the head in scratch; go on to the body from there."""
        self.response_begun = True
        scratch = self._scratch
        start = self._num_scratch
        self._num_scratch = end = start + num_new
        if self._shape is not None and not start:
            known = match_head(self._shape, scratch, end)
            if known is not None and known[0].status >= 200:
                self._num_scratch = 0
                self._begin_response(*known, end)
                return
        stop = scratch.find(b"\r\n\r\n", max(start - 3, 0), end)
        while stop >= 0:
            stop += 4
            head, shape = parse_head(bytes(self._scratch_view[:stop]))
            if head.status >= 200:
                self._num_scratch = 0
                if shape is not None and shape.pattern is not None:
                    self._shape = shape
                self._begin_response(head, stop, end)
                return
            self._drop_interim(head, stop, end)
            end = self._num_scratch
            stop = scratch.find(b"\r\n\r\n", 0, end)
        self._room = _SCRATCH_BYTES
        self._acknowledge()
        # Something that is not HTTP may never send an empty line: say so now, not after a stall.
        begin = bytes(scratch[: min(end, 40)])
        if not b"HTTP/1.".startswith(begin[:7]):
            raise ProtocolError(f"not an HTTP/1.1 response: {begin!r}")
        if end >= MAX_HEAD_BYTES:
            raise ProtocolError(f"response head is over {MAX_HEAD_BYTES} bytes")

    def _begin_response(self, head: ResponseHead, start: int, end: int) -> None:
        """Take a head, and what of its body `scratch[start:end]` holds."""
        if (
            self._into is not bytes
            or head.content_length != end - start
            or (head.status != 200 and head.status != 206)
            or not (head.keep_alive and self.is_usable)
            or self._is_head_request
            or self._has_body
            or (self._max_body_bytes is not None and end - start > self._max_body_bytes)
        ):
            self._begin_body(head, start, end)
            return
        # All of it is here, as of most small objects: nothing has to be prepared.
        waiter = self._waiter
        self._waiter = None
        self._into = None
        self._num_interim = 0
        if waiter is not None and not waiter.done():
            body = bytes(self._scratch_view[start:end])
            waiter.set_result(Response(head.status, head.headers, body, end - start, self))

    def _drop_interim(self, head: ResponseHead, stop: int, end: int) -> None:
        """Skip a 1xx response: the final one follows it."""
        self._num_interim += 1
        if head.status == 101:
            raise ProtocolError("the server switched protocols without being asked")
        if self._num_interim > _MAX_INTERIM_RESPONSES:
            raise ProtocolError(f"more than {_MAX_INTERIM_RESPONSES} interim responses")
        self._scratch[: end - stop] = self._scratch[stop:end]
        self._num_scratch = end - stop

    def _begin_body(self, head: ResponseHead, start: int, end: int) -> None:
        """Prepare for the body that a head announces, of which `scratch[start:end]` is here."""
        self._head = head
        status = head.status
        if self._is_head_request or status in (204, 304):
            num_bytes: int | None = 0
        else:
            num_bytes = head.content_length
        if not head.keep_alive:
            self.is_usable = False
        if self._outgoing:
            # An answer before the whole request: nobody waits for the rest of it.
            self._outgoing.clear()
            self.is_usable = False
        if num_bytes is None:
            self._begin_streamed(head, start, end)
            return
        into = self._into
        if not 200 <= status < 300:
            into = None
            if num_bytes > MAX_ERROR_BODY_BYTES:
                num_bytes = MAX_ERROR_BODY_BYTES
                self.is_usable = False
        else:
            check_length(num_bytes, into, self._max_body_bytes)
        self._begin_sized(into, num_bytes, start, end)

    def _begin_sized(self, into: Destination | None, num_bytes: int, start: int, end: int) -> None:
        """Take the part of a body of known length that came with its head."""
        num_here = end - start
        self._room = _HEAD_BYTES if num_bytes > _LARGE_BYTES else _SCRATCH_BYTES
        if num_here > num_bytes:
            # More than the response: whatever it is, the next one would begin with it.
            self.is_usable = False
            num_here = num_bytes
        here = self._scratch_view[start : start + num_here]
        if into is None or into is bytes:
            if num_here == num_bytes:
                self._body = bytes(here)
                self._finish(num_bytes)
                return
            if into is None:
                self._body = new_buffer(num_bytes)
                destination = memoryview(self._body)
            else:
                self._own = BytesBuffer(num_bytes)
                destination = self._own.room
        else:
            self._body = destination = place(into, num_bytes)
        destination[:num_here] = here
        self._num_received = num_here
        if num_here == num_bytes:
            self._finish(num_bytes)
        else:
            self._num_expected = num_bytes
            self._destination = destination
            if num_bytes - num_here < _SEGMENT_BYTES:
                self._acknowledge()

    def _begin_streamed(self, head: ResponseHead, start: int, end: int) -> None:
        """Begin a body whose length is not known: chunked, or until the connection closes."""
        self._room = _SCRATCH_BYTES
        if not head.chunked:
            self.is_usable = False
        self._streamed = StreamedBody(
            status=head.status,
            chunked=head.chunked,
            into=self._into,
            max_body_bytes=self._max_body_bytes,
        )
        self._take_streamed(self._streamed, start, end)

    def _take_streamed(self, streamed: StreamedBody, start: int, end: int) -> None:
        """Feed `scratch[start:end]` to a body of unknown length."""
        try:
            stop = streamed.feed(self._scratch, start, end)
        finally:
            self._num_received = streamed.num_bytes
        if streamed.is_done:
            if stop != end or streamed.is_truncated:
                self.is_usable = False
            self._body = streamed.finish()
            self._finish(streamed.num_bytes)
        else:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Acknowledge what has come now, because a part of the response is missing.

        A server that sends a response in pieces and collects small ones (Nagle's algorithm, as Ceph
        does at its defaults) holds back the next piece until then, and the kernel would wait up to
        40 ms: 44 ms for each small read over loopback, instead of 0.2. The option holds for this
        one acknowledgement.
        """
        shared = self._transport.get_extra_info("socket")
        if _QUICKACK is None or shared is None or shared.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # the connection is lost, which the transport reports
            shared.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    # Ending.

    def _finish(self, num_bytes: int) -> None:
        """Hand over the whole response."""
        waiter, head = self._waiter, self._head
        body = self._body if self._own is None else self._own.finish()
        has_body = self._has_body
        if has_body and self.is_usable and self._transport.get_write_buffer_size():
            self.is_usable = False
        if self.is_usable:
            self._reset()
        else:
            # Before the caller wakes: it may reuse the memory of the body at once.
            self.abort()
        if waiter is not None and head is not None and not waiter.done():
            waiter.set_result(Response(head.status, head.headers, body, num_bytes, self))

    def _fail(self, error: Exception) -> None:
        """Close the connection, and fail the request under way."""
        waiter = self._waiter
        if isinstance(error, TransportError):
            error.head = self._head
            error.num_bytes_received = self._num_placed()
            error.request_sent = True
        if self._outgoing or self._held:
            self.request_left = False
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _num_placed(self) -> int:
        """Leading bytes of the body that are in the caller's memory."""
        if self._streamed is not None:
            return self._streamed.num_placed
        return self._num_received if self._body is self._destination else 0

    def _reset(self) -> None:
        """Let go of everything that belongs to the request that has ended."""
        self._waiter = None
        self._held = b""
        self._into = None
        self._head = None
        self._body = b""
        self._own = None
        self._destination = None
        self._streamed = None
        self._num_received = 0
        self._num_scratch = 0
        self._num_interim = 0
        self._num_unsent = 0
        if self._has_body:
            self._has_body = False
            self._outgoing.clear()
