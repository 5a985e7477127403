"""OpenTelemetry: metrics of stores, and spans of their operations and HTTP requests.

    from aioflux.integrations.opentelemetry import instrument

    instrument()  # after the providers of OpenTelemetry were set

`instrument` replaces methods of the store, so that nothing is added where it is not called. The
package needs OpenTelemetry: `pip install 'aioflux-storage[opentelemetry]'`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, Final

from aioflux import __version__
from aioflux._concurrency.async_iteration import aclosing_inner, rejects_plain_for
from aioflux._http import Pool
from aioflux._transfer import get_many as _get_many
from aioflux._transfer import session as _session
from aioflux._transfer.read import NO_ATTEMPT
from aioflux._transfer.session import Sessions, live_sessions
from aioflux._transfer.small_read_loop import Handover, SmallReadLoop
from aioflux.store import Store

try:
    from opentelemetry import context, metrics, trace
except ModuleNotFoundError as exc:
    if exc.name != "opentelemetry":
        raise
    from aioflux._values.distribution import pip_install

    raise ModuleNotFoundError(
        f"aioflux.integrations.opentelemetry needs OpenTelemetry: {pip_install('opentelemetry')}",
        name=exc.name,
    ) from exc

if TYPE_CHECKING:
    from aioflux._http import Origin, Response

__all__ = ["instrument", "uninstrument"]

_SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.23.1"
_COUNTERS: Final = {
    "num_requests": ("aioflux.requests", "{request}", "Attempts, with those that repeat one."),
    "num_retries": ("aioflux.retries", "{request}", "Attempts that repeat a request."),
    "num_throttled": ("aioflux.throttled", "{request}", "Attempts answered with 429 or 503."),
    "num_checksum_mismatches": ("aioflux.wrong_bytes", "{read}", "Reads of wrong bytes."),
    "bytes_received": ("aioflux.bytes.received", "By", "Bytes of bodies received."),
    "bytes_sent": ("aioflux.bytes.sent", "By", "Bytes of bodies sent."),
    "failures/": ("aioflux.failures", "{request}", "Failed attempts, by cause."),
}
"""Name, unit and description of the counter of a field of `StoreStats`."""
_LEVELS: Final = {
    "num_in_flight": ("aioflux.requests.in_flight", "{request}", "Requests in flight."),
    "max_in_flight": ("aioflux.requests.limit", "{request}", "Most requests in flight now."),
}
_NAMES: Final = {"get_batches": "get_many", "list_pages": "list", "put_batches": "put_many"}
"""Names of operations, for methods that other methods call."""
_NO_OPERATIONS: Final = {"aclose", "get_many", "fetch_composed", "list"}  # the last call others
_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_LABELS: Final = context.create_key("aioflux-labels")
_num_resends: ContextVar[int] = ContextVar("aioflux_num_resends", default=0)
_undo: Final[list[tuple[Any, str, Any]]] = []
"""Attributes that were replaced, with their old values."""


def instrument(
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
    *,
    request_durations: bool = False,
) -> None:
    """Report all stores of this process, also those that are open, to OpenTelemetry.

    Metrics are read from the statistics of the stores when they are collected, and cost no time in
    a request. An operation of a store has a span, and each of its HTTP requests a child span, if a
    provider of spans is set by now. Within a span that is not sampled, there are none.

    A forked process, such as a DataLoader worker, inherits this, and reports its own requests. A
    spawned one must call `instrument`, for example in `worker_init_fn`.

    Args:
        meter_provider: Provider of the metrics; the global one by default.
        tracer_provider: Provider of the spans; the global one by default.
        request_durations: Record the standard metric `http.client.request.duration`, which takes
            about 20 us of CPU time for each request, as much as a read of 1 KiB.

    Raises:
        RuntimeError: The process is instrumented already.
    """
    if _undo:
        raise RuntimeError("aioflux is instrumented already; call uninstrument() first")
    meter = metrics.get_meter(__name__, __version__, meter_provider, _SCHEMA_URL)
    provider = tracer_provider or trace.get_tracer_provider()
    has_spans = not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
    tracer = provider.get_tracer(__name__, __version__, _SCHEMA_URL) if has_spans else None
    histogram = None
    if request_durations:
        name, text = "http.client.request.duration", "Duration of HTTP client requests."
        create = partial(meter.create_histogram, explicit_bucket_boundaries_advisory=_BOUNDS)
        histogram = create(name, "s", text)
    _StoreMetrics(meter)
    if tracer is not None or histogram is not None:
        _Observer(tracer, histogram).install()


def uninstrument() -> None:
    """Undo `instrument`. Running operations still end their spans. A second call has no effect."""
    while _undo:
        setattr(*_undo.pop())


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace an attribute of a class or a module, until `uninstrument`."""
    plain = vars(owner)[name]
    _undo.append((owner, name, plain))
    setattr(owner, name, wrap(plain))


