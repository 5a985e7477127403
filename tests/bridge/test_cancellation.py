"""Whatever ends a call early: it is over soon, nothing is left, and the store goes on.

Each situation is a call that the server keeps waiting somewhere; each way to end it is one that
users have: Ctrl-C of a blocking call and of `asyncio.run`, a cancelled task, a timeout.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.testing.gcs_server import Network
from tests.bridge.patience import FAR_SECONDS, PATIENT_CLEANUP
from tests.bridge.scripts import Watch, finish, line, running, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux.testing import GCSServer

_log = logging.getLogger(__name__)

MOST_SECONDS = 100.0
"""A second is promised, of a machine with nothing else to do. Here whoever waits for an answer that
does not come, or for a limit, waits for six times as long as this."""
MIB = 1 << 20
BIG_BYTES = 16 * MIB
SLOW = 100_000
"""Bytes per second: the least that is read or written takes longer than `MOST_SECONDS`, too."""
OPTIONS = aioflux.TransferOptions(
    range_size_bytes=4 * MIB, part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB
)
TIMEOUTS = aioflux.Timeouts(
    progress_seconds=FAR_SECONDS, idle_seconds=FAR_SECONDS, cleanup=PATIENT_CLEANUP
)


@dataclass(frozen=True)
class Situation:
    """A call, and where it waits."""

    call: str
    """Name of a call below."""
    operation: str
    """The request that it has sent by then."""
    fault: dict[str, Any] = field(default_factory=dict)
    """What the server does to that."""
    bytes_per_second: int | None = None
    """Of each connection."""


ENDLESS = {"delay_seconds": 3600.0}
SITUATIONS = {
    "get-stalled": Situation("get", "*objects.get", {"stall_at": 100_000}),
    "get-silent": Situation("get", "*objects.get", ENDLESS),
    "get-slow": Situation("get", "*objects.get", bytes_per_second=SLOW),
    "get_into-stalled": Situation("get_into", "*objects.get", {"stall_at": 100_000}),
    "get_many-stalled": Situation("get_many", "*objects.get", {"stall_at": 100_000}),
    "get_many-slow": Situation("get_many", "*objects.get", bytes_per_second=SLOW),
    "reader-stalled": Situation("reader", "*objects.get", {"stall_at": 100_000}),
    "list-silent": Situation("list", "*objects.list", ENDLESS),
    "put-one-request": Situation("put_small", "xml.objects.insert", ENDLESS),
    "put-refused": Situation("put_small", "xml.objects.insert", {"status": 503}),
    "put-initiate": Situation("put", "xml.multipart.create", {"delay_seconds": 0.2}),
    "put-part": Situation("put", "xml.multipart.part", ENDLESS),
    "put-slow": Situation("put", "xml.multipart.create", bytes_per_second=SLOW),
    "put-complete": Situation("put", "xml.multipart.complete", ENDLESS),
    "writer-initiate": Situation("writer", "xml.multipart.create", {"delay_seconds": 0.2}),
    "writer-part": Situation("writer", "xml.multipart.part", ENDLESS),
    "writer-slow": Situation("writer", "xml.multipart.create", bytes_per_second=SLOW),
    "writer-complete": Situation("writer", "xml.multipart.complete", ENDLESS),
    "create-initiate": Situation("create", "xml.multipart.create", {"delay_seconds": 0.2}),
    "create-part": Situation("create", "xml.multipart.part", ENDLESS),
    "create-complete": Situation("create", "xml.multipart.complete", ENDLESS),
}

CALLS: dict[str, Callable[[aioflux.Store], Any]] = {
    "get": lambda store: store.get("big"),
    "get_into": lambda store: store.get_into("big", bytearray(BIG_BYTES)),
    "get_many": lambda store: drain(store.get_many(["big"] * 8)),
    "reader": lambda store: read(store),
    "list": lambda store: store.list_all(),
    "put_small": lambda store: store.put("small", bytes(MIB)),
    "put": lambda store: store.put("put", bytes(BIG_BYTES)),
    "writer": lambda store: write(store, "writer"),
    "create": lambda store: write(store, "create", mode="create"),
}


async def drain(items: Any) -> None:
    async for _ in items:
        pass


async def read(store: aioflux.Store) -> None:
    async with store.open_reader("big") as reader:
        while await reader.read(MIB):
            pass


async def write(store: aioflux.Store, key: str, **options: Any) -> None:
    async with store.open_writer(key, **options) as writer:
        for _ in range(8):
            await writer.write(bytes(4 * MIB))


@pytest.fixture
def server(server: GCSServer) -> GCSServer:
    server.put("bucket", "p/big", bytes(BIG_BYTES))
    server.put("bucket", "p/a", b"1")
    return server


@contextmanager
def waiting(server: GCSServer, situation: Situation) -> Iterator[Watch]:
    """Have the server keep calls waiting; the watch tells when one does."""
    watch = Watch()
    hooks = server.app.hooks
    server.app.hooks = (watch, *hooks)  # before a fault may refuse the request
    server.network = Network(connection_bytes_per_second=situation.bytes_per_second)
    if situation.fault:
        server.faults.add(situation.operation, **situation.fault)
    try:
        yield watch
    finally:
        server.faults.clear()
        server.network = Network()
        server.app.hooks = hooks


def assert_nothing_is_left(server: GCSServer) -> None:
    assert server.stats.open_uploads == 0
    left = set(server.keys("bucket")) - {"p/big", "p/a"}
    # What was complete before its answer was lost may be there, whole; nothing half or hidden is.
    sizes = {"p/small": MIB, "p/put": BIG_BYTES, "p/writer": 32 * MIB, "p/create": 32 * MIB}
    for key in left:
        assert len(server.get("bucket", key)) == sizes[key]


async def assert_usable(store: aioflux.Store) -> None:
    async with asyncio.timeout(MOST_SECONDS):
        await store.put("after", b"after")
        assert await store.get("after") == b"after"
        await store.delete("after")
        assert [meta.size async for meta in store.list("a")] == [1]


TIMED = ("get-stalled", "get_many-stalled", "list-silent", "put-part", "create-complete")
"""Situations that a timeout ends, too: it cancels the task as others do."""


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "cancel") for name in SITUATIONS), *((name, "timeout") for name in TIMED)],
)
async def test_a_task_that_is_ended(server: GCSServer, name: str, way: str, num_loops: int) -> None:
    situation = SITUATIONS[name]
    transfer = replace(OPTIONS, num_loops=num_loops)
    async with aioflux.open_store(
        "gs://bucket/p", endpoint_url=server.url, transfer=transfer, timeouts=TIMEOUTS
    ) as store:
        assert await store.get("a") == b"1"
        with waiting(server, situation) as watch:
            ending = asyncio.Event()

            async def work() -> None:
                if way == "cancel":
                    await CALLS[situation.call](store)
                    return
                async with asyncio.timeout(None) as limit:
                    soon = asyncio.create_task(ending.wait())
                    soon.add_done_callback(
                        lambda _: limit.reschedule(asyncio.get_running_loop().time())
                    )
                    await CALLS[situation.call](store)

            task = asyncio.create_task(work())
            await asyncio.to_thread(watch.wait_for, situation.operation)
            begun = time.monotonic()
            if way == "cancel":
                task.cancel()
            ending.set()
            with pytest.raises(asyncio.CancelledError if way == "cancel" else TimeoutError):
                await task
            seconds = time.monotonic() - begun
            _log.info("%s of %s was over within %.3f s", way, name, seconds)
            assert seconds < MOST_SECONDS
            assert_nothing_is_left(server)
        await assert_usable(store)


FAR = f"""
settings["timeouts"] = aioflux.Timeouts(
    progress_seconds={FAR_SECONDS}, idle_seconds={FAR_SECONDS}, cleanup=PATIENT.cleanup
)
store = aioflux.sync.open_store("gs://bucket/p", transfer=options, **settings)
"""

BLOCKING = """
calls = {
    "get": lambda: store.get("big"),
    "get_into": lambda: store.get_into("big", bytearray(16 << 20)),
    "get_many": lambda: list(store.get_many(["big"] * 8)),
    "reader": lambda: read(),
    "list": lambda: store.list_all(),
    "put_small": lambda: store.put("small", bytes(1 << 20)),
    "put": lambda: store.put("put", bytes(16 << 20)),
    "writer": lambda: write("writer"),
    "create": lambda: write("create", mode="create"),
}

