"""Connections: HTTP/1.1 on an asyncio transport.

A connection reads requests (pipelined ones wait in a queue), has the application handle one after
another and sends the responses: small bodies in one `writelines`, large ones in slices as the
kernel accepts them, and those with a `Delivery` step by step. There is no task per request.

    kernel -> shared buffer -> httptools -> Request     heads, small bodies
    kernel -> the memory that becomes the object        the rest of a large body

The second path copies an upload once: httptools would add two copies (2.3 against 0.9 GB/s).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httptools

from aioflux.testing.gcs_server import _fork
from aioflux.testing.gcs_server._delivery import SLICE_BYTES, Cut, Send, Step, steps
from aioflux.testing.gcs_server._errors import status_error
from aioflux.testing.gcs_server._messages import (
    Buffer,
    Request,
    Response,
    error_response,
    slice_pieces,
)
from aioflux.testing.gcs_server._routes import is_json_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aioflux.testing.gcs_server._app import App

_MAX_QUEUED = 32
_DIRECT_BYTES = 64 << 10  # most of a smaller body is in the first read
_ALLOCATED_BYTES = 64 << 20  # memory for a body is allocated in such pieces, as bytes arrive
_MAX_TIMER_SECONDS = 1e6  # for `inf`
PERIODS = 4  # a request without progress is rejected after 3 to 4 of them
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
_FLUSH_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on a single request, so that no client exhausts the server's memory by accident."""

    max_head_bytes: int = 64 << 10
    """Request line and headers; a longer head is rejected with 431."""
    max_body_bytes: int = (5 << 30) + (1 << 20)
    """Body; a longer one is rejected with 413 before it is read. By default a part of 5 GiB, the
    largest of GCS, with the overhead of a multipart/related upload."""
    stalled_seconds: float = 60.0
    """An incomplete request is rejected with 408 if nothing of it has arrived for three quarters of
    this time to the whole of it."""
    linger_seconds: float = 1.0
    """A client whose request is rejected has this long to read the response, in which the rest of
    the request is read and dropped."""

    def __post_init__(self) -> None:
        """Check that requests can pass."""
        for name in ("max_head_bytes", "max_body_bytes", "stalled_seconds", "linger_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, is {getattr(self, name)}")