@lru_cache(maxsize=1)
def _labels_of(_pid: int) -> dict[str, Any]:
    """Return rank and worker of the current process, as far as they are known.

    Environment:
        RANK: The rank.
    """
    labels: dict[str, Any] = {}
    if (rank := os.environ.get("RANK", "")).isdecimal():
        labels["aioflux.rank"] = int(rank)
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)()
    if worker_info is not None:
        labels["aioflux.worker"] = worker_info.id
    return labels


class _StoreMetrics:
    """Metrics that are read from the statistics of stores, also of those that were closed."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._pid = os.getpid()
        self._closed: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._added: weakref.WeakSet[Sessions] = weakref.WeakSet()
        _replace(Sessions, "aclose", self._keeping_counts)
        for field, (name, unit, text) in _COUNTERS.items():
            meter.create_observable_counter(name, [partial(self._read, field)], unit, text)
        for field, (name, unit, text) in _LEVELS.items():
            read = partial(self._read, field)
            meter.create_observable_up_down_counter(name, [read], unit, text)

    def _keeping_counts(self, plain: Any) -> Any:
        async def aclose(sessions: Sessions, **settings: Any) -> None:
            await plain(sessions, **settings)
            if sessions not in self._added and sessions not in live_sessions():
                self._added.add(sessions)
                counts = Counter(sessions.stats().as_dict())
                for field in _LEVELS:
                    del counts[field]
                self._closed_here()[sessions.uri].update(counts)

        return aclose

    def _closed_here(self) -> defaultdict[str, Counter[str]]:
        """Return the counts of stores that this process, not its parent, has closed."""
        if os.getpid() != self._pid:
            self._pid, self._closed = os.getpid(), defaultdict(Counter)
        return self._closed

    def _read(self, field: str, _options: object) -> Iterator[metrics.Observation]:
        """Yield a field of `StoreStats` of each store, or all fields whose names begin so."""
        totals = defaultdict(Counter, {uri: +each for uri, each in self._closed_here().items()})
        for sessions in live_sessions():
            totals[sessions.uri].update(sessions.stats().as_dict())
        for uri, counts in totals.items() if _undo else ():
            labels = {"aioflux.store": uri, **_labels_of(os.getpid())}
            for name in [name for name in counts if name.startswith(field)]:
                cause = {"aioflux.cause": name.removeprefix(field)} if field.endswith("/") else {}
                yield metrics.Observation(counts[name], labels | cause)


class _Operation:
    """An operation of a store: its labels, and its span, which ends with the `with` block.

    No token of a context is kept: a blocking store opens and closes a writer in different tasks.
    """

    def __init__(
        self, tracer: trace.Tracer, store: Store, name: str, key: Any = None, *_: Any
    ) -> None:
        self._span = tracer.start_span(f"aioflux.{name}")
        self._context = self._outer = trace.set_span_in_context(self._span)
        labels = {"aioflux.store": store.uri, "aioflux.operation": name, **_labels_of(os.getpid())}
        self._context = context.set_value(_LABELS, labels, self._context)
        if self._span.is_recording():
            key = getattr(key, "key", key)
            of_key = {"aioflux.key": key} if key and isinstance(key, str) else {}
            self._span.set_attributes(labels | of_key)

    def attach(self) -> None:
        """Make the operation current, if it is not."""
        current = context.get_current()
        if current is not self._context:
            self._outer = current
            context.attach(self._context)

    def detach(self) -> None:
        """Make the context current in which `attach` was called."""
        context.attach(self._outer)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, GeneratorExit):  # an iteration that was left
            self._span.set_attribute("error.type", type(error).__qualname__)
            self._span.record_exception(error)
            self._span.set_status(trace.StatusCode.ERROR, str(error))
        self._span.end()


class _Observer:
    """Wrappers of the methods that start operations and send requests."""

    def __init__(self, tracer: trace.Tracer | None, durations: metrics.Histogram | None) -> None:
        self._tracer = tracer or trace.NoOpTracer()
        self._durations = durations

    def install(self) -> None:
        for name, method in tuple(vars(Store).items()):
            if name.startswith("_") or name in _NO_OPERATIONS or not inspect.isfunction(method):
                continue
            if name in {"open_writer", "open_reader"}:
                _replace(Store, name, partial(self._operation, self._context))
            elif inspect.iscoroutinefunction(method):
                _replace(Store, name, partial(self._operation, self._call))
            elif inspect.isasyncgenfunction(inspect.unwrap(method)):
                _replace(Store, name, partial(self._operation, self._iteration))
        _replace(Pool, "_exchange", self._exchange)
        _replace(_session, "with_retry", _numbering)
        _replace(_get_many, "SmallReadLoop", self._read_loop)

    def _observes_requests(self) -> bool:
        return self._durations is not None or trace.get_current_span().is_recording()

    def _operation(self, wrap: Callable[[str, Any], Any], plain: Any) -> Any:
        """Wrap a method, except for calls within a span that is not sampled."""
        name = _NAMES.get(plain.__name__, plain.__name__)
        observed, is_always = wrap(name, plain), self._durations is not None

        @wraps(plain)
        def call(store: Store, *arguments: Any, **settings: Any) -> Any:
            parent = trace.get_current_span()
            is_observed = is_always or parent is trace.INVALID_SPAN or parent.is_recording()
            return (observed if is_observed else plain)(store, *arguments, **settings)

        return call

    def _call(self, name: str, plain: Any) -> Any:
        async def call(store: Store, *arguments: Any, **settings: Any) -> Any:
            names = arguments[1:] if name == "upload_file" else arguments  # (path, key)
            operation = _Operation(self._tracer, store, name, *names)
            with operation:
                operation.attach()
                try:
                    return await plain(store, *arguments, **settings)
                finally:
                    operation.detach()

        return call

    def _iteration(self, name: str, plain: Any) -> Any:
        @rejects_plain_for
        @wraps(plain)
        async def iterate(store: Store, *arguments: Any, **settings: Any) -> AsyncGenerator[Any]:
            operation = _Operation(self._tracer, store, name, *arguments)
            with operation:
                async with aclosing_inner(plain(store, *arguments, **settings)) as items:
                    while True:
                        operation.attach()
                        try:
                            item = await anext(items)
                        except StopAsyncIteration:
                            return
                        finally:
                            operation.detach()  # the caller continues in the same context
                        yield item
                        del item

        return iterate

    def _context(self, name: str, plain: Any) -> Any:
        @asynccontextmanager
        async def opened(store: Store, *arguments: Any, **settings: Any) -> AsyncIterator[Any]:
            operation = _Operation(self._tracer, store, name, *arguments)
            with operation:
                operation.attach()
                try:
                    async with plain(store, *arguments, **settings) as value:
                        try:
                            yield value
                        finally:
                            operation.attach()
                finally:
                    operation.detach()

        return opened

    def _exchange(self, plain: Any) -> Any:
        """Wrap `Pool._exchange`: its arguments have no names, which costs less for each request."""
        is_always = self._durations is not None

        def exchange(*arguments: Any) -> Any:
            if is_always or trace.get_current_span().is_recording():
                return self._observe(plain(*arguments), arguments[1], arguments[4])
            return plain(*arguments)

        return exchange

    async def _observe(
        self, exchange: Awaitable[Response], origin: Origin, head: bytes
    ) -> Response:
        """Await the response to a request within a span, and record the duration."""
        method, target, _ = head.split(b" ", 2)
        attributes: dict[str, Any] = {
            "http.request.method": method.decode(),
            "server.address": origin.host,
            "server.port": origin.port,
        }
        span: trace.Span = trace.INVALID_SPAN
        if trace.get_current_span().is_recording():
            span = self._tracer.start_span(method.decode(), kind=trace.SpanKind.CLIENT)
            # Without the query, which may have a signature; a proxy gets the whole url.
            path = target.partition(b"?")[0].decode().removeprefix(origin.url)
            span.set_attribute("url.full", origin.url + path)
            if number := _num_resends.get():
                span.set_attribute("http.request.resend_count", number)
        started_at = time.perf_counter()
        try:
            response = await exchange
        except asyncio.CancelledError:  # such as a read ahead that is not used
            raise
        except BaseException as exc:
            attributes["error.type"] = type(exc).__qualname__
            raise
        else:
            attributes["http.response.status_code"] = response.status
            if response.status >= 400:
                attributes["error.type"] = str(response.status)
            return response
        finally:
            if self._durations is not None:
                labels: Any = context.get_value(_LABELS) or {}
                self._durations.record(time.perf_counter() - started_at, labels | attributes)
            if "error.type" in attributes:
                span.set_status(trace.StatusCode.ERROR)
            span.set_attributes(attributes)
            span.end()

    def _read_loop(self, plain: type[SmallReadLoop]) -> type[SmallReadLoop]:
        observes_requests = self._observes_requests

        class ObservedReadLoop(plain):  # type: ignore[valid-type,misc]
            """A loop that leaves items to coroutines if their requests are observed."""

            __slots__ = ()

            def start(self, index: int, item: object) -> Any:
                if observes_requests():
                    return index, Handover(item, self._budget.reserve(index), NO_ATTEMPT)
                return super().start(index, item)

        return ObservedReadLoop


def _numbering(plain: Any) -> Any:
    """Wrap `with_retry`, so that requests know how often they were sent before."""

    async def with_retry(attempt: Any, *arguments: Any, **settings: Any) -> Any:
        async def numbered(number: int) -> Any:
            token = _num_resends.set(number - 1)
            try:
                return await attempt(number)
            finally:
                _num_resends.reset(token)

        return await plain(numbered, *arguments, **settings)

    return with_retry
