"""Retry-test API of Google's storage-testbench: faults that tests add by HTTP requests.

A test sends a list of instructions for each operation, and receives an id. Each request with this
id in the header `x-retry-test-id` consumes one instruction of its operation. Instructions are the
same as in https://github.com/googleapis/storage-testbench, so that a test runs on both servers. An
XML request consumes the instructions of the equivalent JSON operation.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._app import Hook
from aioflux.testing.gcs_server._delivery import PLAIN
from aioflux.testing.gcs_server._errors import APIError, invalid, status_error
from aioflux.testing.gcs_server._faults import (
    Fault,
    alter,
    can_alter,
    replacement_response,
    sent_size,
)
from aioflux.testing.gcs_server._json_resumable import parse_content_range
from aioflux.testing.gcs_server._messages import (
    Request,
    Response,
    error_response,
    json_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Buffer
    from aioflux.testing.gcs_server._state import State

_HEADER = "x-retry-test-id"
_GET = "storage.objects.get"
_INSERT = "storage.objects.insert"
_BROKEN_STREAM_BYTES = 4  # bytes that the testbench sends before it closes the connection
_ALIASES = {
    "xml.multipart.create": _INSERT,
    "xml.multipart.part": _INSERT,
    "xml.multipart.complete": _INSERT,
    "xml.multipart.abort": "storage.objects.delete",
}
_FORMS = {
    "status": re.compile(r"return-(?P<status>[2-9]\d\d)"),
    "reset": re.compile(r"return-reset-connection"),
    "broken": re.compile(r"return-broken-stream(-after-(?P<kib>\d+)K)?"),
    "short": re.compile(r"return-broken-stream-final-chunk-after-(?P<bytes>\d+)B"),
    "status_after": re.compile(r"return-(?P<status>[2-9]\d\d)-after-(?P<kib>\d+)K"),
    "stall": re.compile(r"stall-for-(?P<seconds>\d{1,9})s(-after-(?P<kib>\d+)K)?"),
}
_OPERATION = re.compile(r"storage\.\w+\.\w+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Parsed instruction of a retry test."""

    form: str
    """Key of `_FORMS`."""
    status: int = 0
    position: int = 0
    """Offset of the fault in the body, in bytes."""
    seconds: int = 0


def parse_instruction(text: str) -> Instruction:
    """Parse an instruction. Raise APIError (400) if it is unknown."""
    for form, pattern in _FORMS.items():
        match = pattern.fullmatch(text)
        if match is None:
            continue
        numbers = {name: int(value) for name, value in match.groupdict().items() if value}
        default = 0 if form == "stall" else _BROKEN_STREAM_BYTES
        position = numbers["kib"] << 10 if "kib" in numbers else numbers.get("bytes", default)
        return Instruction(form, numbers.get("status", 0), position, numbers.get("seconds", 0))
    raise invalid(f"The fault injection request <{text}> is not supported")


@dataclass(slots=True)
class _RetryTest:
    """Retry test with the remaining instructions by operation."""

    test_id: str
    transport: str
    instructions: dict[str, deque[str]]

    def resource(self) -> dict[str, Any]:
        return {
            "id": self.test_id,
            "instructions": {name: list(texts) for name, texts in self.instructions.items()},
            "completed": not any(self.instructions.values()),
            "transport": self.transport,
        }


