"""One HTTP/1.1 connection, which receives bodies directly into their destination.

    kernel --recv--> scratch --head--> parse --+-- small body: copied from the same recv
                                               +-- large body: the next recv has the destination
    caller's memory --slices--> transport.write --> kernel

There is no timer per request. The hot path sets a flag at each progress, and the pool looks at the
flags of all connections now and then (`check_timeouts`).

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
    memory_for,
)
from aioflux._http.codec import (
    MAX_HEAD_BYTES,
    Headers,
    HeadTemplate,
    ResponseHead,
    match_head,
    parse_head,
)
from aioflux._http.errors import (
    ConnectionLostError,
    ProtocolError,
    StalledError,
    TransportError,
)
from aioflux._http.memory import BytesBuffer, new_buffer

if sys.platform == "linux":
    import fcntl
    import termios

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._http.connection_slots import ConnectionSlots
    from aioflux.options import Timeouts

__all__ = ["Connection", "Response", "ResponseFuture"]

# One recv takes the head and a body of up to about this size; a larger body costs a copy of at
# most this much.
_SCRATCH_BYTES: Final = MAX_HEAD_BYTES
# After a body of more than `_LARGE_BYTES` the next head is received nearly by itself: the part of
# the body that comes with it is copied.
_HEAD_BYTES: Final = 4096
_LARGE_BYTES: Final = 32 * 1024
# Most body bytes handed to the transport at once: what it may hold of the caller's memory.
# 32 MiB PUTs to nginx on loopback: 0.91 GB/s in slices of 256 KiB, 0.97 of 1 MiB, 0.87 of 4 MiB,
# which is within the noise of that machine.
_SLICE_BYTES: Final = 1024 * 1024
# TLS encrypts a copy of a whole slice, and how much of that was sent is not visible: the slice
# bounds both memory and the slowest link that does not count as stalled (256 KiB in
# `progress_seconds`).
_TLS_SLICE_BYTES: Final = 256 * 1024
_MAX_INTERIM_RESPONSES: Final = 16
_INT: Final = struct.Struct("i")
_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)  # Linux alone has it
# A server holds back less than a segment: 1,460 bytes on most networks, 8,948 with jumbo frames.
_SEGMENT_BYTES: Final = 16 * 1024


class ResponseFuture(Protocol):
    """The methods of an asyncio future by which a response is delivered.

    An object other than a future is called within the callback that received the response.
    """

    def done(self) -> bool:
        """Return whether the response is no longer awaited."""

    def set_result(self, result: Response, /) -> None:
        """Receive a complete response; the connection is free by then."""

    def set_exception(self, exception: Exception, /) -> None:
        """Receive the reason why there is none."""


@dataclass(slots=True)
class Response:
    """A complete response."""

    status: int
    """HTTP status; any, an error is the caller's to raise."""
    headers: Headers
    """Fields, names in lower case."""
    body: Buffer
    """The body; a view of `into` if that was memory and the status is 2xx."""
    num_bytes: int
    """Length of the body, in bytes."""
    connection: Connection | None = field(default=None, compare=False, repr=False)
    """The connection it was received on; None for aiohttp's."""

    def discard_connection(self) -> None:
        """Send no further request over the connection: its responses cannot be trusted."""
        if self.connection is not None:
            self.connection.retire()


class Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time.

    Attributes:
        slots: Slots of the pool, one of which it holds; None if no request has waited for it.
        is_usable: Another request may be sent.
        is_lost: The transport is closed for good; `on_lost` has been or is being called.
        num_requests: Requests so far, the current one included.
        response_started: At least one byte of the response to the current request was received.
        fully_sent: The last request may have been sent completely; otherwise the server cannot have
            acted on it.
    """

    def __init__(self, *, on_lost: Callable[[Connection], None], is_tls: bool) -> None:
        self.slots: ConnectionSlots | None = None
        self.is_usable = False
        self.is_lost = False
        self.num_requests = 0
        self.response_started = False
        self.fully_sent = False
        self._on_lost = on_lost
        self._is_tls = is_tls
        self._slice_bytes = _TLS_SLICE_BYTES if is_tls else _SLICE_BYTES
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._poll: select.poll | None = None
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._num_scratch = 0
        self._scratch_end = _SCRATCH_BYTES
        # The current request.
        self._future: ResponseFuture | None = None
        self._is_head_request = False
        self._into: Destination | None = None
        self._max_body_bytes: int | None = None
        self._head_seconds = 0.0
        self._unwritten_head = b""
        self._outgoing: deque[memoryview] = deque()
        self._has_body = False
        self._write_paused = False
        # Its response.
        self._head: ResponseHead | None = None
        self._template: HeadTemplate | None = None
        self._num_interim = 0
        self._body: Buffer = b""
        self._bytes_buffer: BytesBuffer | None = None
        self._destination: memoryview | None = None
        self._num_received = 0
        self._num_expected = 0
        self._streamed: StreamedBody | None = None
        # For `check_timeouts`.
        self._has_progressed = True
        self._progress_at = 0.0
        self._num_unsent = 0

    # Called by the pool.

    def send(
        self,
        request_head: bytes,
        body: list[memoryview] | None,
        *,
        is_head: bool,
        into: Destination | None,
        max_body_bytes: int | None,
        head_seconds: float,
        future: ResponseFuture,
    ) -> None:
        """Start a request, which `flush` writes; its response or error is set on `future`.

        `abort` cancels it. By the time the future is set, the transport no longer reads the body's
        memory.
        """
        self._future = future
        self._is_head_request = is_head
        self._into = into
        self._max_body_bytes = max_body_bytes
        self._head_seconds = head_seconds
        self.num_requests += 1
        self.response_started = False
        self.fully_sent = True
        self._has_progressed = True
        if body:
            self._has_body = True
            self._outgoing.extend(body)
        self._unwritten_head = request_head

    def flush(self) -> None:
        """Write the started request, unless it was aborted meanwhile."""
        request_head, self._unwritten_head = self._unwritten_head, b""
        try:
            if self._has_body:
                self._send_slices(request_head)
            elif request_head:
                self._transport.write(request_head)
        except Exception as error:  # other connections are flushed after this one
            self._fail(error)

    @property
    def is_stale(self) -> bool:
        """Return whether the connection was closed between the previous request and this one."""
        return self.num_requests > 1 and not self.response_started

    def has_expired(self) -> bool:
        """Return whether the idle socket is readable: as a rule, the server has closed it.

        The event loop reports it in its next iteration only. One system call, worth it for a
        request that cannot be sent twice.
        """
        if self._poll is None:
            shared = self._transport.get_extra_info("socket")
            if shared is None or shared.fileno() < 0:
                return True
            self._poll = select.poll()
            self._poll.register(shared.fileno(), select.POLLIN)
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """Close now and drop the current request; its memory is neither read nor written after."""
        self.is_usable = False
        transport = self._transport
        if self._has_body and not transport.is_closing() and transport.get_write_buffer_size():
            self._shut_down_socket()
        transport.abort()
        self._reset()

    def release(self) -> None:
        """Release its slot, after a request that `Pool.start_get` started."""
        assert self.slots is not None
        self.slots.release(self)

    def retire(self) -> None:
        """Accept no further request: close now, or when the current request has ended."""
        self.is_usable = False
        if self._future is None:
            self.abort()

    def check_timeouts(self, now: float, timeouts: Timeouts, *, late_seconds: float = 0.0) -> None:
        """Fail a request without progress, or close an idle connection, after its timeout.

        Args:
            now: Time of the loop's clock, in seconds.
            timeouts: The limits.
            late_seconds: Time for which the loop itself was blocked, which does not count.
        """
        if self._has_progressed:
            self._has_progressed = False
            self._progress_at = now
            return
        if self._future is None:
            if now - self._progress_at >= timeouts.idle_seconds:
                self.abort()
            return
        self._progress_at += late_seconds
        silent_seconds = now - self._progress_at
        doing, limit = "sending the request body", timeouts.progress_seconds
        if self.response_started:
            doing = "receiving the response"
        else:
            num_unsent = self._count_unsent() if self._has_body else 0
            if num_unsent != self._num_unsent:
                self._num_unsent = num_unsent
                self._progress_at = now
                return
            if not num_unsent and not self._outgoing:
                doing, limit = "waiting for the response to start", self._head_seconds
        if silent_seconds >= limit:
            self._fail(StalledError(f"no progress for {limit:g} s while {doing}"))

    def _count_unsent(self) -> int:
        """Return the bytes in the transport's buffer, and on Linux in the kernel's.

        The kernel accepts some MiB of a body at once, even if the server reads nothing.
        """
        num_unsent = self._transport.get_write_buffer_size()
        shared = self._transport.get_extra_info("socket")
        if sys.platform == "linux" and shared is not None and shared.fileno() >= 0:
            # SIOCOUTQ: bytes that the peer has not acknowledged (tcp(7)).
            (num_in_kernel,) = _INT.unpack(
                fcntl.ioctl(shared.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
            )
            num_unsent += num_in_kernel
        return num_unsent

    def close(self) -> None:
        """Close because the pool is closed; fail the current request."""
        if self._future is not None:
            self._fail(ConnectionLostError("the pool was closed while the request was under way"))
        else:
            self.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to accept requests on this transport."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_usable = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next recv: the rest of the destination, or scratch."""
        if self._destination is not None:
            return self._destination[self._num_received :]
        return self._scratch_view[self._num_scratch : self._scratch_end]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were received into the last `get_buffer`."""
        self._has_progressed = True
        if self._destination is not None:
            self._num_received += nbytes
            if self._num_received >= self._num_expected:
                if self._num_received > self._num_expected and self._bytes_buffer is not None:
                    # Bytes after the response, with which the next one would start.
                    self._bytes_buffer.restore_end()
                    self.is_usable = False
                self._finish(self._num_expected)
            elif self._num_expected - self._num_received < _SEGMENT_BYTES:
                self._acknowledge()
        elif self._future is None:
            # Bytes without a request, with which the next response would start.
            self.abort()
        elif self._unwritten_head:
            # The same; the request is not sent yet, and goes over another connection.
            self._fail(ConnectionLostError("the server sent bytes before the request"))
        else:
            try:
                if self._streamed is None:
                    self._read_head(nbytes)
                else:
                    self._feed_streamed_body(self._streamed, 0, nbytes)
            except Exception as error:  # also what the caller's allocator raises
                self._fail(error)

    def eof_received(self) -> None:
        """End a body that lasts until close; any other request fails."""
        self.is_usable = False
        streamed = self._streamed
        if streamed is not None and self._head is not None and not self._head.chunked:
            try:
                self._body = streamed.finish()
                self._finish(streamed.num_bytes)
            except Exception as error:  # what the caller's allocator raises
                self._fail(error)
        elif self._future is not None:
            # Otherwise the transport would go on sending the body to a server that has closed.
            self._fail(
                ConnectionLostError(
                    "the server closed the connection before the response was whole"
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the current request, and notify the pool."""
        self.is_usable = False
        self.is_lost = True
        if self._has_body and exc is not None:
            self._read_remaining_response()
        if self._future is not None:
            error = ConnectionLostError("the connection was closed before the response was whole")
            if exc is not None:
                error = ConnectionLostError(f"the connection was lost: {exc}")
                error.__cause__ = exc
            self._fail(error)
        self._on_lost(self)

    def pause_writing(self) -> None:
        """Stop writing: the transport's buffer is full."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Write more: the transport's buffer has drained."""
        self._write_paused = False
        self._has_progressed = True
        if self._outgoing and not self._unwritten_head:
            self._send_slices()

    # Sending.

    def _send_slices(self, request_head: bytes = b"") -> None:
        """Write slices of the body until the transport's buffer is full."""
        outgoing = self._outgoing
        while outgoing and not self._write_paused:
            pieces: list[bytes | memoryview] = []
            unsent = self._slice_bytes
            if request_head:
                pieces.append(request_head)
                request_head = b""
            while outgoing and unsent:
                view = outgoing.popleft()
                if len(view) > unsent:
                    outgoing.appendleft(view[unsent:])
                    view = view[:unsent]
                unsent -= len(view)
                pieces.append(view)
            if len(pieces) == 1:
                self._transport.write(pieces[0])
            else:
                self._transport.writelines(pieces)

    def _shut_down_socket(self) -> None:
        """Make sure that no more of the caller's memory is sent.

        `abort` closes the socket in the next iteration of the loop, and until then the transport
        may send its buffer; the caller may change that memory as soon as we return. A shutdown
        through a second descriptor works at once.
        """
        shared = self._transport.get_extra_info("socket")
        if shared is not None and shared.fileno() >= 0:
            with socket.socket(fileno=os.dup(shared.fileno())) as own:
                try:
                    own.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # No longer connected.
                    return

    # Receiving.

    def _read_remaining_response(self) -> None:
        """Read a response that was received before a write failed.

        A server that rejects an upload may respond and close; a write then fails, and the transport
        closes with the response unread in the kernel. Under TLS only the transport could read it.
        """
        shared = self._transport.get_extra_info("socket")
        if self._is_tls or shared is None or shared.fileno() < 0:
            return
        with socket.socket(fileno=os.dup(shared.fileno())) as own:
            try:
                while self._future is not None and (
                    num_bytes := own.recv_into(self.get_buffer(-1))
                ):
                    self.buffer_updated(num_bytes)
            except OSError:
                # Nothing more was received, or the reset comes next.
                return
        if self._future is not None:
            self.eof_received()

    def _read_head(self, num_new: int) -> None:
        """Parse the head once its end is in scratch; continue with the body."""
        self.response_started = True
        scratch = self._scratch
        start = self._num_scratch
        self._num_scratch = end = start + num_new
        if self._template is not None and not start:
            match = match_head(self._template, scratch, end)
            if match is not None and match[0].status >= 200:
                self._num_scratch = 0
                self._start_response(*match, end)
                return
        stop = scratch.find(b"\r\n\r\n", max(start - 3, 0), end)
        while stop >= 0:
            stop += 4
            head, template = parse_head(bytes(self._scratch_view[:stop]))
            if head.status >= 200:
                self._num_scratch = 0
                if template is not None and template.pattern is not None:
                    self._template = template
                self._start_response(head, stop, end)
                return
            self._skip_interim_response(head, stop, end)
            end = self._num_scratch
            stop = scratch.find(b"\r\n\r\n", 0, end)
        self._scratch_end = _SCRATCH_BYTES
        self._acknowledge()
        # Another protocol may never send an empty line: fail now, not after a timeout.
        first = bytes(scratch[: min(end, 40)])
        if not b"HTTP/1.".startswith(first[:7]):
            raise ProtocolError(f"not an HTTP/1.1 response: {first!r}")
        if end >= MAX_HEAD_BYTES:
            raise ProtocolError(f"response head is over {MAX_HEAD_BYTES} bytes")

    def _start_response(self, head: ResponseHead, start: int, end: int) -> None:
        """Start a response with its head, and with the part of its body in `scratch[start:end]`."""
        if (
            self._into is not bytes
            or head.content_length != end - start
            or (head.status != 200 and head.status != 206)
            or not (head.keep_alive and self.is_usable)
            or self._is_head_request
            or self._has_body
            or (self._max_body_bytes is not None and end - start > self._max_body_bytes)
        ):
            self._start_body(head, start, end)
            return
        # Complete with one recv, as most small objects are.
        future = self._future
        self._future = None
        self._into = None
        self._num_interim = 0
        if future is not None and not future.done():
            body = bytes(self._scratch_view[start:end])
            future.set_result(Response(head.status, head.headers, body, end - start, self))

    def _skip_interim_response(self, head: ResponseHead, stop: int, end: int) -> None:
        """Drop a 1xx response: the final one follows it."""
        self._num_interim += 1
        if head.status == 101:
            raise ProtocolError("the server switched protocols without a request for it")
        if self._num_interim > _MAX_INTERIM_RESPONSES:
            raise ProtocolError(f"more than {_MAX_INTERIM_RESPONSES} interim responses")
        self._scratch[: end - stop] = self._scratch[stop:end]
        self._num_scratch = end - stop

    def _start_body(self, head: ResponseHead, start: int, end: int) -> None:
        """Start the body that a head declares, of which `scratch[start:end]` was received."""
        self._head = head
        status = head.status
        if self._is_head_request or status in (204, 304):
            num_bytes: int | None = 0
        else:
            num_bytes = head.content_length
        if not head.keep_alive:
            self.is_usable = False
        if self._outgoing:
            # A response before the end of the request, whose rest is not needed.
            self._outgoing.clear()
            self.is_usable = False
        if num_bytes is None:
            self._start_streamed_body(head, start, end)
            return
        into = self._into
        if not 200 <= status < 300:
            into = None
            if num_bytes > MAX_ERROR_BODY_BYTES:
                num_bytes = MAX_ERROR_BODY_BYTES
                self.is_usable = False
        else:
            check_length(num_bytes, into, self._max_body_bytes)
        self._start_sized_body(into, num_bytes, start, end)

    def _start_sized_body(
        self, into: Destination | None, num_bytes: int, start: int, end: int
    ) -> None:
        """Start a body of known length with the part that came with its head."""
        num_here = end - start
        self._scratch_end = _HEAD_BYTES if num_bytes > _LARGE_BYTES else _SCRATCH_BYTES
        if num_here > num_bytes:
            # Bytes after the response, with which the next one would start.
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
                self._bytes_buffer = BytesBuffer(num_bytes)
                destination = self._bytes_buffer.recv_view
        else:
            self._body = destination = memory_for(into, num_bytes)
        destination[:num_here] = here
        self._num_received = num_here
        if num_here == num_bytes:
            self._finish(num_bytes)
        else:
            self._num_expected = num_bytes
            self._destination = destination
            if num_bytes - num_here < _SEGMENT_BYTES:
                self._acknowledge()

    def _start_streamed_body(self, head: ResponseHead, start: int, end: int) -> None:
        """Start a body of unknown length: chunked, or until the connection closes."""
        self._scratch_end = _SCRATCH_BYTES
        if not head.chunked:
            self.is_usable = False
        self._streamed = StreamedBody(
            status=head.status,
            chunked=head.chunked,
            into=self._into,
            max_body_bytes=self._max_body_bytes,
        )
        self._feed_streamed_body(self._streamed, start, end)

    def _feed_streamed_body(self, streamed: StreamedBody, start: int, end: int) -> None:
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
        """Acknowledge the received bytes now, because a part of the response is missing.

        A server that sends a response in pieces and collects small ones (Nagle's algorithm, as Ceph
        does at its defaults) holds back the next piece until then, and the kernel would wait up to
        40 ms: 44 ms for each small read over loopback, instead of 0.2. The option applies to this
        one acknowledgement.
        """
        shared = self._transport.get_extra_info("socket")
        if _QUICKACK is None or shared is None or shared.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # the connection is lost, which the transport reports
            shared.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    # Ending.

    def _finish(self, num_bytes: int) -> None:
        """Set the complete response on the future."""
        future, head = self._future, self._head
        body = self._body if self._bytes_buffer is None else self._bytes_buffer.finish()
        has_body = self._has_body
        if has_body and self.is_usable and self._transport.get_write_buffer_size():
            self.is_usable = False
        if self.is_usable:
            self._reset()
        else:
            # Before the caller runs, which may reuse the memory of the request body.
            self.abort()
        if future is not None and head is not None and not future.done():
            future.set_result(Response(head.status, head.headers, body, num_bytes, self))

    def _fail(self, error: Exception) -> None:
        """Close the connection, and fail the current request."""
        future = self._future
        if isinstance(error, TransportError):
            error.head = self._head
            error.num_bytes_received = self._num_in_destination()
            error.request_sent = True
        if self._outgoing or self._unwritten_head:
            self.fully_sent = False
        self.abort()
        if future is not None and not future.done():
            future.set_exception(error)

    def _num_in_destination(self) -> int:
        """Return the number of leading bytes of the body in the caller's memory."""
        if self._streamed is not None:
            return self._streamed.num_in_destination
        return self._num_received if self._body is self._destination else 0

    def _reset(self) -> None:
        """Drop everything that belongs to the request that has ended."""
        self._future = None
        self._unwritten_head = b""
        self._into = None
        self._head = None
        self._body = b""
        self._bytes_buffer = None
        self._destination = None
        self._streamed = None
        self._num_received = 0
        self._num_scratch = 0
        self._num_interim = 0
        self._num_unsent = 0
        if self._has_body:
            self._has_body = False
            self._outgoing.clear()
