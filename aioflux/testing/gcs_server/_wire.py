"""HTTP/1.1 on an asyncio transport: requests in, responses out, one after another.

A connection reads requests (pipelined ones wait in a queue), asks the application for each
response in turn and sends it: small bodies in one `writelines`, large ones in slices while
the kernel takes them, and those with a `Delivery` step by step. There is no task per request.

    kernel -> shared buffer -> httptools -> Request     heads, small bodies
    kernel -> the memory that becomes the object        the rest of a large body

The second way keeps an upload to one copy: httptools would add two (2.3 against 0.9 GB/s).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from aioflux.testing.gcs_server import _forks
from aioflux.testing.gcs_server._delivery import SLICE_BYTES, Cut, Send, Step, cut_out, steps
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._memory import allocate
from aioflux.testing.gcs_server._messages import Buffer, Request, Response, error_response
from aioflux.testing.gcs_server._routes import is_json_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aioflux.testing.gcs_server._limits import Limits

_MAX_QUEUED = 32
_DIRECT_BYTES = 64 << 10  # below it a body is mostly in the first read anyway
_RESERVED_BYTES = 64 << 20  # memory for a body is taken in pieces of it, as bytes come
_LINGER_SECONDS = 1.0
_LONGEST_SECONDS = 1e6  # what `inf` means to a timer
PERIODS = 4  # a request without progress is refused after 3 to 4 of them
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
_FLUSH_SECONDS = 0.005
_REASONS = {  # words of the JSON and of the XML API for what is refused before it is routed
    400: ("badRequest", "InvalidArgument"),
    405: ("methodNotAllowed", "MethodNotAllowed"),
    408: ("requestTimeout", "RequestTimeout"),
    411: ("required", "MissingContentLength"),
    413: ("uploadTooLarge", "EntityTooLarge"),
    431: ("headersTooLarge", "MetadataTooLarge"),
}


class Application(Protocol):
    """What a connection needs of the server."""

    limits: Limits
    scratch: memoryview
    """Where all connections of the loop receive heads."""

    def opened(self, connection: Connection) -> None:
        """Learn of a new connection."""

    def closed(self, connection: Connection) -> None:
        """Learn that a connection has ended."""

    def handle(self, request: Request) -> Response:
        """Answer a request; never raises."""

    def finished(self, request: Request, response: Response) -> None:
        """Learn that the last of a response is about to leave, or its connection has ended."""


class Connection(asyncio.BufferedProtocol):
    """One client connection.

    Args:
        app: Answers the requests.
        loop: Runs the timers of delayed responses.
        scheme: `http` or `https`, for links in answers.
    """

    def __init__(
        self, app: Application, loop: asyncio.AbstractEventLoop, *, scheme: str = "http"
    ) -> None:
        self._app = app
        self._loop = loop
        self._scheme = scheme
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        # A request, its `Connection` line and whether to close; or a status to refuse with, 0
        # for none, and the target, as far as it came.
        self._queue: deque[tuple[Request | int, bytes, bool]] = deque()
        self._current: tuple[Request, Response] | None = None
        self._steps: Iterator[Step] | None = None
        self._head: bytes = b""
        self._pieces: Sequence[Buffer] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._writing_paused = self._reading_paused = False
        self._ending = False  # no further request is answered
        self._close_after = self._booked = False
        self._size = 0
        self._rest: memoryview | None = None  # where the rest of a large body goes
        self._refusal = 0
        self._read_bytes = 0
        self._periods = 0
        self._whole: bytearray | memoryview | None = None
        self._body_bytes = self._head_bytes = 0
        self._start_message()

    # --- transport -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a client."""
        self._transport = cast("asyncio.Transport", transport)
        self._descriptor = self.socket.fileno()
        _forks.hold(self._descriptor)
        self._app.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        _forks.release(self._descriptor)
        self._app.closed(self)
        self._ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        self._parser = self._steps = self._rest = None
        self._pieces = ()
        self._start_message()
        self._book()
        self._current = None

    def eof_received(self) -> bool:
        """Let a client that closed its sending side still have its answers.

        Over TLS there is no half-closed connection: the transport closes whatever this returns.
        """
        if self._scheme == "https" or (self._current is None and not self._queue):
            return False
        self._queue.append((0, b"", True))
        return True

    def pause_writing(self) -> None:
        """Stop: the kernel's buffer is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Go on."""
        self._writing_paused = False
        if self._steps is not None and self._timer is None:
            self._pump()
        self._advance()

    @property
    def socket(self) -> socket.socket:
        """The socket, for its options."""
        return cast("socket.socket", self._transport.get_extra_info("socket"))

    def abort(self) -> None:
        """Drop the client at once."""
        self._ending = True
        self._transport.abort()

    # --- requests in ---------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Offer the rest of a large body, or the shared buffer."""
        return self._app.scratch if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what arrived, and answer what is complete."""
        self._periods = 0
        if self._rest is not None:
            self._rest = self._rest[nbytes:]
            if len(self._rest):
                return
            self._rest = None
            if self._length > self._body_bytes:
                self._reserve()
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
        """Count a period; refuse a half-sent request of which nothing came for some."""
        self._periods += 1
        if self._periods >= PERIODS and self._in_message and not self._ending:
            self._rest = None
            self._refuse(408)
            self._advance()

    def _parse(self, parser: httptools.HttpRequestParser, data: memoryview) -> None:
        limits = self._app.limits
        self._read_bytes = len(data)
        before = self._body_bytes
        try:
            self._feed(parser, data)
        except httptools.HttpParserError:
            self._refusal = self._refusal or 400
        if self._in_message:
            if not self._in_body:
                self._head_bytes += len(data)
                if self._head_bytes > limits.max_head_bytes:
                    self._refusal = self._refusal or 431
            elif self._whole is None:
                # what frames a body in pieces (sizes, extensions, trailers) is bounded, too
                self._head_bytes = 0 if self._body_bytes != before else self._head_bytes + len(data)
                if self._head_bytes > limits.max_head_bytes:
                    self._refusal = self._refusal or 431
            elif not self._refusal:
                self._rest = memoryview(self._whole)[self._body_bytes :]
                self._body_bytes = len(self._whole)
        if self._refusal:
            self._refuse(self._refusal)

    def _feed(self, parser: httptools.HttpRequestParser, data: memoryview | bytes) -> None:
        """Parse, and ignore the offer to speak another protocol: RFC 9110, 7.8.

        The parser stops behind a head that has one, as if the body were of that protocol.
        """
        while True:
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                if parser.get_method() == b"CONNECT":
                    self._refusal = 405
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

    def _refuse(self, status: int) -> None:
        """Answer nothing after what is queued but this status, and read no more."""
        self._parser = None
        self._in_message = False
        self._queue.append((status, self._target, True))

    def on_message_begin(self) -> None:
        """Note that a request has begun."""
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
        """Judge the size, and invite the body of a client that waits for it."""
        assert self._parser is not None
        if self._parser.should_upgrade():
            return  # parsed again without the offer
        self._in_body = True
        limits = self._app.limits
        if self._read_bytes > limits.max_head_bytes:
            size = len(self._target) + sum(len(name) + len(value) for name, value in self._headers)
            if size > limits.max_head_bytes:
                self._refusal = 431
        if self._length:
            if self._length > limits.max_body_bytes:
                self._refusal = self._refusal or 413
            elif self._length >= _DIRECT_BYTES and not self._refusal:
                first = self._whole = allocate(min(self._length, _RESERVED_BYTES))
                self._body.append(first)
                self._read_version()
        invites = self._expects and self._parser.get_http_version() != "1.0"
        if invites and not self._refusal and self._current is None and not self._queue:
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        if self._refusal:
            return
        start = self._body_bytes
        self._body_bytes += len(body)
        if self._whole is not None:
            self._whole[start : self._body_bytes] = body
        elif self._body_bytes <= self._app.limits.max_body_bytes:
            self._body.append(body)
        else:
            self._refusal = 413

    def on_message_complete(self) -> None:
        """Queue the request, unless it has been refused."""
        assert self._parser is not None
        if not self._refusal and not self._parser.should_upgrade():
            if self._whole is None:
                self._read_version()
            self._queue_request()

    def _reserve(self) -> None:
        """Take memory for more of a large body."""
        more = allocate(min(self._length - self._body_bytes, _RESERVED_BYTES))
        self._body.append(more)
        self._body_bytes += len(more)
        self._rest = memoryview(more)

    def _read_version(self) -> None:
        """Ask the parser what it knows of the request and will not be asked later."""
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

    # --- responses out -------------------------------------------------------------------

    def _advance(self) -> None:
        """Answer queued requests until one has to wait."""
        while self._queue and self._current is None and not self._writing_paused:
            if self._ending:
                return
            request, line, close = self._queue.popleft()
            if isinstance(request, int):
                self._hang_up(request, target=line)
                return
            self._respond(request, line, close=close)
        if self._reading_paused and not self._queue and not self._ending:
            self._reading_paused = False
            self._transport.resume_reading()

    def _hang_up(self, status: int, *, target: bytes) -> None:
        """Close, after an answer with `status` where it is not 0.

        What the client still sends is read and dropped for a while: closed at once, the kernel
        would answer it with a reset, and the client might not see the answer.
        """
        self._ending = True
        if not status:
            self._transport.close()
            return
        reason, code = _REASONS[status]
        error = APIError(status, reason, HTTPStatus(status).phrase, code=code)
        response = error_response(error, xml=not is_json_target(target))
        head = response.head(connection=b"Connection: close\r\n")
        self._transport.writelines([head, *response.pieces()])
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._later(_LINGER_SECONDS, self._transport.close)
        else:
            self._transport.close()

    def _respond(self, request: Request, line: bytes, *, close: bool) -> None:
        response = self._app.handle(request)
        if response.close and not close:
            close, line = True, b"Connection: close\r\n"
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
        self._current, self._close_after, self._booked = (request, response), close, False
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
                        self._book()
                    selected = cut_out(self._pieces, step.start, step.end)
                    self._transport.writelines([self._head, *selected] if self._head else selected)
                    self._head = b""
                case Cut():
                    self._steps = None
                    self._book()
                    self._cut(reset=step.reset)
                case _:
                    self._later(step.seconds, self._wake)
                    return

    def _wake(self) -> None:
        self._pump()
        self._advance()

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(min(seconds, _LONGEST_SECONDS), callback)

    def _finish(self) -> None:
        """Make room for the next response."""
        self._book()
        self._current = self._steps = None
        self._pieces = ()
        if self._close_after:
            self._close()

    def _book(self) -> None:
        """Close the books on the current response, once: before its last byte or its end."""
        if self._current is not None and not self._booked:
            self._booked = True
            self._app.finished(*self._current)

    def _close(self) -> None:
        self._ending = True
        self._transport.close()

    def _cut(self, *, reset: bool) -> None:
        """End the connection once what was written has left."""
        self._ending = True
        if not reset:
            self._transport.close()
        elif self._transport.get_write_buffer_size():
            self._later(_FLUSH_SECONDS, lambda: self._cut(reset=True))
        else:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