class RetryTests(Hook):
    """Hook that serves the API of retry tests and injects their faults."""

    def __init__(self, run: Callable[[Request], Response], operations: Iterable[str]) -> None:
        self._run = run
        self._operations = {alias for name in operations for alias in (name, _alias(name))}
        self._tests: dict[str, _RetryTest] = {}
        self._lock = threading.Lock()
        self._replacement: Response | None = None

    # --- API -----------------------------------------------------------------------------

    def create(self, state: State, request: Request) -> Response:
        body = request.json()
        instructions = body.get("instructions")
        transport = str(body.get("transport", "HTTP")).upper()
        if not isinstance(instructions, dict) or not instructions:
            raise invalid("instructions is not defined")
        if transport not in ("HTTP", "GRPC"):
            raise invalid(f"The requested transport <{transport}> is not supported")
        for name, texts in instructions.items():
            self._check(name, texts)
        queues = {name: deque(texts) for name, texts in instructions.items()}
        test = _RetryTest(uuid.uuid4().hex, transport, queues)
        with self._lock:
            self._tests[test.test_id] = test
        return json_response(test.resource())

    def _check(self, name: str, texts: object) -> None:
        """Check the instructions for an operation.

        A valid name of an operation that this server does not have is accepted.
        """
        if name not in self._operations and not _OPERATION.fullmatch(name):
            raise invalid(f"The requested method <{name}> is not valid for fault injection")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise invalid(f"The instructions of <{name}> are not a list of texts")
        for text in texts:
            parse_instruction(text)

    def get(self, state: State, request: Request) -> Response:
        return json_response(self._test(request.params["id"]).resource())

    def list(self, state: State, request: Request) -> Response:
        with self._lock:
            return json_response({"retry_test": [test.resource() for test in self._tests.values()]})

    def delete(self, state: State, request: Request) -> Response:
        test = self._test(request.params["id"])
        with self._lock:
            self._tests.pop(test.test_id, None)
        content_type = ("Content-Type", "text/plain")
        return Response(headers=(content_type,), body=f"Deleted {test.test_id}".encode())

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", "/retry_test", "retry_tests.insert", self.create),
            Route("GET", "/retry_tests", "retry_tests.list", self.list),
            Route("GET", "/retry_test/{id}", "retry_tests.get", self.get),
            Route("DELETE", "/retry_test/{id}", "retry_tests.delete", self.delete),
        )

    def _test(self, test_id: str) -> _RetryTest:
        with self._lock:
            test = self._tests.get(test_id)
        if test is None:
            raise APIError(404, "notFound", f"Retry test {test_id} does not exist")
        return test

    # --- faults --------------------------------------------------------------------------

    def before(self, request: Request) -> Response | None:
        """See base class; consumes the next instruction if it replaces the handler."""
        self._replacement = None
        try:
            instructions = self._find_instructions(request)
        except APIError as exc:
            return error_response(exc, xml=not request.match.url.is_json)
        if instructions is not None:
            texts, operation = instructions
            self._replacement = self._replacement_response(
                parse_instruction(texts[0]), operation, request
            )
            if self._replacement is not None:
                texts.popleft()
        return self._replacement

    def after(self, request: Request, response: Response) -> Response:
        """See base class; consumes the next instruction if it alters the response."""
        if self._replacement is not None:
            return response
        try:
            instructions = self._find_instructions(request)
        except APIError:
            return response
        if instructions is None:
            return response
        texts, operation = instructions
        altered = _alter_response(parse_instruction(texts[0]), operation, request, response)
        if altered is None:
            return response
        texts.popleft()
        return altered

    def _find_instructions(self, request: Request) -> tuple[deque[str], str] | None:
        """Return the remaining instructions for a request, and their operation in the test."""
        test_id = request.headers.get(_HEADER)
        if test_id is None or request.match.operation.startswith("retry_tests."):
            return None
        test = self._test(test_id)
        if test.transport != "HTTP":
            return None
        operation = request.match.operation
        for name in (operation, _alias(operation)):
            texts = test.instructions.get(name)
            if texts:
                return texts, name
        return None

    def _replacement_response(
        self, instruction: Instruction, operation: str, request: Request
    ) -> Response | None:
        xml = not request.match.url.is_json
        if instruction.form == "status":
            return error_response(status_error(instruction.status), xml=xml)
        if instruction.form == "reset":
            return replacement_response(Fault(operation="*", reset=True), xml=xml)
        if instruction.form != "status_after" or _alias(operation) != _INSERT:
            return None
        if not self._receive_until(instruction.position, request):
            return None
        return error_response(status_error(instruction.status), xml=xml)

    def _receive_until(self, position: int, request: Request) -> bool:
        """Return whether a request has all bytes before a position.

        These bytes are persisted if the request belongs to a resumable upload.
        """
        body = request.body
        if "upload_id" not in request.query:
            return len(body) >= position
        try:
            first = parse_content_range(request.headers.get("content-range")).start
        except APIError:
            return False
        if first is None or position > first + len(body):
            return False
        if position > first:
            self._run(_truncate_request(request, first=first, end=position))
        return True


def _truncate_request(request: Request, *, first: int, end: int) -> Request:
    """Return a request of a resumable upload with the bytes `[first, end)` of the object only."""
    headers = [
        (name, value)
        for name, value in request.raw_headers
        if name.lower() not in (b"content-range", b"content-length", b"x-goog-hash")
    ]
    headers.append((b"Content-Range", f"bytes {first}-{end - 1}/*".encode()))
    pieces: list[Buffer] = [request.body[: end - first]]
    part = Request(request.method, request.target, headers, pieces, scheme=request.scheme)
    part.match = request.match
    return part


def _alter_response(
    instruction: Instruction, operation: str, request: Request, response: Response
) -> Response | None:
    """Return the response with the fault of an instruction, or None if it does not apply."""
    size, position = sent_size(request, response), instruction.position
    is_insert = _alias(operation) == _INSERT
    if instruction.form == "broken":
        fault = Fault(operation="*", truncate_at=position)
    elif instruction.form == "stall" and not is_insert and (size or position):
        fault = Fault(operation="*", stall_at=position, stall_seconds=instruction.seconds)
    elif instruction.form == "stall" and (not position or request.size > position):
        plan = response.delivery or PLAIN
        delay = plan.delay_seconds + instruction.seconds
        return replace(response, delivery=replace(plan, delay_seconds=delay))
    elif instruction.form == "short" and response.status == 200 and "upload_id" in request.query:
        return replace(response, body=b"".join(response.pieces())[:position])
    else:
        return None
    return alter(fault, response, size) if can_alter(fault, response, size) else None


def _alias(operation: str) -> str:
    """Return the JSON operation that is equivalent to an operation of the JSON or XML API."""
    name = operation.partition(".")[2]
    return _ALIASES.get(operation, f"storage.{name}" if operation.startswith("xml.") else operation)
