"""`get_many` through the small-read loop, and through coroutines: the results are the same.

A scenario is run twice, each time on a service of its own that returns the scripted responses. The
first service has an idle connection for each read, so that the loop reads; the second has none, so
that coroutines read.
"""

from __future__ import annotations

import asyncio
import gc
import os
import uuid
import weakref
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from google.auth.credentials import AnonymousCredentials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aioflux
from aioflux import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    RetryPolicy,
    StorageError,
    TransferOptions,
    TransientError,
)
from aioflux.testing import GCSServer
from aioflux.testing.faults import Fault
from tests.transfer.clock import clock_of_this_loop
from tests.transfer.fake_service import (
    FIRST_BYTES,
    FakeService,
    Reading,
    answer_all,
    counts,
    filled,
    settle,
)
from tests.transfer.scripted_service import RETRY, pattern

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from aioflux._services.base import Body, ReadRequest
    from aioflux.store import Store
    from tests.transfer.clock import Clock

THROTTLED = TransientError("slow down", status=503)
is_ordered = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])


@pytest.fixture
def fake() -> FakeService:
    return FakeService(f"fake-{uuid.uuid4().hex}")


# --- equal results -------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """One response to a read.

    Attributes:
        error: Error in place of the object.
        flips: Whether a byte is wrong.
        size: Length of the body, if it ends early without an error.
        is_lost: Whether the connection is lost before the response.
        is_stale: Whether it was lost before the request; the service repeats the request.
        delay: Seconds until the response.
        replaced_by: What another writer writes after the response.
    """

    error: Exception | None = None
    flips: bool = False
    size: int | None = None
    is_lost: bool = False
    is_stale: bool = False
    delay: float = 0.0
    replaced_by: bytes | None = None

    def apply(self, body: Body) -> Body:
        if self.error is not None:
            raise self.error
        if not self.flips and self.size is None:
            return body
        view = memoryview(body.data)
        data = bytearray(view) if view.readonly else view
        if self.flips:
            data[3] ^= 1
        return replace(body, data=(bytes(data) if view.readonly else data)[: self.size])


class ServiceOfResponses(FakeService):
    """A service that returns scripted responses; after them, the stored objects."""

    def __init__(self, responses: dict[str, Sequence[Response]], *, reads_by_loop: bool) -> None:
        super().__init__(f"fake-{uuid.uuid4().hex}")
        self.is_full = not reads_by_loop
        self.held: dict[object, int] = {}
        self.max_held = self.max_requests = 0
        self._responses = {key: deque(each) for key, each in responses.items()}

    def _next(self, key: str) -> Response:
        responses = self._responses.get(key)
        return responses.popleft() if responses else Response()

    def _hold(self, read: object, request: ReadRequest) -> None:
        self.held[read] = (request.end or 0) - request.start
        self.max_held = max(self.max_held, sum(self.held.values()))
        self.max_requests = max(self.max_requests, len(self.held))

    def _replace(self, key: str, response: Response) -> None:
        if response.replaced_by is not None:
            self.store(key, response.replaced_by)

    def begin_get(self, request: ReadRequest, waiter: Any) -> Any:
        read = super().begin_get(request, waiter)
        if read is not None:
            self._hold(read, request)
            response = self._next(request.key)
            asyncio.get_running_loop().call_later(response.delay, self._respond, read, response)
        return read

    def _respond(self, read: Any, response: Response) -> None:
        if self.held.pop(read, None) is None:
            return  # aborted
        key = read.request.key
        if response.is_lost or response.is_stale:
            self.lose(key, is_stale=response.is_stale)
        else:
            self.answer(key, change=response.apply)
        self._replace(key, response)

    def abort_get(self, exchange: Any) -> None:
        self.held.pop(exchange)
        super().abort_get(exchange)

    async def get(self, request: ReadRequest, **options: Any) -> Body:
        read = object()
        self._hold(read, request)
        try:
            response = Response(is_stale=True)
            while response.is_stale:
                response = self._next(request.key)
                await asyncio.sleep(response.delay)
            if response.is_lost:
                raise TransientError("the connection was lost", uri=self.uri(request.key))
            body = response.apply(await super().get(request, **options))
            self._replace(request.key, response)
            return body
        finally:
            del self.held[read]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Objects, responses, and the consumer of one iteration.

    Attributes:
        sizes: Size of each object.
        responses: Responses to the first reads of a key.
        num_gets: Number of reads that the loop hands over to coroutines; None if it may vary.
        items: Makes the argument of `get_many` from the keys or metadata.
        stop_after: Number of objects after which the consumer stops.
        cancel_after: Seconds after which the consumer is cancelled.
        max_seconds: Longest duration.
        min_seconds: Shortest duration.
        is_by: Whether items are keys ("name"), metadata ("meta"), or one after the other ("both").
    """

    sizes: dict[str, int] = field(
        default_factory=lambda: {f"k{at:02}": 100 + at for at in range(12)}
    )
    responses: dict[str, Sequence[Response]] = field(default_factory=dict)
    num_gets: int | None = 0
    items: Callable[[list[Any]], Any] = list
    options: dict[str, Any] = field(default_factory=dict)
    retry: RetryPolicy = RETRY
    progress: Callable[[aioflux.Progress], None] | None = None
    stop_after: int = 10**6
    cancel_after: float | None = None
    error: type[BaseException] | None = None
    min_seconds: float = 0.0
    max_seconds: float = 0.01
    is_by: str = "both"