def read():
    with store.open_reader("big") as reader:
        while reader.read(1 << 20):
            pass

def write(key, **options):
    with store.open_writer(key, **options) as writer:
        for _ in range(8):
            writer.write(bytes(4 << 20))

assert store.get("a") == b"1"
say("up")
for step in sys.stdin:
    say("ready")
    sys.stdin.readline()
    try:
        calls[step.strip()]()
    except KeyboardInterrupt:
        say("interrupted")
    sys.stdin.readline()
    store.put("after", b"after")
    assert store.get("after") == b"after"
    store.delete("after")
    say("usable")
assert_spread()
store.close()
"""

AWAITING = """
import asyncio

async def drain(items):
    async for _ in items:
        pass

async def read(store):
    async with store.open_reader("big") as reader:
        while await reader.read(1 << 20):
            pass

async def write(store, key, **options):
    async with store.open_writer(key, **options) as writer:
        for _ in range(8):
            await writer.write(bytes(4 << 20))

calls = {
    "get": lambda store: store.get("big"),
    "get_into": lambda store: store.get_into("big", bytearray(16 << 20)),
    "get_many": lambda store: drain(store.get_many(["big"] * 8)),
    "reader": read,
    "list": lambda store: store.list_all(),
    "put_small": lambda store: store.put("small", bytes(1 << 20)),
    "put": lambda store: store.put("put", bytes(16 << 20)),
    "writer": lambda store: write(store, "writer"),
    "create": lambda store: write(store, "create", mode="create"),
}

