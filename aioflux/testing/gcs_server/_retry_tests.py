"""The retry-test API of Google's storage-testbench: faults that tests order over HTTP.

A test posts instructions by operation and gets an id; requests that carry the id in the header
`x-retry-test-id` use the instructions up, one after another. Names and meanings are those of
https://github.com/googleapis/storage-testbench, so that the same test runs on both servers. XML
requests count as the JSON operation that does the same.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._app import Hook
from aioflux.testing.gcs_server._delivery import PLAIN
from aioflux.testing.gcs_server._disturb import body_size, disturb, refuse, refuse_with, touches
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._faults import Fault
from aioflux.testing.gcs_server._json_resumable import parse_content_range
from aioflux.testing.gcs_server._messages import (
    Request,
    Response,
    error_response,
    json_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioflux.testing.gcs_server._messages import Buffer
    from aioflux.testing.gcs_server._state import State

_HEADER = "x-retry-test-id"
_GET = "storage.objects.get"
_INSERT = "storage.objects.insert"
_FEW_BYTES = 4  # what the testbench sends before it breaks a stream
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
    """One instruction: its form and the numbers in it."""

    form: str
    status: int = 0
    at: int = 0
    """Position in bytes."""
    seconds: int = 0


def parse_instruction(text: str) -> Instruction:
    """Read an instruction.

    Raises:
        APIError: 400, there is none of this name.
    """
    for form, pattern in _FORMS.items():
        match = pattern.fullmatch(text)
        if match is None:
            continue
        found = {name: int(value) for name, value in match.groupdict().items() if value}
        few = 0 if form == "stall" else _FEW_BYTES
        at = found["kib"] << 10 if "kib" in found else found.get("bytes", few)
        return Instruction(form, found.get("status", 0), at, found.get("seconds", 0))
    raise invalid(f"The fault injection request <{text}>")


@dataclass(slots=True)
class _RetryTest:
    """A test and what is left of its instructions."""

    test_id: str
    transport: str
    instructions: dict[str, deque[str]]

    def resource(self) -> dict[str, Any]:
        return {
            "id": self.test_id,
            "instructions": {name: list(left) for name, left in self.instructions.items()},
            "completed": not any(self.instructions.values()),
            "transport": self.transport,
        }


class RetryTests(Hook):
    """Keeps the tests, answers their API and carries their instructions out.

    Args:
        run: Runs the handler of a matched request, without hooks.
        operations: Names that instructions may have.
    """

    def __init__(self, run: Callable[[Request], Response], operations: Iterable[str]) -> None:
        self._run = run
        self._operations = {alias for name in operations for alias in (name, _alias(name))}
        self._tests: dict[str, _RetryTest] = {}
        self._lock = threading.Lock()
        self._refusal: Response | None = None

    # --- API -----------------------------------------------------------------------------

    def create(self, state: State, request: Request) -> Response:
        """Keep a new test."""
        given = request.json()
        instructions = given.get("instructions")
        transport = str(given.get("transport", "HTTP")).upper()
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
        """Refuse instructions that cannot be read; those of JSON operations not served may wait.

        Raises:
            APIError: 400.
        """
        if name not in self._operations and not _OPERATION.fullmatch(name):
            raise invalid(f"The requested method <{name}> for fault injection")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise invalid(f"The instructions of <{name}> are not a list of texts")
        for text in texts:
            parse_instruction(text)

    def get(self, state: State, request: Request) -> Response:
        """Describe a test."""
        return json_response(self._test(request.params["id"]).resource())

    def list(self, state: State, request: Request) -> Response:
        """Describe all tests."""
        with self._lock:
            return json_response({"retry_test": [test.resource() for test in self._tests.values()]})

    def delete(self, state: State, request: Request) -> Response:
        """Forget a test."""
        test = self._test(request.params["id"])
        with self._lock:
            self._tests.pop(test.test_id, None)
        content_type = ("Content-Type", "text/plain")
        return Response(headers=(content_type,), body=f"Deleted {test.test_id}".encode())

    def routes(self) -> tuple[Route, ...]:
        """Return the table of the API."""
        table = (
            ("POST", "/retry_test", "insert", self.create),
            ("GET", "/retry_tests", "list", self.list),
            ("GET", "/retry_test/{id}", "get", self.get),
            ("DELETE", "/retry_test/{id}", "delete", self.delete),
        )
        return tuple(
            Route(method=method, pattern=pattern, operation=f"retry_tests.{word}", handler=handler)
            for method, pattern, word, handler in table
        )

    def _test(self, test_id: str) -> _RetryTest:
        with self._lock:
            test = self._tests.get(test_id)
        if test is None:
            raise APIError(404, "notFound", f"Retry Test {test_id}")
        return test

    # --- carrying out --------------------------------------------------------------------

    def before(self, request: Request) -> Response | None:
        """Answer in place of the handler where the next instruction says so."""
        self._refusal = None
        try:
            found = self._next(request)
        except APIError as exc:
            return error_response(exc, xml=not request.match.url.is_json)
        if found is not None:
            left, operation = found
            self._refusal = self._refuse(parse_instruction(left[0]), operation, request)
            if self._refusal is not None:
                left.popleft()
        return self._refusal

    def after(self, request: Request, response: Response) -> Response:
        """Disturb the answer where the next instruction says so."""
        if self._refusal is not None:
            return response
        try:
            found = self._next(request)
        except APIError:
            return response
        if found is None:
            return response
        left, operation = found
        changed = _disturbed(parse_instruction(left[0]), operation, request, response)
        if changed is None:
            return response
        left.popleft()
        return changed

    def _next(self, request: Request) -> tuple[deque[str], str] | None:
        """Return the instructions left for a request and the name they go by.

        Raises:
            APIError: 404, no such test.
        """
        test_id = request.headers.get(_HEADER)
        if test_id is None or request.match.operation.startswith("retry_tests."):
            return None
        test = self._test(test_id)
        if test.transport != "HTTP":
            return None
        operation = request.match.operation
        for name in (operation, _alias(operation)):
            left = test.instructions.get(name)
            if left:
                return left, name
        return None

    def _refuse(
        self, instruction: Instruction, operation: str, request: Request
    ) -> Response | None:
        xml = not request.match.url.is_json
        if instruction.form == "status":
            return refuse_with(instruction.status, xml=xml)
        if instruction.form == "reset":
            return refuse(Fault(operation="*", reset=True), xml=xml)
        if instruction.form != "status_after" or _alias(operation) != _INSERT:
            return None
        if not self._receive_until(instruction.at, request):
            return None
        return refuse_with(instruction.status, xml=xml)

    def _receive_until(self, at: int, request: Request) -> bool:
        """Persist an upload up to a position; False where the request does not reach it.

        Only resumable uploads keep what came before the failure.
        """
        body = request.body
        if "upload_id" not in request.query:
            return len(body) >= at
        try:
            first = parse_content_range(request.headers.get("content-range")).start
        except APIError:
            return False
        if first is None or at > first + len(body):
            return False
        if at > first:
            self._run(_beginning(request, first=first, end=at))
        return True


def _beginning(request: Request, *, first: int, end: int) -> Request:
    """Build the request that sends a resumable upload's bytes only up to `end`."""
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