@dataclass
class Outcome:
    """What the caller sees of one iteration."""

    pairs: list[tuple[str, bytes]] = field(default_factory=list)
    error: tuple[object, ...] = ()
    statistics: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


async def outcome_of(
    scenario: Scenario, service: ServiceOfResponses, *, ordered: bool, by_name: bool
) -> Outcome:
    """Run a scenario, and check the limits and that nothing is held after it."""
    metas = [
        service.store(key, pattern(size, seed=at + 1))
        for at, (key, size) in enumerate(scenario.sizes.items())
    ]
    store = service.open(retry=scenario.retry, progress=scenario.progress, **scenario.options)
    items = scenario.items([meta.key for meta in metas] if by_name else metas)
    outcome, loop, tasks = Outcome(), asyncio.get_running_loop(), asyncio.all_tasks()
    started_at = loop.time()

    async def consume() -> None:
        async with aclosing(store.get_batches(items, ordered=ordered)) as batches:
            async for batch in batches:
                outcome.pairs += [(key, bytes(data)) for key, data in batch]
                if len(outcome.pairs) >= scenario.stop_after:
                    break

    task = asyncio.create_task(consume())
    if scenario.cancel_after is not None:
        loop.call_later(scenario.cancel_after, task.cancel)
    try:
        await task
    except BaseException as exc:
        texts = [str(exc), str(getattr(exc, "uri", ""))]
        texts = [text.replace(service.uri(""), "") for text in texts]
        outcome.error = (type(exc), *texts, getattr(exc, "status", None))
    outcome.seconds = loop.time() - started_at
    stats = store.stats
    outcome.statistics = counts(store) | {
        "sent": stats.bytes_sent,
        "received": stats.bytes_received,
    }
    assert service.max_requests <= store.transfer.max_in_flight
    assert service.max_held <= store.transfer.max_in_flight_bytes
    assert not service.under_way
    assert not service.held
    assert asyncio.all_tasks() == tasks
    assert store.is_clean()
    return outcome


def refusal(status: int, kind: type[StorageError] = TransientError, **fields: Any) -> Response:
    return Response(error=kind(f"status {status}", status=status, **fields))


def then(error: BaseException) -> Callable[[list[Any]], Iterator[Any]]:
    def items(given: list[Any]) -> Iterator[Any]:
        yield from given
        raise error

    return items


def from_async(given: list[Any]) -> AsyncIterator[Any]:
    async def items() -> AsyncIterator[Any]:
        for item in given:
            await asyncio.sleep(0)
            yield item

    return items()


def with_item(item: object) -> Callable[[list[Any]], list[Any]]:
    return lambda given: [*given[:5], item, *given[5:]]


def raises_at(key: str, error: type[BaseException]) -> Callable[[aioflux.Progress], None]:
    def progress(report: aioflux.Progress) -> None:
        if report.uri.endswith(key):
            raise error("mine")

    return progress


