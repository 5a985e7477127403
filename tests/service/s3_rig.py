"""An S3 service on a server whose responses a test defines, and a record of its requests."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.credentials import Credentials

from aioflux import S3Access
from aioflux._services.base import Precondition
from tests.http.scripted import serving
from tests.service.opening import open_service, service_config
from tests.service.operations import operations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aioflux._services.base import ServiceConfig
    from tests.http.scripted import Peer

ANY = Precondition()
ETAG = "5d41402abc4b2a76b9719d911017c592"
"""The MD5 of `hello`."""
PIN = f"{ETAG}/5"

OPERATIONS = {
    **operations("compose", "permissions"),
    "delete": lambda service: service.delete("a", generation=PIN),
}


@dataclass
class Asked:
    """One request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Cut(bytes):
    """A response after which the connection is reset. It may be truncated or empty."""


def answer(status: int, body: bytes | str = b"", **headers: str) -> bytes:
    """Return a response; underscores in header names become dashes."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} Such"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "content_length" not in headers and status != 204:
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + data


def service_error(status: int, code: str, *, fields: str = "", **headers: str) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code>{fields}</Error>", **headers)


def hello(**headers: str) -> bytes:
    return answer(200, b"hello", etag=f'"{ETAG}"', **headers)


class Probed:
    """Temporary objects of probes; their preconditions are compared, their requests not counted."""

    def __init__(self) -> None:
        self.etags: dict[str, str] = {}
        self.num_requests = 0

    def answer(self, asked: Asked) -> bytes:
        self.num_requests += 1
        there = self.etags.get(asked.target)
        expected = asked.headers.get("if-match", there or "").strip('"')
        if (there or "") != expected or (there and "if-none-match" in asked.headers):
            return service_error(412, "PreconditionFailed")
        if asked.method == "PUT":
            etag = self.etags[asked.target] = f"{self.num_requests:032x}"
            return answer(200, etag=f'"{etag}"')
        if asked.method == "DELETE":
            self.etags.pop(asked.target, None)
            return answer(204)
        if there is None:
            return answer(404)
        return answer(200, etag=f'"{there}"', content_length="1")


@asynccontextmanager
async def asking(
    *answers: bytes | Callable[[Asked], bytes],
    access: S3Access | None = None,
    probed: Probed | None = None,
    kind: Callable[[ServiceConfig], Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Any, list[Asked]]]:
    """A service whose n-th request receives the n-th response; later requests receive the last one.

    Requests of probes are answered by `Probed`. `kind` is a class of services, if it is not the
    class of `s3://`.
    """
    asked: list[Asked] = []
    probed = probed or Probed()

    async def script(peer: Peer) -> None:
        while True:
            head, body = await peer.read_request()
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines if line)
            }
            request = Asked(method, target, headers, body)
            if "/.aioflux-uploads/" in target:
                await peer.send(probed.answer(request))
                continue
            asked.append(request)
            reply = answers[min(len(asked), len(answers)) - 1]
            await peer.send(reply if isinstance(reply, bytes) else reply(asked[-1]))
            if isinstance(reply, Cut):
                peer.writer.close()
                return

    async with serving(script) as (_, origin):
        settings |= {
            "credentials": access or S3Access(credentials=Credentials("AKID", "hush-secret")),
            "endpoint_url": f"http://127.0.0.1:{origin.port}",
        }
        uri = "s3://bucket/p/"
        service = (
            open_service(uri, **settings) if kind is None else kind(service_config(uri, **settings))
        )
        try:
            yield service, asked
        finally:
            await service.aclose()
