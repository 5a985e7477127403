"""The table of `docs/failures.md` about failures of one request, printed from the package.

    python -m tests.faults.failure_table

The senders of the services classify each failure. A store whose requests fail in this way shows how
often it sends them, what it counts, and what it raises in the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import aioflux
from aioflux._http import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    ProxyRefusedError,
    StalledError,
    TransportError,
)
from aioflux._http.codec import ResponseHead
from aioflux._services import responses
from aioflux._services.azure import wire as azure
from aioflux._services.responses import CONDITIONAL, PLAIN, RequestKind
from aioflux._services.s3 import wire as s3

if TYPE_CHECKING:
    from aioflux._services.sender import Sender

__all__ = ["table"]

URIS = {"gs": "gs://bucket", "s3": "s3://bucket", "az": "az://account/container"}
COUNTERS = ("num_failures", "num_retries", "num_throttled", "num_checksum_mismatches")
MAX_ATTEMPTS = 8
MANY = 20
"""So many attempts fail; the next one succeeds."""
RETRIED = {
    1: "no",
    3: "at most twice in a row",
    MAX_ATTEMPTS: "yes",
    MANY + 1: "yes; not counted in `max_attempts`",
}
"""The cell of the table for a number of attempts."""
_numbers = count()

Operation = Callable[[aioflux.Store], Awaitable[object]]


async def head(store: aioflux.Store) -> None:
    await store.head("a")


async def put(store: aioflux.Store, **precondition: Any) -> None:
    await store.put("a", b"a", **precondition)


class Case(NamedTuple):
    """A failure, and the operation that it ends."""

    text: str
    failure: int | TransportError
    """Status of the response, or the error if there is no complete response."""
    code: str = ""
    """Code of the service in the response."""
    clouds: tuple[str, ...] = tuple(URIS)
    kind: RequestKind = PLAIN
    operation: Operation = head


BODY = ResponseHead(
    status=200,
    headers={b"etag": b'"7"', b"x-goog-generation": b"7", b"content-length": b"9"},
    http_minor=1,
    keep_alive=True,
    content_length=9,
    chunked=False,
)
UNKNOWN_HOST = ConnectError()
UNKNOWN_HOST.unconnected = "unknown host"
CREATE = partial(put, mode="create")
REPLACE = partial(put, if_generation_match="7")
STATUSES = [Case(str(status), status) for status in range(300, 600)]
CASES = [
    Case("no connection", ConnectError()),
    Case("the name of the host does not exist", UNKNOWN_HOST),
    Case("the certificate is rejected", CertificateError()),
    Case("the proxy returns 403 or 407 to CONNECT", ProxyRefusedError()),
    Case("the connection is lost", ConnectionLostError(request_sent=True)),
    Case("no progress within `Timeouts`", StalledError(request_sent=True)),
    Case("a break within the body of a read", ConnectionLostError(num_bytes_received=1, head=BODY)),
    Case("invalid HTTP", ProtocolError(request_sent=True)),
    *STATUSES,
    Case('412 to `put(mode="create")`', 412, kind=CONDITIONAL, operation=CREATE),
    Case("404 to `put(if_generation_match=)`", 404, kind=CONDITIONAL, operation=REPLACE),
    Case(
        "412 to a read of one generation",
        412,
        clouds=("s3", "az"),
        kind=RequestKind(is_read=True, generation="7"),
    ),
    # With a status that is not retried.
    *(Case(f"`{code}`", 400, code, ("s3",)) for code in s3._TRANSIENT_CODES),
    *(Case(f"`{code}`", 400, code, ("s3",)) for code in sorted(s3.EXPIRED_CODES)),
    *(Case(f"`{code}`", 400, code, ("s3",)) for code in sorted(s3._WRONG_TOKENS)),
    Case("`PublicAccessNotPermitted`", 400, "PublicAccessNotPermitted", ("az",)),
    Case("`ContainerNotFound`", 400, "ContainerNotFound", ("az",)),
    *(
        Case(f"`{code}`", 400, code, clouds, operation=put)
        for clouds, codes in (
            (("gs", "s3"), sorted(responses._DIGEST_CODES)),
            (("s3",), [s3._DIGEST_CODE]),
            (("az",), sorted(azure._DIGEST_CODES)),
        )
        for code in codes
    ),
    *(
        Case(f"`{code}`", 400, code, ("az",), operation=put)
        for code in sorted(azure._EXISTS_CODES | azure._PRECONDITION_CODES)
    ),
]


@dataclass
class Response:
    """An error response, with its code in the forms of all services."""

    status: int
    code: str

    @property
    def headers(self) -> dict[bytes, bytes]:
        return {b"x-ms-error-code": self.code.encode()} if self.code else {}

    @property
    def body(self) -> bytes:
        return f"<Error><Code>{self.code}</Code></Error>".encode() if self.code else b""


class Result(NamedTuple):
    """What follows from a failure; the cells of the table beside it."""

    error: str
    retried: str
    counted: str


@asynccontextmanager
async def senders() -> AsyncIterator[dict[str, Sender]]:
    """Open a store of each cloud, and yield the objects that classify its failures."""
    stores = {name: aioflux.open_store(uri, credentials="anonymous") for name, uri in URIS.items()}
    services: Any = {name: store._sessions.current().service for name, store in stores.items()}
    try:
        yield {name: service._sender for name, service in services.items()}
    finally:
        for store in stores.values():
            await store.aclose()


async def result_of(case: Case, sender: Sender) -> Result:
    """Return what follows if `MANY` attempts of the operation fail."""
    num_attempts = 0

    def new_error() -> aioflux.StorageError:
        if isinstance(case.failure, int):
            response = Response(case.failure, case.code)
            return sender.response_error(response, "read", "a", case.kind)
        return sender.transport_error(case.failure, "read", "a")

    async def attempt(*arguments: Any, **settings: Any) -> Any:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts <= MANY:
            raise new_error()
        return await succeed(*arguments, **settings)

    retry = aioflux.RetryPolicy(max_attempts=MAX_ATTEMPTS, initial_seconds=1e-6)
    async with aioflux.open_store(f"memory://failures-{next(_numbers)}", retry=retry) as store:
        await store.put("a", b"a")
        service, before = store._sessions.current().service, store.stats
        name = "head" if case.operation is head else "put"
        succeed = getattr(service, name)
        setattr(service, name, attempt)
        error = new_error()
        try:
            await case.operation(store)
        except aioflux.StorageError as exc:
            error = exc
        counted = [each for each in COUNTERS if getattr(store.stats, each) > getattr(before, each)]
    texts = ", ".join(f"`{each}`" for each in counted)
    return Result(f"`{type(error).__name__}`", RETRIED[num_attempts], texts)


async def failures_by_result() -> dict[Result, dict[str, list[str]]]:
    """Return the failures with each result, by the clouds that have them."""
    failures: dict[Result, dict[str, list[str]]] = {}
    async with senders() as by_cloud:
        for case in CASES:
            clouds: dict[Result, list[str]] = {}
            for cloud in case.clouds:
                clouds.setdefault(await result_of(case, by_cloud[cloud]), []).append(cloud)
            for result, names in clouds.items():
                where = "" if len(names) == len(URIS) else f" ({', '.join(names)})"
                failures.setdefault(result, {}).setdefault(where, []).append(case.text)
    return failures


def without_most(texts: list[str]) -> list[str]:
    """Return failures without their statuses if these are most of all statuses."""
    statuses = [text for text in texts if text.isdigit()]
    if 2 * len(statuses) < len(STATUSES):
        return texts
    return [text for text in texts if not text.isdigit()] + ["all other statuses from 300 to 599"]


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| failure | error | retried | counted as |", "| --- | --- | --- | --- |"]
    for result, by_clouds in asyncio.run(failures_by_result()).items():
        texts = [f"{', '.join(without_most(each))}{where}" for where, each in by_clouds.items()]
        lines.append(f"| {'; '.join(texts)} | {' | '.join(result)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