def with_old_generation(metas: list[aioflux.ObjectMeta]) -> list[aioflux.ObjectMeta]:
    return [*metas[:5], replace(metas[5], generation="1"), *metas[6:]]


BIG = FIRST_BYTES + 70_000
TEN = {f"k{at:02}": 300_000 for at in range(10)}
WRONG = Response(flips=True)
LATE = Response(delay=3600)

SCENARIOS = {
    "success": Scenario(),
    "sizes": Scenario(sizes={"a": 1, "b": 70_000, "c": FIRST_BYTES - 1, "d": 7}),
    "no items": Scenario(sizes={}),
    "asynchronous items": Scenario(items=from_async),
    "slow responses": Scenario(
        responses={f"k{at:02}": [Response(delay=1 + at * 7 % 5)] for at in range(12)},
        min_seconds=3, max_seconds=30,
    ),
    "missing object": Scenario(items=with_item("missing"), error=NotFoundError),
    "replaced object": Scenario(items=with_old_generation, error=NotFoundError, is_by="meta"),
    "empty object": Scenario(sizes={"a": 5, "b": 0, "c": 5}, is_by="name"),
    "listed empty object": Scenario(sizes={"a": 5, "b": 0, "c": 5}, is_by="meta"),
    "large object": Scenario(sizes={"a": 5, "b": BIG, "c": 5}, num_gets=1, is_by="name"),
    "listed large object": Scenario(sizes={"a": 5, "b": 2 * BIG}, num_gets=2, is_by="meta"),
    "large object that is replaced": Scenario(
        sizes={"a": BIG}, responses={"a": [Response(replaced_by=pattern(BIG - 9, seed=7))]},
        num_gets=3, is_by="name",
    ),
    "503 once": Scenario(responses={"k03": [refusal(503)]}, num_gets=1),
    "429 with a delay": Scenario(
        responses={"k03": [refusal(429, retry_after_seconds=2)]},
        num_gets=1, min_seconds=2, max_seconds=2.5,
    ),
    "503 for good": Scenario(
        sizes={"a": 100}, responses={"a": [refusal(503)] * 4}, num_gets=3, error=TransientError
    ),
    "503 of many": Scenario(
        responses={f"k{at:02}": [refusal(503)] for at in range(0, 12, 3)}, num_gets=4
    ),
    "403": Scenario(responses={"k03": [refusal(403, PermissionDeniedError)]},
        error=PermissionDeniedError),
    "418": Scenario(responses={"k03": [refusal(418, StorageError)]}, error=StorageError),
    "wrong bytes once": Scenario(responses={"k03": [WRONG]}, num_gets=1),
    "wrong bytes twice": Scenario(responses={"k03": [WRONG] * 2}, num_gets=2),
    "wrong bytes for good": Scenario(
        sizes={"a": 100}, responses={"a": [WRONG] * 3}, num_gets=2, error=ChecksumError
    ),
    "short body": Scenario(responses={"k03": [Response(size=50)]}, num_gets=1),
    "reset": Scenario(responses={"k03": [Response(is_lost=True)]}, num_gets=1),
    "stale connection": Scenario(responses={"k03": [Response(is_stale=True)]}, num_gets=1),
    "broken body": Scenario(
        responses={"k03": [refusal(200, num_bytes_received=7)]}, num_gets=1
    ),
    "invalid key": Scenario(items=with_item("a\nb"), num_gets=1, error=ValueError),
    "empty key": Scenario(items=with_item(""), error=ValueError),
    "surrogate key": Scenario(items=with_item("\ud800"), num_gets=1, error=UnicodeEncodeError),
    "no key": Scenario(items=with_item(5), error=TypeError),
    "iterator that raises": Scenario(items=then(KeyError("mine")), error=KeyError),
    "iterator that is cancelled": Scenario(
        items=then(asyncio.CancelledError()), error=asyncio.CancelledError
    ),
    "iterator that exits": Scenario(items=then(GeneratorExit()), error=RuntimeError),
    "hook that raises": Scenario(progress=raises_at("k03", ZeroDivisionError),
        error=ZeroDivisionError),
    "hook that exits": Scenario(progress=raises_at("k03", SystemExit), error=RuntimeError),
    "hook of a broken body": Scenario(
        responses={"k03": [refusal(200, num_bytes_received=7)]},
        progress=raises_at("k03", ZeroDivisionError), error=ZeroDivisionError,
    ),
    "consumer that stops": Scenario(stop_after=3),
    "cancelled consumer": Scenario(
        responses={"k03": [LATE]}, cancel_after=5, error=asyncio.CancelledError,
        min_seconds=5, max_seconds=5.01,
    ),
    "deadline": Scenario(
        responses={"k03": [LATE]}, retry=RetryPolicy(deadline_seconds=2),
        error=TransientError, min_seconds=2, max_seconds=2.01,
    ),
    "deadline of each read": Scenario(
        responses={f"k{at:02}": [Response(delay=0.9)] for at in range(12)},
        retry=RetryPolicy(deadline_seconds=1), options={"max_in_flight": 2},
        min_seconds=5.4, max_seconds=5.41,
    ),
    "deadline of a retry": Scenario(
        sizes={"a": 100}, retry=RetryPolicy(deadline_seconds=2),
        responses={"a": [replace(refusal(503, retry_after_seconds=1), delay=1.5)]},
        num_gets=0, error=TransientError, min_seconds=1.5, max_seconds=2.01,
    ),
    "one request": Scenario(options={"max_in_flight": 1}),
    "byte budget": Scenario(
        num_gets=None,
        sizes=TEN, options={"max_in_flight_bytes": 1_000_000, "range_size_bytes": 400_000}
    ),
}  # fmt: skip
CASES = [
    pytest.param(scenario, by == "name", id=f"{name}-by {by}")
    for name, scenario in SCENARIOS.items()
    for by in ("name", "meta")
    if scenario.is_by in {by, "both"}
]


