"""An HTTP/1.1 connection that receives bodies directly into their destination.

    kernel --recv--> scratch --head--> parse --+-- small body: copied from scratch
                                               +-- large body: next recv into the destination
    caller's memory --slices--> os.writev, then transport.write --> kernel

No request has its own timer. The callbacks set a flag whenever bytes were sent or received, and one
timer of the pool checks the flags of all connections (`Connection.check_timeouts`).

Over 500 lines because the connection is one state machine, whose callbacks share the state of the
current request.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, cast

from aioflux._http.body import (
    MAX_METADATA_BYTES,
    Buffer,
    Destination,
    HashedMemory,
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
    import ssl

    from aioflux.options import Timeouts

# Size of the scratch buffer. A recv into this buffer receives a head and the beginning of the body,
# which is then copied into the destination.
_SCRATCH_BYTES: Final = MAX_HEAD_BYTES
# Number of bytes of the scratch buffer that are used after a body of more than `_LARGE_BYTES`. The
# next body is probably large, too, and less of it is copied with a smaller buffer.
_HEAD_BYTES: Final = 4096
_LARGE_BYTES: Final = 32 * 1024
# Maximum size of a slice of a request body, which is written to the transport at once. 32 MiB PUTs
# to nginx on loopback: 0.91 GB/s in slices of 256 KiB, 0.97 of 1 MiB, 0.87 of 4 MiB, which is
# within the noise.
_SLICE_BYTES: Final = 1024 * 1024
# The TLS transport encrypts a copy of the whole slice, and does not show how much of it was sent.
# The slice size therefore bounds the memory of the copy. It also decides which link is reported as
# stalled: one that needs longer than `progress_seconds` for 256 KiB.
_TLS_SLICE_BYTES: Final = 256 * 1024
_MAX_INTERIM_RESPONSES: Final = 16
_CONNECTING: Final = "connecting"
_SENDING: Final = "sending the request body"
_WAITING: Final = "waiting for the response to start"
_RECEIVING: Final = "receiving the response"
_INT: Final = struct.Struct("i")
_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)  # only on Linux
# A server with Nagle's algorithm delays a piece that is smaller than a segment: 1,460 bytes on most
# networks, 8,948 with jumbo frames.
_SEGMENT_BYTES: Final = 16 * 1024


class ResponseFuture(Protocol):
    """Receiver of one response: an asyncio future, or an object with these methods of a future.

    The methods are called inside the callback of the transport that received the last bytes.
    """

    def done(self) -> bool:
        """Return whether the request was cancelled, or already has a result or an error."""

    def set_result(self, result: Response, /) -> None:
        """Deliver a complete response. The connection can send another request by then."""

    def set_exception(self, exception: Exception, /) -> None:
        """Deliver the error of a request without a complete response."""


@dataclass(slots=True)
class Response:
    """A complete response, of any status."""

    status: int
    """HTTP status. A caller raises an error for a status that it does not expect."""
    headers: Headers
    """Header fields, names in lower case."""
    body: Buffer
    """The body; a view of `into` if `into` was memory and the status is 2xx."""
    num_bytes: int
    """Length of the body, in bytes."""
    connection: Connection | None = field(default=None, compare=False, repr=False)
    """The connection that received the response; None in tests."""

    def discard_connection(self) -> None:
        """Close the connection, after a response that cannot be from the service."""
        if self.connection is not None:
            self.connection.retire()


class Connection(asyncio.BufferedProtocol):
    """A connection that carries one request at a time.

    Attributes:
        on_release: Called with the connection by `release`; set by the pool.
        is_usable: Another request may be sent.
        is_lost: The transport is closed, and `on_lost` was called or is being called.
        num_requests: Number of requests so far, including the current one.
        response_started: At least one byte of the response to the current request was received.
        fully_sent: The whole current request may have been sent. If False, the server cannot have
            carried it out.
        slow_request: Number of the last request that took half of `Timeouts.slow_seconds`.
    """

    __slots__ = (
        "_body",
        "_bytes_buffer",
        "_checked_at",
        "_destination",
        "_future",
        "_has_body",
        "_has_progressed",
        "_hashed",
        "_head",
        "_head_seconds",
        "_into",
        "_is_head_request",
        "_is_tls",
        "_max_body_bytes",
        "_num_expected",
        "_num_interim",
        "_num_received",
        "_num_scratch",
        "_num_unsent",
        "_on_lost",
        "_outgoing",
        "_phases",
        "_poll",
        "_progress_at",
        "_scratch",
        "_scratch_end",
        "_scratch_view",
        "_slice_bytes",
        "_streamed",
        "_template",
        "_timed_request",
        "_transport",
        "_unwritten_head",
        "_write_paused",
        "fully_sent",
        "is_lost",
        "is_usable",
        "num_requests",
        "on_release",
        "response_started",
        "slow_request",
    )

    def __init__(self, *, on_lost: Callable[[Connection], None], is_tls: bool) -> None:
        self.on_release: Callable[[Connection], None] | None = None
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
        # State of the current request.
        self._future: ResponseFuture | None = None
        self._is_head_request = False
        self._into: Destination | None = None
        self._hashed: HashedMemory | None = None
        self._max_body_bytes: int | None = None
        self._head_seconds = 0.0
        self._unwritten_head = b""
        self._outgoing: deque[memoryview] = deque()
        self._has_body = False
        self._write_paused = False
        # State of its response.
        self._head: ResponseHead | None = None
        self._template: HeadTemplate | None = None
        self._num_interim = 0
        self._body: Buffer = b""
        self._bytes_buffer: BytesBuffer | None = None
        self._destination: memoryview | None = None
        self._num_received = 0
        self._num_expected = 0
        self._streamed: StreamedBody | None = None
        # State of `check_timeouts`.
        self._has_progressed = True
        self._progress_at = 0.0
        self._num_unsent = 0
        self._checked_at = 0.0
        self._timed_request = 0
        self._phases: dict[str, float] = {}
        self.slow_request = 0

    # Methods that the pool calls.

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
        """Start a request, as in `Pool.request`. `flush` writes it, and `abort` cancels it.

        The response or the error is set on `future`. The transport does not read the memory of the
        request body after that. `is_head` is True for the method HEAD.
        """
        self._future = future
        self._is_head_request = is_head
        if type(into) is HashedMemory:
            self._hashed, into = into, into.memory
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
        """Write the request of the last `send`, unless it was aborted since."""
        request_head, self._unwritten_head = self._unwritten_head, b""
        try:
            if self._has_body:
                self._send_slices(request_head)
            elif request_head:
                self._transport.write(request_head)
        except Exception as error:  # the pool must flush its other connections too
            self._fail(error)

    @property
    def is_stale(self) -> bool:
        """Return whether the server probably closed the connection before the current request.

        Servers close idle connections. True if this is not the first request of the connection, and
        no byte of its response was received.
        """
        return self.num_requests > 1 and not self.response_started

    def is_readable(self) -> bool:
        """Return whether the socket is readable.

        The server has probably closed an idle connection whose socket is readable.
        The event loop would report the close only in its next iteration. The check costs one system
        call, and is made for requests that must not be sent twice.
        """
        if self._poll is None:
            sock = self._transport.get_extra_info("socket")
            if sock is None or sock.fileno() < 0:
                return True
            self._poll = select.poll()
            self._poll.register(sock.fileno(), select.POLLIN)
        return bool(self._poll.poll(0))

    def abort(self) -> None:
        """Close at once and drop the current request, whose memory is not accessed afterwards."""
        self.is_usable = False
        transport = self._transport
        if self._has_body and not transport.is_closing() and transport.get_write_buffer_size():
            self._shut_down_socket()
        transport.abort()
        self._reset()

    @property
    def tls(self) -> ssl.SSLObject | None:
        """TLS of the connection to the server; None without TLS."""
        found: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        return found

    def release(self) -> None:
        """Return the connection to the pool, after a request of `Pool.start_get`."""
        assert self.on_release is not None
        self.on_release(self)

    def retire(self) -> None:
        """Accept no further request: close now, or when the current request is complete."""
        self.is_usable = False
        if self._future is None:
            self.abort()

    def check_timeouts(self, now: float, timeouts: Timeouts, *, late_seconds: float = 0.0) -> None:
        """Fail a request that made no progress, and close a connection that is idle for too long.

        Args:
            now: Time of the event loop, in seconds.
            timeouts: The timeouts.
            late_seconds: Time for which the event loop was blocked, in seconds. It does not count
                as time without progress.
        """
        if self._future is not None and timeouts.slow_seconds is not None:
            self._time_phase(now, timeouts.slow_seconds)
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
        doing, limit = _SENDING, timeouts.progress_seconds
        if self.response_started:
            doing = _RECEIVING
        else:
            num_unsent = self._count_unsent() if self._has_body else 0
            if num_unsent != self._num_unsent:
                self._num_unsent = num_unsent
                self._progress_at = now
                return
            if not num_unsent and not self._outgoing:
                doing, limit = _WAITING, self._head_seconds
        if silent_seconds >= limit:
            self._fail(StalledError(f"no progress for {limit:g} s while {doing}"))

    def on_connected(self, now: float, connect_seconds: float, slow_seconds: float | None) -> None:
        """Count the time of the connect as the first phase of the first request."""
        self._timed_request, self._checked_at = 1, now
        self._phases[_CONNECTING] = connect_seconds
        self.slow_request = int(slow_seconds is not None and connect_seconds >= slow_seconds / 2)

    def _time_phase(self, now: float, slow_seconds: float) -> None:
        """Add the time since the last check to the phase of the current request.

        The checks know the phases well enough, and cost a request nothing that ends between them.
        """
        if self._timed_request != self.num_requests:
            self._timed_request, self._phases = self.num_requests, {}
        else:
            is_sent = not (self._outgoing or (self._has_body and self._count_unsent()))
            phase = _RECEIVING if self.response_started else _WAITING if is_sent else _SENDING
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._checked_at
            if sum(self._phases.values()) >= slow_seconds / 2:
                self.slow_request = self.num_requests
        self._checked_at = now

    @property
    def longest_phase(self) -> str:
        """The longest phase of the request with the number `slow_request`, in words."""
        return max(self._phases, key=lambda phase: self._phases[phase])

    def _count_unsent(self) -> int:
        """Return the number of bytes in the buffers of the transport and, on Linux, of the kernel.

        The kernel buffers some MiB of a body at once, even if the server reads nothing.
        """
        num_unsent = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if sys.platform == "linux" and sock is not None and sock.fileno() >= 0:
            # Same request as SIOCOUTQ: bytes that the peer has not acknowledged (tcp(7)).
            (num_in_kernel,) = _INT.unpack(
                fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
            )
            num_unsent += num_in_kernel
        return num_unsent

    def close(self) -> None:
        """Fail the current request and close, because the pool is closed."""
        if self._future is not None:
            self._fail(ConnectionLostError("the pool was closed during the request"))
        else:
            self.abort()

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and accept requests."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_usable = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next recv: the rest of the destination, or of `scratch`."""
        if self._destination is not None:
            return self._destination[self._num_received :]
        return self._scratch_view[self._num_scratch : self._scratch_end]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were received into the memory of the last `get_buffer`."""
        self._has_progressed = True
        if self._destination is not None:
            self._num_received += nbytes
            if self._hashed is not None:
                self._hashed.update(min(self._num_received, self._num_expected))
            if self._num_received >= self._num_expected:
                if self._num_received > self._num_expected and self._bytes_buffer is not None:
                    # Bytes after the response would be read as the beginning of the next response.
                    self._bytes_buffer.restore_end()
                    self.is_usable = False
                self._finish(self._num_expected)
            elif self._num_expected - self._num_received < _SEGMENT_BYTES:
                self._acknowledge()
        elif self._future is None:
            # Bytes without a request would be read as the beginning of the next response.
            self.abort()
        elif self._unwritten_head:
            # The request is started but not written: the pool sends it over another connection.
            self._fail(ConnectionLostError("the server sent bytes before the request"))
        else:
            try:
                if self._streamed is None:
                    self._read_head(nbytes)
                else:
                    self._feed_streamed_body(self._streamed, 0, nbytes)
            except Exception as error:  # also errors of the caller's function `into`
                self._fail(error)

    def eof_received(self) -> None:
        """Complete a body that ends with the connection, or fail the request."""
        self.is_usable = False
        streamed = self._streamed
        if streamed is not None and self._head is not None and not self._head.chunked:
            try:
                self._body = streamed.finish()
                self._finish(streamed.num_bytes)
            except Exception as error:  # errors of the caller's function `into`
                self._fail(error)
        elif self._future is not None:
            # The transport would otherwise continue to send the body on a closed connection.
            problem = "the server closed the connection before the response was complete"
            self._fail(ConnectionLostError(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the current request, and report the closed connection to the pool."""
        self.is_usable = False
        self.is_lost = True
        if self._has_body and exc is not None:
            self._read_remaining_response()
        if self._future is not None:
            error = ConnectionLostError(
                "the connection was closed before the response was complete"
            )
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
            if not self._is_tls and unsent < self._slice_bytes // 2:
                pieces = self._write_without_gil(pieces)
            if len(pieces) == 1:
                self._transport.write(pieces[0])
            elif pieces:
                self._transport.writelines(pieces)

    def _write_without_gil(self, pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Write to the socket if the transport's buffer is empty, and return the rest of `pieces`.

        uvloop holds the GIL while it writes, and so stops other threads, such as training: during
        continuous saves it made 0.31x the steps per second, and with `os.writev` 0.46x.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
            return pieces
        try:
            num_sent = os.writev(sock.fileno(), pieces)
        except OSError:
            # The kernel's buffer is full, or the transport's write meets and reports the error.
            return pieces
        while pieces and num_sent >= len(pieces[0]):
            num_sent -= len(pieces.pop(0))
        if pieces:
            pieces[0] = memoryview(pieces[0])[num_sent:]
        return pieces

    def _shut_down_socket(self) -> None:
        """Shut down the socket at once, so that no more memory of the caller is sent.

        `abort` of the transport closes the socket only in the next iteration of the event loop, and
        the transport may send its buffer until then. The caller may change the memory of the
        request body before that. The shutdown uses a second file descriptor of the socket.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with socket.socket(fileno=os.dup(sock.fileno())) as duplicate:
                try:
                    duplicate.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # No longer connected.
                    return

    # Receiving.

    def _read_remaining_response(self) -> None:
        """Read the response that the kernel received before a write failed.

        A server that rejects an upload may respond and close. The next write fails, and the
        transport closes without reading the response from the kernel. With TLS it cannot be read
        here, because only the transport can decrypt it.
        """
        sock = self._transport.get_extra_info("socket")
        if self._is_tls or sock is None or sock.fileno() < 0:
            return
        with socket.socket(fileno=os.dup(sock.fileno())) as duplicate:
            try:
                while self._future is not None and (
                    num_bytes := duplicate.recv_into(self.get_buffer(-1))
                ):
                    self.buffer_updated(num_bytes)
            except OSError:
                # No more bytes, or a reset.
                return
        if self._future is not None:
            self.eof_received()

    def _read_head(self, num_new: int) -> None:
        """Parse the head when the scratch buffer contains all of it, and start the body."""
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
                if template.pattern is not None:
                    self._template = template
                self._start_response(head, stop, end)
                return
            self._skip_interim_response(head, stop, end)
            end = self._num_scratch
            stop = scratch.find(b"\r\n\r\n", 0, end)
        self._scratch_end = _SCRATCH_BYTES
        self._acknowledge()
        # Another protocol may never send an empty line: fail now and not after a timeout.
        first = bytes(scratch[: min(end, 40)])
        if not b"HTTP/1.".startswith(first[:7]):
            raise ProtocolError(f"not an HTTP/1.1 response: {first!r}")
        if end >= MAX_HEAD_BYTES:
            raise ProtocolError(f"response head is over {MAX_HEAD_BYTES} bytes")

    def _start_response(self, head: ResponseHead, start: int, end: int) -> None:
        """Start a response, or deliver it if all of it was received.

        `scratch[start:end]` is the part of its body that was received with the head.
        """
        if (
            (self._into is not bytes and self._into is not None)
            or head.content_length != end - start
            or (head.status != 200 and head.status != 206)
            or not (head.keep_alive and self.is_usable)
            or self._is_head_request
            or self._has_body
            or (self._max_body_bytes is not None and end - start > self._max_body_bytes)
        ):
            self._start_body(head, start, end)
            return
        # The whole response was received by one recv, as for most small objects and for metadata.
        future = self._future
        self._future = None
        self._into = None
        self._num_interim = 0
        if future is not None and not future.done():
            body = bytes(self._scratch_view[start:end])
            future.set_result(Response(head.status, head.headers, body, end - start, self))

    def _skip_interim_response(self, head: ResponseHead, stop: int, end: int) -> None:
        """Drop a 1xx response, after which the final response follows."""
        self._num_interim += 1
        if head.status == 101:
            raise ProtocolError("the server switched protocols without a request for it")
        if self._num_interim > _MAX_INTERIM_RESPONSES:
            raise ProtocolError(f"more than {_MAX_INTERIM_RESPONSES} interim responses")
        self._scratch[: end - stop] = self._scratch[stop:end]
        self._num_scratch = end - stop

    def _start_body(self, head: ResponseHead, start: int, end: int) -> None:
        """Start the body that a head announces; `scratch[start:end]` is already received."""
        self._head = head
        status = head.status
        if self._is_head_request or status in (204, 304):
            num_bytes: int | None = 0
        else:
            num_bytes = head.content_length
        if not head.keep_alive:
            self.is_usable = False
        if self._outgoing:
            # The server responded before it received the whole request: send no more of it.
            self._outgoing.clear()
            self.is_usable = False
        if num_bytes is None:
            self._start_streamed_body(head, start, end)
            return
        into = self._into
        if not 200 <= status < 300:
            into = None
            if num_bytes > MAX_METADATA_BYTES:
                num_bytes = MAX_METADATA_BYTES
                self.is_usable = False
        else:
            check_length(num_bytes, into, self._max_body_bytes)
        self._start_sized_body(into, num_bytes, start, end)

    def _start_sized_body(
        self, into: Destination | None, num_bytes: int, start: int, end: int
    ) -> None:
        """Start a body of known length; `scratch[start:end]` is already received."""
        num_received = end - start
        self._scratch_end = _HEAD_BYTES if num_bytes > _LARGE_BYTES else _SCRATCH_BYTES
        if num_received > num_bytes:
            # Bytes after the response would be read as the beginning of the next response.
            self.is_usable = False
            num_received = num_bytes
        received = self._scratch_view[start : start + num_received]
        if into is None or into is bytes:
            if num_received == num_bytes:
                self._body = bytes(received)
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
            if self._hashed is not None:
                self._hashed.start(destination)
        destination[:num_received] = received
        self._num_received = num_received
        if num_received == num_bytes:
            self._finish(num_bytes)
        else:
            self._num_expected = num_bytes
            self._destination = destination
            if num_bytes - num_received < _SEGMENT_BYTES:
                self._acknowledge()

    def _start_streamed_body(self, head: ResponseHead, start: int, end: int) -> None:
        """Start a body of unknown length: chunked, or up to the close of the connection."""
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
        """Add `scratch[start:end]` to a body of unknown length."""
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
        """Acknowledge the received bytes at once, because a part of the response is missing.

        A server that uses Nagle's algorithm (as Ceph does by default) and sends a response in
        pieces waits for this acknowledgement before it sends the next small piece. The kernel
        delays acknowledgements by up to 40 ms: a small read over loopback took 44 ms instead of
        0.2 ms. The socket option applies to one acknowledgement.
        """
        sock = self._transport.get_extra_info("socket")
        if _QUICKACK is None or sock is None or sock.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # a lost connection, which the transport reports too
            sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    # Completion.

    def _finish(self, num_bytes: int) -> None:
        """Deliver a response to the future, unless `_start_response` has delivered all of it."""
        future, head = self._future, self._head
        body = self._body if self._bytes_buffer is None else self._bytes_buffer.finish()
        has_body = self._has_body
        if has_body and self.is_usable and self._transport.get_write_buffer_size():
            self.is_usable = False
        if self.is_usable:
            self._reset()
        else:
            # Before the caller continues: it may reuse the memory of the request body.
            self.abort()
        if future is not None and head is not None and not future.done():
            future.set_result(Response(head.status, head.headers, body, num_bytes, self))

    def _fail(self, error: Exception) -> None:
        """Close the connection, and deliver `error` to the future of the current request."""
        future = self._future
        if isinstance(error, TransportError):
            error.head = self._head
            if self._streamed is not None:
                error.num_bytes_received = self._streamed.num_in_destination
            elif self._body is self._destination:
                error.num_bytes_received = self._num_received
            error.request_sent = True
        if self._outgoing or self._unwritten_head:
            self.fully_sent = False
        self.abort()
        if future is not None and not future.done():
            future.set_exception(error)

    def _reset(self) -> None:
        """Drop the state of the current request and its response."""
        self._future = None
        self._unwritten_head = b""
        self._into = None
        self._hashed = None
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
