"""Application: the server without sockets. It routes requests and calls hooks and handlers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server import (
    _json_batch,
    _json_buckets,
    _json_compose,
    _json_insert,
    _json_objects,
    _json_resumable,
    _xml_buckets,
    _xml_multipart,
    _xml_objects,
)
from aioflux.testing.gcs_server._buffer_pool import BufferPool
from aioflux.testing.gcs_server._connection import Limits
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response, error_response
from aioflux.testing.gcs_server._routes import Route, Router, is_json_target

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._connection import Connection
    from aioflux.testing.gcs_server._state import State

_log = logging.getLogger(__name__)
_SCRATCH_BYTES = 256 << 10
_LIMITS = Limits()

ROUTES: tuple[Route, ...] = (
    *_json_buckets.ROUTES,
    *_json_objects.ROUTES,
    *_json_resumable.ROUTES,
    *_json_insert.ROUTES,
    *_json_compose.ROUTES,
    *_xml_buckets.ROUTES,
    *_xml_objects.ROUTES,
    *_xml_multipart.ROUTES,
)


class Hook:
    """Base class of hooks, which run before and after the handler of each request.

    `server.app.hooks` is a tuple of hooks. `before` of the first hook runs first, `after` of the
    first hook runs last. If `before` returns a response, the handler and the later hooks do not
    run. `request.match.operation` is the name of the operation.
    """

    def before(self, request: Request) -> Response | None:
        """Return a response to send without running the handler, or None to run the handler."""

    def after(self, request: Request, response: Response) -> Response:
        """Return the response to send. The handler has already changed the state of the server.

        The default returns `response`. Set `response.delivery` to delay or truncate the response.
        """
        return response

    def finished(self, request: Request, response: Response) -> None:
        """Handle the end of a response, before the last byte is sent or after a disconnect."""


class App:
    """Application that handles requests. It belongs to one event loop."""

    def __init__(
        self, state: State, routes: Iterable[Route] = ROUTES, *, limits: Limits = _LIMITS
    ) -> None:
        self.state = state
        self.limits = limits
        self.buffers = BufferPool()
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self.num_opened = 0
        self._hooks: tuple[Hook, ...] = ()
        self._finished_hooks: tuple[Hook, ...] = ()
        self._routes = (*routes, *_json_batch.batch_routes(self))
        self._router = Router(self._routes)

    def handle(self, request: Request) -> Response:
        """Return the response to a request. Errors become error responses."""
        try:
            request.match = self._router.match(request.method, request.target)
        except APIError as exc:
            return error_response(exc, xml=not is_json_target(request.target))
        try:
            return self._run_hooks(request)
        except Exception:
            return _internal_error(request)

    def _run_hooks(self, request: Request) -> Response:
        hooks, num_called = self._hooks, 0
        replacement = None
        for hook in hooks:
            num_called += 1
            replacement = hook.before(request)
            if replacement is not None:
                break
        response = replacement or self.run(request)
        for hook in hooks[:num_called][::-1]:
            response = hook.after(request, response)
        return response

    def finished(self, request: Request, response: Response) -> None:
        """Call `finished` of every hook that overrides it."""
        if self._finished_hooks and hasattr(request, "match"):
            for hook in self._finished_hooks:
                try:
                    hook.finished(request, response)
                except Exception:
                    _log.exception("hook %s failed for %s", hook, request.match.operation)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Hooks that run before and after every handler; see `Hook` for their order."""
        return self._hooks

    @hooks.setter
    def hooks(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = hooks
        self._finished_hooks = tuple(hook for hook in hooks if type(hook).finished != Hook.finished)

    def add_routes(self, routes: Iterable[Route]) -> None:
        self._routes += tuple(routes)
        self._router = Router(self._routes)

    def add_connection(self, connection: Connection) -> None:
        self.connections.add(connection)
        self.num_opened += 1

    def remove_connection(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def run(self, request: Request) -> Response:
        """Run the handler of a request whose `match` is set, without the hooks."""
        route, is_xml = request.match.route, not request.match.url.is_json
        denied = self.state.denied_permissions
        if denied and (names := denied & route.permissions):
            error = APIError(403, "forbidden", f"Permission '{min(names)}' denied on resource.")
            return error_response(error, xml=is_xml)
        try:
            with self.state.lock:
                return route.handler(self.state, request)
        except APIError as exc:
            return error_response(exc, xml=is_xml)
        except Exception:
            return _internal_error(request)


def _internal_error(request: Request) -> Response:
    """Log the current exception, and return a 500."""
    _log.exception("handler of %s failed", request.match.operation)
    error = APIError(500, "internalError", "We encountered an internal error.")
    return error_response(error, xml=not request.match.url.is_json)