@is_ordered
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("scenario", "by_name"), CASES)
async def test_the_loop_gives_the_same_results_as_coroutines(
    scenario: Scenario, *, by_name: bool, ordered: bool
) -> None:
    by_loop = ServiceOfResponses(scenario.responses, reads_by_loop=True)
    by_coroutines = ServiceOfResponses(scenario.responses, reads_by_loop=False)
    outcome = await outcome_of(scenario, by_loop, ordered=ordered, by_name=by_name)
    expected = await outcome_of(scenario, by_coroutines, ordered=ordered, by_name=by_name)
    is_whole = scenario.error is None and scenario.stop_after > len(scenario.sizes)
    if ordered or is_whole:
        count = scenario.stop_after
        assert outcome.pairs[:count] == expected.pairs[:count] or not ordered
        assert sorted(outcome.pairs)[:count] == sorted(expected.pairs)[:count]
    if is_whole:
        assert len(outcome.pairs) == len(scenario.sizes)
    if (is_whole or len(scenario.sizes) == 1) and scenario.num_gets is not None:
        assert outcome.statistics == expected.statistics
    assert outcome.error == expected.error
    assert [scenario.error] == [*outcome.error[:1], None][:1]
    for seconds in (outcome.seconds, expected.seconds):
        assert scenario.min_seconds <= seconds <= scenario.max_seconds
    assert scenario.num_gets in {len(by_loop.gets), None}
    assert by_loop.begun or not scenario.sizes
    assert not by_coroutines.begun


random_responses = st.lists(
    st.sampled_from(
        [
            Response(),
            Response(delay=3),
            Response(flips=True),
            Response(size=1),
            Response(is_lost=True),
            Response(is_stale=True, delay=1),
            refusal(503),
            refusal(429, retry_after_seconds=1),
        ]
    ),
    max_size=2,
)