async def main(step):
    async with aioflux.open_store("gs://bucket/p", transfer=options, **settings) as store:
        assert await store.get("a") == b"1"
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await calls[step](store)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
            say("interrupted")
        await asyncio.to_thread(sys.stdin.readline)
        await store.put("after", b"after")
        assert await store.get("after") == b"after"
        await store.delete("after")
        say("usable")

say("up")
for step in sys.stdin:
    asyncio.run(main(step.strip()))
assert_spread()
"""


@pytest.mark.usefixtures("num_loops")
@pytest.mark.parametrize("face", [BLOCKING, AWAITING], ids=["blocking", "awaiting"])
def test_ctrl_c(server: GCSServer, face: str) -> None:
    """One process goes through all situations, with the same store where it blocks."""
    took = {}
    with running(FAR + face, server) as process:
        assert line(process) == "up"
        for name, situation in SITUATIONS.items():
            tell(process, situation.call)
            assert line(process) == "ready", name
            with waiting(server, situation) as watch:
                tell(process)
                watch.wait_for(situation.operation)
                begun = time.monotonic()
                process.send_signal(signal.SIGINT)
                assert line(process) == "interrupted", name
                took[name] = round(time.monotonic() - begun, 3)
                assert_nothing_is_left(server)
            tell(process)
            assert line(process) == "usable", name
            for key in set(server.keys("bucket")) - {"p/big", "p/a"}:
                server.state.bucket("bucket").objects.remove(key)
        assert finish(process) == []
    for name, seconds in took.items():
        _log.info("Ctrl-C of %s was over within %.3f s", name, seconds)
        assert seconds < MOST_SECONDS, name