class Connection(asyncio.BufferedProtocol):
    """One client connection; its loop runs the timers of delayed responses."""

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop, *, scheme: str = "http") -> None:
        self._app = app
        self._loop = loop
        self._scheme = scheme
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        # A request, its `Connection` line and whether to close; or the status of an error (0: no
        # response) and as much of the target as has arrived.
        self._queue: deque[tuple[Request | int, bytes, bool]] = deque()
        self._current: tuple[Request, Response] | None = None
        self._steps: Iterator[Step] | None = None
        self._head: bytes = b""
        self._pieces: Sequence[Buffer] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._writing_paused = self._reading_paused = False
        self._ending = False  # no further request is handled
        self._close_after = self._is_finished = False
        self._size = 0
        self._rest: memoryview | None = None  # memory for the rest of a large body
        self._error_status = 0
        self._read_bytes = 0
        self._periods = 0
        self._whole: bytearray | memoryview | None = None
        self._body_bytes = self._head_bytes = 0
        self._start_message()

    # --- transport -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve a client."""
        self._transport = cast("asyncio.Transport", transport)
        self._descriptor = self.socket.fileno()
        _fork.track(self._descriptor)
        self._app.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything of the client."""
        _fork.untrack(self._descriptor)
        self._app.closed(self)
        self._ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        self._parser = self._steps = self._rest = None
        self._pieces = ()
        self._start_message()
        self._report_finished()
        self._current = None

    def eof_received(self) -> bool:
        """Finish the responses to a client that has closed its sending side.

        Over TLS the transport closes the connection, whatever this returns.
        """
        if self._scheme == "https" or (self._current is None and not self._queue):
            return False
        self._queue.append((0, b"", True))
        return True

    def pause_writing(self) -> None:
        """Stop sending: the kernel's buffer is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Continue to send."""
        self._writing_paused = False
        if self._steps is not None and self._timer is None:
            self._pump()
        self._advance()

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options."""
        return cast("socket.socket", self._transport.get_extra_info("socket"))

    def abort(self) -> None:
        """End the connection at once."""
        self._ending = True
        self._transport.abort()

    # --- requests ------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory of a large body, or the shared buffer."""
        return self._app.scratch if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the received bytes, and handle complete requests."""
        self._periods = 0
        if self._rest is not None:
            self._rest = self._rest[nbytes:]
            if len(self._rest):
                return
            self._rest = None
            if self._length > self._body_bytes:
                self._allocate()
                return
            self._parser = httptools.HttpRequestParser(self)
            self._queue_request()
        elif self._parser is None or self._ending:
            return
        else:
            self._parse(self._parser, self._app.scratch[:nbytes])
        self._advance()
        if len(self._queue) > _MAX_QUEUED and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def check_progress(self) -> None:
        """Count a period; reject an incomplete request if nothing of it has arrived for some."""
        self._periods += 1
        if self._periods >= PERIODS and self._in_message and not self._ending:
            self._rest = None
            self._reject(408)
            self._advance()

    def _parse(self, parser: httptools.HttpRequestParser, data: memoryview) -> None:
        limits = self._app.limits
        self._read_bytes = len(data)
        before = self._body_bytes
        try:
            self._feed(parser, data)
        except httptools.HttpParserError:
            self._error_status = self._error_status or 400
        if self._in_message:
            if not self._in_body:
                self._head_bytes += len(data)
                if self._head_bytes > limits.max_head_bytes:
                    self._error_status = self._error_status or 431
            elif self._whole is None:
                # sizes, extensions and trailers of a chunked body are bounded, too
                self._head_bytes = 0 if self._body_bytes != before else self._head_bytes + len(data)
                if self._head_bytes > limits.max_head_bytes:
                    self._error_status = self._error_status or 431
            elif not self._error_status:
                self._rest = memoryview(self._whole)[self._body_bytes :]
                self._body_bytes = len(self._whole)
        if self._error_status:
            self._reject(self._error_status)

    def _feed(self, parser: httptools.HttpRequestParser, data: memoryview | bytes) -> None:
        """Parse, and ignore an `Upgrade` header (RFC 9110, 7.8).

        The parser stops behind a head that has one, as if the body were of that protocol.
        """
        while True:
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                if parser.get_method() == b"CONNECT":
                    self._error_status = 405
                    return
                data = self._head_without_upgrade(parser) + bytes(data[exc.args[0] :])
                self._start_message()
            else:
                return

    def _head_without_upgrade(self, parser: httptools.HttpRequestParser) -> bytes:
        version = parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._target, version)]
        lines += [b"%b: %b" % pair for pair in self._headers if pair[0].lower() != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def _reject(self, status: int) -> None:
        """Queue an error as the last response, and read no more."""
        self._parser = None
        self._in_message = False
        self._queue.append((status, self._target, True))

    def on_message_begin(self) -> None:
        """Note the start of a request."""
        self._in_message = True

    def on_url(self, url: bytes) -> None:
        """Collect the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._headers.append((name, value))
        if len(name) == 14 and name.lower() == b"content-length":
            self._length = int(value)
        elif len(name) == 6 and name.lower() == b"expect":
            self._expects = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        """Check the size, and send `100 Continue` to a client that waits for it."""
        assert self._parser is not None
        if self._parser.should_upgrade():
            return  # parsed again without the header
        self._in_body = True
        limits = self._app.limits
        if self._read_bytes > limits.max_head_bytes:
            size = len(self._target) + sum(len(name) + len(value) for name, value in self._headers)
            if size > limits.max_head_bytes:
                self._error_status = 431
        if self._length:
            if self._length > limits.max_body_bytes:
                self._error_status = self._error_status or 413
            elif self._length >= _DIRECT_BYTES and not self._error_status:
                first = self._whole = self._app.buffers.allocate(
                    min(self._length, _ALLOCATED_BYTES)
                )
                self._body.append(first)
                self._read_version()
        may_continue = self._expects and self._parser.get_http_version() != "1.0"
        if may_continue and not self._error_status and self._current is None and not self._queue:
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        if self._error_status:
            return
        start = self._body_bytes
        self._body_bytes += len(body)
        if self._whole is not None:
            self._whole[start : self._body_bytes] = body
        elif self._body_bytes <= self._app.limits.max_body_bytes:
            self._body.append(body)
        else:
            self._error_status = 413

    def on_message_complete(self) -> None:
        """Queue the request, unless it has been rejected."""
        assert self._parser is not None
        if not self._error_status and not self._parser.should_upgrade():
            if self._whole is None:
                self._read_version()
            self._queue_request()

    def _allocate(self) -> None:
        """Allocate memory for more of a large body."""
        more = self._app.buffers.allocate(min(self._length - self._body_bytes, _ALLOCATED_BYTES))
        self._body.append(more)
        self._body_bytes += len(more)
        self._rest = memoryview(more)

    def _read_version(self) -> None:
        """Keep the method and keep-alive of the request, which the parser forgets."""
        parser = self._parser
        assert parser is not None
        keep = parser.should_keep_alive()
        line = b"" if keep else b"Connection: close\r\n"
        if keep and parser.get_http_version() == "1.0":
            line = b"Connection: keep-alive\r\n"
        self._version = (parser.get_method().decode("ascii"), line, not keep)

    def _queue_request(self) -> None:
        method, line, close = self._version
        request = Request(method, self._target, self._headers, self._body, scheme=self._scheme)
        self._queue.append((request, line, close))
        self._start_message()

    def _start_message(self) -> None:
        self._in_message = self._in_body = self._expects = False
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[Buffer] = []
        self._whole = None
        self._length = self._body_bytes = self._head_bytes = 0

    # --- responses -----------------------------------------------------------------------

    def _advance(self) -> None:
        """Handle queued requests until a response has to wait."""
        while self._queue and self._current is None and not self._writing_paused:
            if self._ending:
                return
            request, line, close = self._queue.popleft()
            if isinstance(request, int):
                self._close_with(request, target=line)
                return
            self._respond(request, line, close=close)
        if self._reading_paused and not self._queue and not self._ending:
            self._reading_paused = False
            self._transport.resume_reading()

    def _close_with(self, status: int, *, target: bytes) -> None:
        """Close, after a response with `status` unless it is 0.

        Bytes that the client still sends are read and dropped for a while: if the socket were
        closed at once, the kernel would reset the connection, and the client might lose the
        response.
        """
        self._ending = True
        if not status:
            self._transport.close()
            return
        response = error_response(status_error(status), xml=not is_json_target(target))
        head = response.head(connection=b"Connection: close\r\n")
        self._transport.writelines([head, *response.pieces()])
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._later(self._app.limits.linger_seconds, self._transport.close)
        else:
            self._transport.close()

    def _respond(self, request: Request, line: bytes, *, close: bool) -> None:
        response = self._app.handle(request)
        head = response.head(connection=line)
        pieces = () if request.method == "HEAD" else response.pieces()
        size = response.size if pieces else 0
        if response.delivery is None and size <= SLICE_BYTES:
            response.sent_bytes = size
            self._app.finished(request, response)
            self._transport.writelines([head, *pieces] if size else [head])
            if close:
                self._close()
            return
        self._current, self._close_after, self._is_finished = (request, response), close, False
        self._head, self._pieces, self._size = head, pieces, size
        self._steps = steps(size, response.delivery)
        self._pump()

    def _pump(self) -> None:
        """Run steps until one waits, the kernel is full or the response is sent."""
        self._timer = None
        while self._steps is not None and not self._writing_paused:
            step = next(self._steps, None)
            match step:
                case None:
                    self._finish()
                case Send():
                    assert self._current is not None
                    self._current[1].sent_bytes += step.end - step.start
                    if step.end == self._size:
                        self._report_finished()
                    selected = slice_pieces(self._pieces, step.start, step.end)
                    self._transport.writelines([self._head, *selected] if self._head else selected)
                    self._head = b""
                case Cut():
                    self._steps = None
                    self._report_finished()
                    self._cut(reset=step.reset)
                case _:
                    self._later(step.seconds, self._wake)
                    return

    def _wake(self) -> None:
        self._pump()
        self._advance()

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(min(seconds, _MAX_TIMER_SECONDS), callback)

    def _finish(self) -> None:
        """Finish the response, so that the next one can be sent."""
        self._report_finished()
        self._current = self._steps = None
        self._pieces = ()
        if self._close_after:
            self._close()

    def _report_finished(self) -> None:
        """Report the current response as finished, once: before its last byte or its end."""
        if self._current is not None and not self._is_finished:
            self._is_finished = True
            self._app.finished(*self._current)

    def _close(self) -> None:
        self._ending = True
        self._transport.close()

    def _cut(self, *, reset: bool) -> None:
        """End the connection once the written bytes are sent."""
        self._ending = True
        if not reset:
            self._transport.close()
        elif self._transport.get_write_buffer_size():
            self._later(_FLUSH_SECONDS, lambda: self._cut(reset=True))
        else:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