@settings(max_examples=60, deadline=None)
@given(
    objects=st.lists(
        st.tuples(st.sampled_from([0, 10, 900, 5_000, FIRST_BYTES, BIG]), random_responses),
        max_size=20,
    ),
    max_in_flight=st.integers(1, 6),
    budget=st.sampled_from([BIG, 2 * BIG, 10 * BIG]),
    by_name=st.booleans(),
    ordered=st.booleans(),
)
def test_random_responses_give_the_same_results(
    objects: list[tuple[int, list[Response]]],
    max_in_flight: int,
    budget: int,
    *,
    by_name: bool,
    ordered: bool,
) -> None:
    """Every read succeeds: of four attempts, at most two fail."""
    scenario = Scenario(
        sizes={f"k{at:02}": size for at, (size, _) in enumerate(objects)},
        responses={
            # A byte can be wrong in a body that has four.
            f"k{at:02}": responses if size else []
            for at, (size, responses) in enumerate(objects)
        },
        options={"max_in_flight": max_in_flight, "max_in_flight_bytes": budget},
    )

    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            clock_of_this_loop(patch)
            by_loop = ServiceOfResponses(scenario.responses, reads_by_loop=True)
            by_coroutines = ServiceOfResponses(scenario.responses, reads_by_loop=False)
            outcome = await outcome_of(scenario, by_loop, ordered=ordered, by_name=by_name)
            expected = await outcome_of(scenario, by_coroutines, ordered=ordered, by_name=by_name)
            assert (outcome.error, expected.error) == ((), ())
            assert outcome.pairs == expected.pairs or not ordered
            assert sorted(outcome.pairs) == sorted(expected.pairs)
            assert len(outcome.pairs) == len(objects)

    asyncio.run(run())


# --- what only the loop does ---------------------------------------------------------------


async def test_the_next_item_starts_when_a_response_arrives(fake: FakeService) -> None:
    """No task has to run between the two."""
    filled(fake, "abcdefgh")
    reading = Reading(fake.open(), list("abcdefgh"))
    await settle()
    assert fake.begun == ["a", "b", "c", "d"]
    fake.answer("b")
    assert fake.begun == ["a", "b", "c", "d", "e"]
    fake.answer("e", "a")
    assert fake.begun[5:] == ["f", "g"]
    await answer_all(fake, reading)
    assert reading.keys == list("abcdefgh")


async def test_unordered_results_are_yielded_as_they_arrive(fake: FakeService) -> None:
    filled(fake, "abcd")
    reading = Reading(fake.open(), list("abcd"), ordered=False)
    await settle()
    fake.answer("c", "a")
    await settle()
    assert reading.keys == ["c", "a"]
    await answer_all(fake, reading)


async def test_a_slow_consumer_delays_the_reads(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(50)))
    requested: list[str] = []

    def keys() -> Iterator[str]:
        for key in stored:
            requested.append(key)
            yield key

    gate = asyncio.Event()
    reading = Reading(fake.open(), keys(), gate=gate)
    await settle()
    for _ in range(20):
        fake.answer(*fake.under_way)
        await settle()
    assert len(requested) <= 3 * 4 + 1
    assert not fake.under_way
    gate.set()
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())


async def test_unread_results_count_against_the_byte_budget(fake: FakeService) -> None:
    """Three objects of 300 kB fit into a budget of 1 MB."""
    stored = filled(fake, (f"k{at}" for at in range(12)), size=300_000)
    metas = [fake.bucket.objects[key].meta for key in stored]
    gate = asyncio.Event()
    reading = Reading(fake.open(max_in_flight_bytes=1_000_000), metas, gate=gate)
    for _ in range(20):
        await settle()
        fake.answer(*fake.under_way)
    assert len(fake.begun) + len(fake.gets) <= 4
    gate.set()
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_other_calls_of_the_store_are_not_starved(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(40)))
    store = fake.open()
    first, second = Reading(store, list(stored)[:20]), Reading(store, list(stored)[20:])
    await settle()
    head = asyncio.create_task(store.head("k000"))
    await settle()
    assert not head.done()
    while not head.done():
        fake.answer(fake.begun[-4])
        await settle()
    assert len(fake.begun) < 12
    await answer_all(fake, first)
    await answer_all(fake, second)
    assert first.got + second.got == list(stored.items())
    assert fake.max_under_way == 4
    assert fake.gets == []
    assert first.is_clean()


async def test_before_a_size_is_known_a_coroutine_reads(fake: FakeService) -> None:
    stored = filled(fake, "abcdef")
    reading = Reading(fake.open(is_warm=False, max_in_flight=1), list(stored))
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert (len(fake.gets), len(fake.begun)) == (1, 5)