def _is_reached(at: int, request: Request) -> bool:
    """Judge whether the body of a request goes beyond a position; any request reaches 0."""
    return not at or sum(map(len, request.pieces)) > at


def _disturbed(
    instruction: Instruction, operation: str, request: Request, response: Response
) -> Response | None:
    """Return the answer as an instruction leaves it; None where it does not apply."""
    size = body_size(request, response)
    is_insert = _alias(operation) == _INSERT
    if instruction.form == "broken":
        fault = Fault(operation="*", truncate_at=instruction.at)
    elif instruction.form == "stall" and not is_insert and (size or instruction.at):
        fault = Fault(operation="*", stall_at=instruction.at, stall_seconds=instruction.seconds)
    elif instruction.form == "stall" and _is_reached(instruction.at, request):
        plan = response.delivery or PLAIN
        delay = plan.delay_seconds + instruction.seconds
        return replace(response, delivery=replace(plan, delay_seconds=delay))
    elif instruction.form == "short" and response.status == 200 and "upload_id" in request.query:
        return replace(response, body=b"".join(response.pieces())[: instruction.at])
    else:
        return None
    return disturb(fault, response, size) if touches(fault, response, size) else None


def _alias(operation: str) -> str:
    """Return the JSON operation that does the same as one of either API."""
    name = operation.partition(".")[2]
    return _ALIASES.get(operation, f"storage.{name}" if operation.startswith("xml.") else operation)
