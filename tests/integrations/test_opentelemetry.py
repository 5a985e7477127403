"""Spans and metrics of real requests, as the SDK of OpenTelemetry receives them."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import NotFoundError, RetryPolicy, Store
from aioflux.testing import GCSServer
from tests.servers.azurite import ACCOUNT

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import StatusCode

from aioflux.integrations.opentelemetry import instrument, uninstrument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler

    from tests.servers.azurite import Azurite
    from tests.servers.moto import Moto

URI = "gs://bucket/telemetry/"  # stores that other tests left open are counted too
OPERATION = {"aioflux.store": URI}


class Telemetry:
    """An SDK that keeps everything in memory."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.tracers.get_tracer("tests")

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the spans that have ended, in the order of their starts."""
        ended = self.exporter.get_finished_spans()
        spans = [span for span in ended if name in {"", span.name}]
        return sorted(spans, key=lambda span: span.start_time or 0)

    def edges(self) -> list[tuple[str, str]]:
        """Return the names of the parent and of the span, for each span."""
        names = {span.context.span_id: span.name for span in self.spans()}
        return [
            ("" if span.parent is None else names[span.parent.span_id], span.name)
            for span in self.spans()
        ]

    def points(self, name: str) -> list[Any]:
        """Return the points of a metric."""
        data = self.reader.get_metrics_data()
        scopes = [] if data is None else [s for r in data.resource_metrics for s in r.scope_metrics]
        metrics = [metric for scope in scopes for metric in scope.metrics if metric.name == name]
        return [point for metric in metrics for point in metric.data.data_points]

    def value(self, name: str, uri: str = URI) -> float:
        """Return the value of a metric of one store."""
        points = self.points(name)
        (value,) = [point.value for point in points if point.attributes["aioflux.store"] == uri]
        return value


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(vars(Store))
    yield
    uninstrument()
    assert dict(vars(Store)) == before


@contextmanager
def instrumented(
    sampler: Sampler = ALWAYS_ON, *, request_durations: bool = False
) -> Iterator[Telemetry]:
    telemetry = Telemetry(sampler)
    instrument(telemetry.meters, telemetry.tracers, request_durations=request_durations)
    try:
        yield telemetry
    finally:
        uninstrument()


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    with instrumented(request_durations=True) as telemetry:
        yield telemetry


def open_store(server: GCSServer, **options: Any) -> Store:
    return aioflux.open_store(URI, endpoint_url=server.url, **options)


# --- spans ------------------------------------


async def test_an_operation_has_a_span_and_its_request_a_child(
    server: GCSServer, telemetry: Telemetry
) -> None:
    async with open_store(server) as store:
        await store.put("a.bin", b"hello")
    assert telemetry.edges() == [("", "aioflux.put"), ("aioflux.put", "PUT")]
    operation, request = telemetry.spans()
    assert dict(operation.attributes or {}) == {
        "aioflux.store": URI,
        "aioflux.operation": "put",
        "aioflux.key": "a.bin",
    }
    port = int(server.url.rpartition(":")[2])
    assert dict(request.attributes or {}) == {
        "http.request.method": "PUT",
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": port,
        "url.full": f"{server.url}/bucket/telemetry/a.bin",
    }
    assert operation.status.status_code is request.status.status_code is StatusCode.UNSET


async def test_a_retried_503_is_two_requests_of_one_operation(
    server: GCSServer, telemetry: Telemetry
) -> None:
    async with open_store(server) as store:
        await store.put("retried.bin", b"hello")
        telemetry.exporter.clear()
        server.faults.add("objects.get", status=503, retry_after=0, times=1)
        assert await store.get("retried.bin") == b"hello"
        await store.get("retried.bin")
    edges = [("", "aioflux.get"), ("aioflux.get", "GET"), ("aioflux.get", "GET")]
    assert telemetry.edges() == [*edges, *edges[:2]]
    _, first, second, _, third = (dict(span.attributes or {}) for span in telemetry.spans())
    assert (first["http.response.status_code"], first["error.type"]) == (503, "503")
    assert "http.request.resend_count" not in first
    assert second["http.request.resend_count"] == 1
    assert "http.request.resend_count" not in third
    assert telemetry.spans()[1].status.status_code is StatusCode.ERROR
    assert telemetry.spans()[0].status.status_code is StatusCode.UNSET


async def test_an_error_is_recorded(server: GCSServer, telemetry: Telemetry) -> None:
    async with open_store(server) as store:
        with pytest.raises(NotFoundError):
            await store.head("missing.bin")
    (span,) = telemetry.spans("aioflux.head")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "NotFoundError"
    assert [event.name for event in span.events] == ["exception"]


async def test_a_lost_connection_is_recorded(server: GCSServer, telemetry: Telemetry) -> None:
    server.put("bucket", "telemetry/reset.bin", b"hello")
    server.faults.add("objects.get", reset=True, times=1)
    async with open_store(server) as store:
        await store.get("reset.bin")
    types = [(span.attributes or {}).get("error.type") for span in telemetry.spans("GET")]
    assert types == ["ConnectionLostError", None]


async def test_operations_of_parallel_tasks_have_their_own_requests(
    server: GCSServer, telemetry: Telemetry
) -> None:
    async with open_store(server) as store:
        await store.put_many((f"{n}.bin", b"x") for n in range(4))
        telemetry.exporter.clear()
        with telemetry.tracer.start_as_current_span("step"):
            await asyncio.gather(*(store.get(f"{n}.bin") for n in range(4)))
    assert sorted(telemetry.edges()) == sorted(
        [("", "step"), *[("step", "aioflux.get"), ("aioflux.get", "GET")] * 4]
    )
    gets = {span.context.span_id: span for span in telemetry.spans("aioflux.get")}
    for request in telemetry.spans("GET"):
        assert request.parent is not None
        key = (gets[request.parent.span_id].attributes or {})["aioflux.key"]
        assert str((request.attributes or {})["url.full"]).endswith(f"/telemetry/{key}")


async def test_an_iteration_is_current_only_while_it_is_awaited(
    server: GCSServer, telemetry: Telemetry
) -> None:
    async with open_store(server) as store:
        await store.put_many((f"{n}.bin", b"x") for n in range(3))
        telemetry.exporter.clear()
        async for key, _ in store.get_many([f"{n}.bin" for n in range(3)] * 30):
            if key == "0.bin":
                with telemetry.tracer.start_as_current_span("consumer"):
                    pass
    assert set(telemetry.edges()) == {
        ("", "aioflux.get_many"),
        ("", "consumer"),
        ("aioflux.get_many", "GET"),
    }
    assert len(telemetry.spans("GET")) == 90


async def test_a_listing_that_is_left_is_no_error(server: GCSServer, telemetry: Telemetry) -> None:
    async with open_store(server) as store:
        await store.put("a.bin", b"x")
        pages = store.list_pages()
        assert len(await anext(pages)) >= 1
        await pages.aclose()
        with pytest.raises(TypeError, match="asynchronous"):
            iter(store.list_pages())  # type: ignore[call-overload]
    (span,) = telemetry.spans("aioflux.list")
    assert span.status.status_code is StatusCode.UNSET


async def test_the_requests_of_a_writer_and_a_reader_belong_to_them(
    server: GCSServer, telemetry: Telemetry
) -> None:
    async with open_store(server) as store:
        async with store.open_writer("w.bin") as writer:
            await writer.write(b"hello")
        async with store.open_reader("w.bin") as reader:
            assert await reader.read() == b"hello"
        await store.head("w.bin")
    assert telemetry.edges() == [
        ("", "aioflux.open_writer"),
        ("aioflux.open_writer", "PUT"),
        ("", "aioflux.open_reader"),
        ("aioflux.open_reader", "GET"),
        ("aioflux.open_reader", "GET"),
        ("", "aioflux.head"),
        ("aioflux.head", "GET"),
    ]


def test_spans_of_a_blocking_store_have_the_span_of_their_thread_as_parent(
    server: GCSServer, telemetry: Telemetry
) -> None:
    with (
        aioflux.sync.open_store(URI, endpoint_url=server.url) as store,
        telemetry.tracer.start_as_current_span("step"),
    ):
        with store.open_writer("s.bin") as writer:
            writer.write(b"hello")
        assert store.get("s.bin") == b"hello"
        assert dict(store.get_many(["s.bin"])) == {"s.bin": b"hello"}
    assert telemetry.edges() == [
        ("", "step"),
        ("step", "aioflux.open_writer"),
        ("aioflux.open_writer", "PUT"),
        ("step", "aioflux.get"),
        ("aioflux.get", "GET"),
        ("step", "aioflux.get_many"),
        ("aioflux.get_many", "GET"),
    ]


async def test_spans_of_a_store_without_http_have_no_children(telemetry: Telemetry) -> None:
    async with aioflux.open_store("memory://telemetry") as store:
        await store.put("a.bin", b"x")
        copied = await store.move("a.bin", "b.bin")
    assert copied.key == "b.bin"
    assert telemetry.edges() == [
        ("", "aioflux.put"),
        ("", "aioflux.move"),
        ("aioflux.move", "aioflux.head"),
        ("aioflux.move", "aioflux.copy"),
        ("aioflux.move", "aioflux.delete"),
    ]


@pytest.mark.parametrize("inherits", [True, False], ids=["in a span", "alone"])
async def test_an_operation_that_is_not_sampled_has_no_spans(
    server: GCSServer, *, inherits: bool
) -> None:
    with instrumented(ParentBased(ALWAYS_OFF)) as telemetry:
        async with open_store(server) as store:
            await store.put("a.bin", b"x")
            if inherits:
                with telemetry.tracer.start_as_current_span("step"):
                    await store.get("a.bin")
            else:
                await store.get("a.bin")
            assert [key async for key, _ in store.get_many(["a.bin"])] == ["a.bin"]
        assert telemetry.spans() == []
        assert telemetry.value("aioflux.requests") == 3


def test_each_asynchronous_method_is_an_operation() -> None:
    before = dict(vars(Store))
    with instrumented():
        wrapped = {name for name, method in vars(Store).items() if method is not before.get(name)}
    methods = {
        name
        for name, method in before.items()
        if not name.startswith("_")
        and inspect.isfunction(method)
        and (
            inspect.iscoroutinefunction(method)
            or inspect.isasyncgenfunction(inspect.unwrap(method))
        )
    }
    assert methods - wrapped == {"aclose", "fetch_composed", "get_many", "list"}
    assert {"get", "put", "copy", "list_pages", "get_batches", "open_writer"} <= wrapped


# --- metrics ----------------------------------


async def test_counts_of_all_stores_are_added_up(server: GCSServer, telemetry: Telemetry) -> None:
    for _ in range(2):
        async with open_store(server) as store:
            server.faults.add("objects.insert", status=503, retry_after=0, times=1)
            await store.put("a.bin", bytes(1000))
            await store.get("a.bin")
    async with open_store(server) as store:
        await store.get("a.bin")
        assert telemetry.value("aioflux.requests.limit") == store.transfer.max_in_flight
        assert telemetry.value("aioflux.requests.in_flight") == 0
    assert telemetry.value("aioflux.requests") == 7
    assert telemetry.value("aioflux.retries") == 2
    assert telemetry.value("aioflux.throttled") == 2
    assert telemetry.value("aioflux.bytes.sent") == 2000
    assert telemetry.value("aioflux.bytes.received") == 3000
    points = telemetry.points("aioflux.failures")
    (failures,) = [point for point in points if point.attributes["aioflux.store"] == URI]
    assert failures.attributes["aioflux.cause"] == "HTTP 503"
    assert failures.value == 2
    await store.aclose()
    assert telemetry.value("aioflux.requests") == 7


async def test_wrong_bytes_are_counted(server: GCSServer, telemetry: Telemetry) -> None:
    async with open_store(server) as store:
        await store.put("flipped.bin", bytes(1000))
        server.faults.add("objects.get", flip_at=10, times=1)
        assert await store.get("flipped.bin") == bytes(1000)
        assert telemetry.value("aioflux.wrong_bytes") == 1


async def test_durations_of_requests_follow_the_convention(
    server: GCSServer, telemetry: Telemetry
) -> None:
    async with open_store(server) as store:
        await store.put("a.bin", b"x")
        with pytest.raises(NotFoundError):
            await store.get("missing.bin")
        assert [key async for key, _ in store.get_many(["a.bin"] * 20)] == ["a.bin"] * 20
    points = {
        (
            point.attributes["aioflux.operation"],
            point.attributes["http.response.status_code"],
        ): point
        for point in telemetry.points("http.client.request.duration")
    }
    assert {labels: point.count for labels, point in points.items()} == {
        ("put", 200): 1,
        ("get", 404): 1,
        ("get_many", 206): 20,
    }
    assert points["get", 404].attributes["error.type"] == "404"
    assert points["put", 200].attributes["server.address"] == "127.0.0.1"
    assert points["put", 200].explicit_bounds[0] == 0.005


async def test_only_the_durations_are_recorded_without_a_provider_of_spans(
    server: GCSServer,
) -> None:
    telemetry = Telemetry()
    instrument(telemetry.meters, request_durations=True)
    async with open_store(server) as store:
        await store.put("a.bin", b"x")
    uninstrument()
    (point,) = telemetry.points("http.client.request.duration")
    assert point.count == 1
    assert telemetry.spans() == []


def test_metrics_alone_replace_nothing_on_the_way_of_a_request() -> None:
    before = dict(vars(Store))
    instrument(Telemetry().meters)
    assert dict(vars(Store)) == before


# --- rank, worker, processes ------------------


def run_in_worker(url: str) -> dict[str, Any]:
    from torch.utils.data import DataLoader

    telemetry = Telemetry()
    instrument(telemetry.meters, telemetry.tracers)
    with aioflux.sync.open_store(URI, endpoint_url=url) as store:
        store.put("a.bin", b"x")
        telemetry.exporter.clear()

        class Items:
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> list[Any]:
                store.get("a.bin")
                points = telemetry.points("aioflux.requests")
                spans = [dict(span.attributes or {}) for span in telemetry.spans("aioflux.get")]
                return [[(dict(point.attributes), point.value) for point in points], spans]

        loader = DataLoader(Items(), num_workers=2, batch_size=None, multiprocessing_context="fork")  # type: ignore[arg-type]
        return {"workers": list(loader), "parent": telemetry.value("aioflux.requests")}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_reports_its_own_requests(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        result = executor.submit(run_in_worker, server.url).result()
    assert result["parent"] == 1
    for worker, (points, spans) in enumerate(result["workers"]):
        labels = {"aioflux.store": URI, "aioflux.rank": 3, "aioflux.worker": worker}
        assert points == [[labels, 1]]
        assert spans == [{**labels, "aioflux.operation": "get", "aioflux.key": "a.bin"}]


# --- secrets ----------------------------------


def texts_of(telemetry: Telemetry) -> str:
    return "".join(span.to_json() for span in telemetry.spans())


async def test_no_attribute_has_a_token(server: GCSServer, telemetry: Telemetry) -> None:
    credentials = secret_token
    async with open_store(
        server, credentials=credentials, retry=RetryPolicy(max_attempts=1)
    ) as store:
        await store.put("a.bin", b"x")
        with pytest.raises(NotFoundError):
            await store.get("missing.bin")
    assert len(telemetry.spans()) == 4
    assert "secret-token" not in texts_of(telemetry)


def secret_token() -> str:
    return "secret-token-of-the-tests"


async def test_no_attribute_of_s3_has_a_signature(moto: Moto, telemetry: Telemetry) -> None:
    access = aioflux.S3Access(
        credentials=lambda: ("AKIDEXAMPLE", "secret-key-of-tests"), region="us-east-1"
    )
    async with aioflux.open_store(
        "s3://bucket/otel", credentials=access, endpoint_url=moto.url
    ) as store:
        await store.put("a.bin", b"x")
        assert await store.get("a.bin") == b"x"
        url = await store.sign("a.bin", expires=60)
    assert telemetry.spans("GET")
    assert "Signature" not in texts_of(telemetry)
    assert url.rpartition("=")[2] not in texts_of(telemetry)


async def test_no_attribute_has_a_query(server: GCSServer, telemetry: Telemetry) -> None:
    async with open_store(server) as store:
        await store.list_all("a")
    (span,) = telemetry.spans("GET")
    assert (span.attributes or {})["url.full"] == f"{server.url}/storage/v1/b/bucket/o"


async def test_no_attribute_of_azure_has_a_sas(azurite: Azurite, telemetry: Telemetry) -> None:
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    sas = generate_account_sas(
        ACCOUNT,
        azurite.key,
        ResourceTypes(object=True, container=True),
        AccountSasPermissions(read=True, write=True, create=True),
        datetime.now(UTC) + timedelta(hours=1),
    )
    async with aioflux.open_store(
        f"az://{ACCOUNT}/container/otel", credentials=sas, endpoint_url=f"{azurite.url}/{ACCOUNT}"
    ) as store:
        await store.put("a.bin", b"x")
        assert await store.get("a.bin") == b"x"
    assert telemetry.spans("PUT")
    assert "sig=" not in texts_of(telemetry)


# --- the way back -----------------------------


def test_a_second_instrument_is_an_error() -> None:
    with instrumented(), pytest.raises(RuntimeError, match="instrumented already"):
        instrument()


async def test_nothing_is_reported_after_uninstrument(server: GCSServer) -> None:
    with instrumented() as telemetry:
        pass
    async with open_store(server) as store:
        await store.put("a.bin", b"x")
    assert telemetry.spans() == []
    assert telemetry.points("aioflux.requests") == []


def test_the_error_without_opentelemetry_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None; import aioflux.integrations.opentelemetry"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'aioflux-storage[opentelemetry]'" in ended.stderr