@pytest.mark.parametrize("generation", ["1", ""], ids=["generation", "no generation"])
async def test_an_empty_object_costs_two_requests_at_most(
    fake: FakeService, generation: str
) -> None:
    fake.store("a", b"")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a", change=lambda body: replace(body, generation=generation))
    await reading.task
    assert reading.got == [("a", b"")]
    assert fake.gets == []
    assert counts(reading.store) == {"requests": 1 if generation else 2}
    assert reading.is_clean()


async def test_a_response_without_the_needed_headers_is_requested_again(fake: FakeService) -> None:
    stored = filled(fake, "a")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a", change=lambda _: None)
    await reading.task
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_after_a_401_a_coroutine_reads_with_a_new_token(fake: FakeService) -> None:
    stored = filled(fake, "a")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.refuse("a", PermissionDeniedError("no such token", status=401))
    await reading.task
    assert reading.got == list(stored.items())
    assert len(fake.gets) == 1
    assert reading.is_clean()


async def test_the_limit_halves_under_pressure_and_grows_back(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(60)))
    store = fake.open(max_in_flight=8)
    reading = Reading(store, list(stored))
    await settle()
    assert len(fake.under_way) == 8
    for key in list(fake.under_way)[:3]:  # all sent before the first cut: one cut
        fake.refuse(key, THROTTLED)
    await settle()
    fake.answer(*fake.under_way)
    await settle()
    assert len(fake.under_way) in {4, 5}
    num_requests = []
    while not reading.task.done():
        num_requests.append(len(fake.under_way))
        fake.answer(*fake.under_way)
        await settle()
    assert max(num_requests) == 8
    assert reading.got == list(stored.items())
    assert len(fake.gets) == 3  # the rest needs no coroutine, in spite of the lower limit
    assert reading.is_clean()


async def test_metadata_without_a_key_fails_in_its_turn(fake: FakeService) -> None:
    stored = filled(fake, "ab")
    odd: Any = replace(fake.bucket.objects["b"].meta, key=None)
    reading = Reading(fake.open(), ["a", odd])
    await settle()
    fake.answer("a")
    with pytest.raises(TypeError):
        await reading.task
    assert reading.got == [("a", stored["a"])]
    assert reading.is_clean()


async def test_an_iterator_that_raises_is_not_called_again(fake: FakeService) -> None:
    stored = filled(fake, "abcdef")
    num_calls = 0

    class Keys:
        def __iter__(self) -> Keys:
            return self

        def __next__(self) -> str:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 6:
                raise KeyError("mine")
            return list(stored)[num_calls - 1]

    reading = Reading(fake.open(), Keys())
    await settle()
    # The response calls the iterator: no task does.
    fake.answer("b", "a", "d")
    await settle()
    assert not reading.task.done()
    with pytest.raises(KeyError):
        await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert num_calls == 7
    assert reading.is_clean()


