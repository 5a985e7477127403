"""A Google Cloud Storage service on one server, and hooks that respond instead of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.auth.credentials import AnonymousCredentials

from aioflux._services.base import Precondition
from aioflux.testing.gcs_server import Hook
from tests.service.opening import opened_service
from tests.service.operations import operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from aioflux.testing.gcs_server import Request, Response

ANY = Precondition()

OPERATIONS = operations("delete_page")


def opened(url: str, **settings: Any) -> AbstractAsyncContextManager[Any]:
    settings = {"credentials": AnonymousCredentials(), "endpoint_url": url, **settings}
    return opened_service("gs://bucket/p/", **settings)


class Answering(Hook):
    """Records the Authorization header of each request, and may respond instead of the server."""

    def __init__(self, answer: Callable[[Request], Response | None] = lambda _: None) -> None:
        self.tokens: list[str | None] = []
        self._answer = answer

    def before(self, request: Request) -> Response | None:
        self.tokens.append(request.headers.get("authorization"))
        return self._answer(request)
