"""From a request to a response: route, ask the hooks, run the handler, render errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server import (
    _json_batch,
    _json_buckets,
    _json_compose,
    _json_copy,
    _json_insert,
    _json_list,
    _json_objects,
    _json_resumable,
    _xml_buckets,
    _xml_list,
    _xml_multipart,
    _xml_objects,
)
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._limits import Limits
from aioflux.testing.gcs_server._messages import Request, Response, error_response
from aioflux.testing.gcs_server._routes import Route, Router, is_json_target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.testing.gcs_server._state import State
    from aioflux.testing.gcs_server._wire import Connection

_log = logging.getLogger(__name__)
_SCRATCH_BYTES = 256 << 10
_LIMITS = Limits()

ROUTES: tuple[Route, ...] = (
    *_json_buckets.ROUTES,
    *_json_objects.ROUTES,
    *_json_list.ROUTES,
    *_json_resumable.ROUTES,
    *_json_insert.ROUTES,
    *_json_compose.ROUTES,
    *_json_copy.ROUTES,
    *_xml_buckets.ROUTES,
    *_xml_list.ROUTES,
    *_xml_objects.ROUTES,
    *_xml_multipart.ROUTES,
)


class Hook:
    """Watches or disturbs requests: base of faults, limits and counters.

    The first hook is the outermost: its `before` comes first and its `after` last. A hook behind
    one that answers in place of the handler does not learn of the request.

    `request.match.operation` names the operation in all of them.
    """

    def before(self, request: Request) -> Response | None:
        """Answer in place of the handler, so that nothing is committed; None lets it run."""

    def after(self, request: Request, response: Response) -> Response:
        """Change what is sent, once the handler has committed.

        The result is another response or the same with a `delivery`; a lost response is
        `Delivery(cut_at=BEFORE_HEAD)`.
        """
        return response

    def finished(self, request: Request, response: Response) -> None:
        """Learn that the last of the response is about to leave, or its connection has ended.

        A client that has its answer can rely on this having been called.
        """


class App:
    """The server without its socket.

    Args:
        state: What the handlers work on.
        routes: The operations; further ones may be added to `ROUTES`.
        limits: Bounds on a single request.
    """

    def __init__(
        self, state: State, routes: Iterable[Route] = ROUTES, *, limits: Limits = _LIMITS
    ) -> None:
        self.state = state
        self.limits = limits
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self.num_opened = 0
        self._hooks: tuple[Hook, ...] = ()
        self._last_hooks: tuple[Hook, ...] = ()
        self._routes = (*routes, *_json_batch.batch_routes(self))
        self._router = Router(self._routes)

    def handle(self, request: Request) -> Response:
        """Answer a request; never raises."""
        try:
            request.match = self._router.match(request.method, request.target)
        except APIError as exc:
            return error_response(exc, xml=not is_json_target(request.target))
        try:
            return self._disturbed(request)
        except Exception:
            return _internal_error(request)

    def _disturbed(self, request: Request) -> Response:
        hooks, num_entered = self._hooks, 0
        refusal = None
        for hook in hooks:
            num_entered += 1
            refusal = hook.before(request)
            if refusal is not None:
                break
        response = refusal or self.run(request)
        for hook in hooks[:num_entered][::-1]:
            response = hook.after(request, response)
        return response

    def finished(self, request: Request, response: Response) -> None:
        """Pass on that the last of a response is about to leave."""
        if self._last_hooks and hasattr(request, "match"):
            for hook in self._last_hooks:
                try:
                    hook.finished(request, response)
                except Exception:
                    _log.exception("%s of %s failed", hook, request.match.operation)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What watches or disturbs requests, the outermost first."""
        return self._hooks

    @hooks.setter
    def hooks(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks = hooks
        self._last_hooks = tuple(hook for hook in hooks if type(hook).finished != Hook.finished)

    def add_routes(self, routes: Iterable[Route]) -> None:
        """Serve further operations."""
        self._routes += tuple(routes)
        self._router = Router(self._routes)

    def opened(self, connection: Connection) -> None:
        """Count a new connection."""
        self.connections.add(connection)
        self.num_opened += 1

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)

    def run(self, request: Request) -> Response:
        """Run the handler of a request that has been matched, without the hooks."""
        try:
            with self.state.lock:
                return request.match.route.handler(self.state, request)
        except APIError as exc:
            return error_response(exc, xml=not request.match.url.is_json)
        except Exception:
            return _internal_error(request)


def _internal_error(request: Request) -> Response:
    """Log the exception that is being handled, and answer 500."""
    _log.exception("%s failed", request.match.operation)
    error = APIError(500, "internalError", "We encountered an internal error.")
    return error_response(error, xml=not request.match.url.is_json)