async def test_in_a_forked_child_nothing_is_sent(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(fake, "ab")
    store = fake.open()
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    reading = Reading(store, ["a", "b"])
    with pytest.raises(RuntimeError, match="opened before a fork"):
        await reading.task
    assert (fake.begun, fake.gets) == ([], [])


@pytest.mark.usefixtures("quick_collection")
async def test_a_finished_iteration_is_released(fake: FakeService) -> None:
    """Neither the session nor its deadlines keep it alive."""
    stored = filled(fake, "abcdef")
    store = fake.open()

    class Keys(list[str]):
        """Can be referenced weakly."""

    keys = Keys(stored)
    reading, released = Reading(store, keys), weakref.ref(keys)
    del keys
    await answer_all(fake, reading)
    del reading
    await settle()
    gc.collect()
    assert released() is None


# --- cancellation --------------------------------------------------------------------------


async def test_responses_in_the_turn_of_a_cancellation_start_nothing(fake: FakeService) -> None:
    """The workers are cancelled, and have not run since."""
    stored = filled(fake, (f"k{at:03}" for at in range(20)))
    reading = Reading(fake.open(), list(stored))
    await settle()
    reading.task.cancel()
    await asyncio.sleep(0)  # the consumer cancels the workers; then the responses arrive
    fake.answer("k000")
    fake.refuse("k001", THROTTLED)
    fake.lose("k002", is_stale=True)
    assert len(fake.begun) == 4
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert fake.dropped == ["k003"]
    assert reading.is_clean()


async def test_cancelled_workers_end_the_iteration(fake: FakeService) -> None:
    """Another part of the program cancels all tasks but the consumer's."""
    filled(fake, "abcdef")
    reading = Reading(fake.open(), list("abcdef"))
    await settle()
    for task in asyncio.all_tasks() - {asyncio.current_task(), reading.task}:
        task.cancel()
    async with asyncio.timeout(100) as limit:
        with pytest.raises(asyncio.CancelledError):
            await reading.task
    assert not limit.expired()
    assert sorted(fake.dropped) == list("abcd")
    assert reading.is_clean()


# --- waiting for a slot --------------------------------------------------------------------


class Slots:
    """Calls of a store that hold its slots until they are released."""

    def __init__(self, fake: FakeService, store: Store, count: int) -> None:
        fake.store("held", b"")
        self.hangs = [Fault(kind="hang") for _ in range(count)]
        fake.fail("head", *self.hangs)
        self.tasks = [asyncio.create_task(store.head("held")) for _ in range(count)]

    def release(self) -> None:
        self.hangs.pop().released.set()


async def test_a_released_slot_is_used_without_a_coroutine(fake: FakeService) -> None:
    stored = filled(fake, "abcdef")
    store = fake.open(max_in_flight=2)
    slots = Slots(fake, store, 1)
    await settle()
    reading = Reading(store, list(stored))
    await settle()
    assert fake.begun == ["a"]
    slots.release()
    await settle()
    assert fake.begun == ["a", "b"]
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert (fake.gets, fake.max_under_way) == ([], 2)
    assert reading.is_clean()


async def test_a_slot_without_a_connection_is_left_to_the_worker(fake: FakeService) -> None:
    """For more waiting items than the interpreter may recurse."""
    stored = filled(fake, (f"k{at:04}" for at in range(1400)))
    store = fake.open(max_in_flight=1200, max_in_flight_bytes=1 << 34)
    slots = Slots(fake, store, 1200)
    await settle()
    reading = Reading(store, list(stored))
    await settle()
    fake.is_full = True
    for _ in range(1200):
        slots.release()
    await reading.task
    assert reading.got == list(stored.items())
    assert fake.begun == []
    assert len(fake.gets) == 1400
    assert reading.is_clean()


@pytest.mark.parametrize("is_released", [False, True], ids=["before", "with a released slot"])
async def test_a_consumer_that_is_cancelled_waiting_for_slots(
    fake: FakeService, *, is_released: bool
) -> None:
    stored = filled(fake, "abcd")
    store = fake.open(max_in_flight=2)
    slots = Slots(fake, store, 2)
    await settle()
    reading = Reading(store, list(stored))
    await settle()
    reading.task.cancel()
    await asyncio.sleep(0)  # the workers are cancelled, and have not run since
    if is_released:
        slots.release()
        slots.release()
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert fake.begun == []
    assert store.session.admission.bytes.held_bytes == 0
    while slots.hangs:
        slots.release()
    await asyncio.gather(*slots.tasks)
    again = Reading(store, list(stored))
    await answer_all(fake, again)
    assert again.got == list(stored.items())
    assert again.is_clean()


async def test_the_deadline_starts_with_the_request(fake: FakeService, clock: Clock) -> None:
    """Not while the item waits for a slot."""
    filled(fake, "a")
    store = fake.open(retry=RetryPolicy(deadline_seconds=0.2), max_in_flight=1)
    held = Reading(store, ["a"])
    await settle()
    waiting = Reading(store, [fake.store("b", b"1")])
    with pytest.raises(TransientError, match="/a came before the deadline"):
        await held.task
    started_at = clock.now
    with pytest.raises(TransientError, match="/b came before the deadline"):
        await waiting.task
    assert 0.19 <= clock.now - started_at < 0.21
    assert fake.dropped == ["a", "b"]
    assert waiting.is_clean()


async def test_a_wait_longer_than_the_deadline_is_checked_seldom(
    fake: FakeService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item that waits for a slot, behind ten calls, has no deadline yet."""
    stored = filled(fake, "abc")
    store = fake.open(retry=RetryPolicy(deadline_seconds=0.1), max_in_flight=1)
    head = fake.head

    async def slow_head(*args: Any, **options: Any) -> aioflux.ObjectMeta:
        await asyncio.sleep(0.09)
        return await head(*args, **options)

    monkeypatch.setattr(fake, "head", slow_head)
    calls = [asyncio.create_task(store.head("a")) for _ in range(10)]
    await settle()
    reading = Reading(store, list(stored))
    await asyncio.gather(*calls)
    assert clock.num_waits < 100
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert reading.is_clean()


# --- on the wire ---------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


wire_faults = st.lists(
    st.tuples(
        st.sampled_from(
            [
                {"status": 503},
                {"status": 429, "retry_after": 0},
                {"status": 502},
                {"reset": True},
                {"lost": True},
                {"lost": True, "reset": True},
                {"truncate_at": 0},
                {"truncate_at": 40, "reset": True},
                {"delay_seconds": 0.002},
            ]
        ),
        st.sampled_from([0.02, 0.1, 0.3]),
        st.integers(0, 2**32),
    ),
    max_size=4,
)


@pytest.mark.more
@given(
    chosen=wire_faults,
    count=st.integers(0, 60),
    width=st.integers(1, 8),
    budget=st.sampled_from([20_000, 400_000, 8_000_000]),
    by_meta=st.booleans(),
    is_uvloop=st.booleans(),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_faults_on_the_wire_lose_double_and_reorder_nothing(
    server: GCSServer,
    chosen: list[tuple[dict[str, Any], float, int]],
    count: int,
    width: int,
    budget: int,
    *,
    by_meta: bool,
    is_uvloop: bool,
) -> None:
    stored = {f"k{at:04}": b"%d." % at * (at % 700) + b"." for at in range(count)}
    for key, data in (stored | {"warm": b"w" * 1000}).items():
        server.put("bucket", key, data)

    async def run() -> None:
        async with aioflux.open_store(
            "gs://bucket",
            endpoint_url=server.url,
            credentials=AnonymousCredentials(),
            transfer=TransferOptions(max_in_flight=width, max_in_flight_bytes=budget),
            retry=RetryPolicy(
                max_attempts=100, initial_seconds=0.001, max_seconds=0.002, budget_retries=10_000
            ),
        ) as store:
            _ = [key async for key, _ in store.get_many(["warm"] * 20)]
            metas = {meta.key: meta for meta in await store.list_all("k")}
            for fault, share, seed in chosen:
                server.faults.add("objects.media", probability=share, seed=seed, **fault)
            items = [metas[key] for key in stored] if by_meta else list(stored)
            async with asyncio.timeout(200):
                assert [pair async for pair in store.get_many(items)] == list(stored.items())
            stats = store.stats
            assert stats.num_in_flight == 0
            assert stats.num_retries <= stats.num_failures

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if is_uvloop else None) as runner:
            runner.run(run())
    finally:
        server.faults.clear()


@pytest.mark.more
async def test_a_thousand_reads_with_faults_leave_nothing_behind(server: GCSServer) -> None:
    keys = [f"k{at:04}" for at in range(20)]
    for key in keys:
        server.put("bucket", key, b"%a" % key * 100)
    async with aioflux.open_store(
        "gs://bucket",
        endpoint_url=server.url,
        credentials=AnonymousCredentials(),
        transfer=TransferOptions(max_in_flight=4),
        retry=RetryPolicy(initial_seconds=0.001, max_seconds=0.002, budget_retries=1000),
    ) as store:

        async def read(count: int) -> int:
            server.faults.add("objects.media", status=503, probability=0.01, seed=1)
            server.faults.add("objects.media", reset=True, probability=0.05, seed=2)
            items = (keys[at % 20] for at in range(count))
            num = len([key async for key, _ in store.get_many(items, ordered=False)])
            server.faults.clear()
            return num

        assert await read(300) == 300
        gc.collect()
        tasks, num_objects = asyncio.all_tasks(), len(gc.get_objects())
        assert await read(1000) == 1000
        gc.collect()
        assert asyncio.all_tasks() == tasks
        assert len(gc.get_objects()) - num_objects < 500
        # Both ends of a connection are in this process; one end may be there still.
        assert server.stats.connections_open <= 2 * 4
