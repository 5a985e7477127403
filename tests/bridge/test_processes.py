"""Ctrl-C, forks and the end of a process, each in a process of its own."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.bridge.scripts import Watch, finish, line, running

pytestmark = pytest.mark.usefixtures("num_loops")

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

STEPS = {
    "get": ("store.get('get')", "*objects.get"),
    "many": ("list(store.get_many(['many'] * 8))", "*objects.get"),
    "generator": ("list(store.get_many('generator' for _ in range(8)))", "*objects.get"),
    "list": ("list(store.list('list'))", "*objects.list"),
    "put": ("store.put('put', bytes(12 << 20))", "xml.multipart.part"),
    "writer": ("write('writer')", "xml.multipart.part"),
    "create": ("store.put('create', bytes(12 << 20), mode='create')", "xml.multipart.part"),
}

INTERRUPTED = """
def write(key):
    with store.open_writer(key) as writer:
        for _ in range(4):
            writer.write(bytes(4 << 20))

store.get("small")
say("up")
for step in sys.stdin:
    try:
        say("ready")
        eval(compile(step, "step", "eval"))
    except KeyboardInterrupt:
        say("interrupted")
    sys.stdin.readline()
    assert store.get("small") == b"small"
    say("usable")
assert_spread()
store.close()
"""


def test_ctrl_c_ends_the_work_and_leaves_the_store_usable(server: GCSServer) -> None:
    for name in ("get", "many", "generator"):
        server.put("bucket", f"p/{name}", bytes(20 << 20))
    server.put("bucket", "p/small", b"small")
    watch = Watch()
    server.app.hooks += (watch,)
    with running(INTERRUPTED, server) as process:
        assert process.stdin is not None
        assert line(process) == "up"
        for name, (step, operation) in STEPS.items():
            with server.faults.inject(operation, delay_seconds=3600.0):
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
                assert line(process) == "ready"
                watch.wait_for(operation, ".aioflux-uploads" if name == "create" else name)
                process.send_signal(signal.SIGINT)
                assert line(process) == "interrupted", name
                assert server.stats.open_uploads == 0, name
            process.stdin.write("\n")
            process.stdin.flush()
            assert line(process) == "usable", name
        assert server.keys("bucket") == ["p/generator", "p/get", "p/many", "p/small"]
        assert finish(process) == []


FORKED = """
keys = [f"{at:02}" for at in range(40)]
expected = {key: key.encode() * 1000 for key in keys}
large = bytes(range(256)) * (12 << 12)

def check():
    assert dict(store.get_many(keys)) == expected
    assert [meta.key for meta in store.list("0")] == keys[:10]
    assert store.get("07") == expected["07"]
    assert store.get("large") == large
    assert_spread()

def hammer(stop):
    while not stop.is_set():
        assert store.get("39") == expected["39"]

check()
stop = threading.Event()
busy = threading.Thread(target=hammer, args=(stop,))
busy.start()
for number in range(6):
    child = os.fork()
    if not child:
        check()
        with store.open_writer(f"child/{number}") as writer:
            writer.write(b"from the child")
        if number % 2:
            os._exit(0)
        sys.exit(0)
    check()
    assert os.waitpid(child, 0)[1] == 0
    check()
    assert store.get(f"child/{number}") == b"from the child"
stop.set()
busy.join()
store.close()
say("done")
"""


def test_a_fork_leaves_parent_and_child_going_on(server: GCSServer) -> None:
    for at in range(40):
        server.put("bucket", f"p/{at:02}", f"{at:02}".encode() * 1000)
    server.put("bucket", "p/large", bytes(range(256)) * (12 << 12))
    with running(FORKED, server) as process:
        assert finish(process) == ["done"]


FORKED_IN_THE_MIDDLE = """
writing = store.open_writer("half")
writer = writing.__enter__()
writer.write(bytes(11 << 20))
assert_spread()
batches = store.get_batches(["a"] * 100)
next(batches)
child = os.fork()
if not child:
    assert store.get("a") == b"1"
    del batches, writer, writing
    import gc
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert sum(map(len, batches)) >= 0
writer.write(b"!")
writing.__exit__(None, None, None)
assert store.head("half").size == (11 << 20) + 1
store.close()
say("done")
"""


def test_a_child_does_not_touch_what_its_parent_has_under_way(server: GCSServer) -> None:
    server.put("bucket", "p/a", b"1")
    with running(FORKED_IN_THE_MIDDLE, server) as process:
        assert finish(process) == ["done"]
    assert server.stats.open_uploads == 0


REFUSED = """
import signal

def refused(*works):
    child = os.fork()
    if child:
        return child
    signal.alarm(200)  # what waits for a thread of the parent waits for ever
    for number, work in enumerate(works):
        try:
            work()
            os._exit(10 + number)
        except RuntimeError as exc:
            if "before a fork" not in str(exc):
                os.write(2, f"{number}: {exc!r}".encode())
                os._exit(20 + number)
    os._exit(0)

def over(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

large, other = b"L" * (12 << 20), b"O" * 100_000
"""

REFUSED_BLOCKING = """
store.get("other")
with store.open_reader("large") as unread, store.open_reader("large") as reader:
    assert reader.read(1000) == large[:1000]
    writing = store.open_writer("written")
    writer = writing.__enter__()
    writer.write(large)
    pairs = store.get_many(["other"] * 100)
    assert next(pairs) == ("other", other)
    metas = store.list()
    assert next(metas).key == "large"
    batches = store.get_batches(["large"] * 20)
    next(batches)
    child = refused(
        lambda: unread.read(10),
        lambda: unread.readinto(bytearray(10)),
        lambda: reader.read(10),
        reader.tell,
        lambda: reader.seek(0),
        lambda: writer.write(b"!"),
        writer.tell,
        lambda: writing.__exit__(None, None, None),
        lambda: next(pairs),
        lambda: next(metas),
        lambda: next(batches),
    )
    assert store.get("other") == other
    assert reader.read() == large[1000:]
    assert unread.read() == large
    assert over(child) == 0
    writer.write(b"!")
    writing.__exit__(None, None, None)
    assert store.get("written") == large + b"!"
    assert list(pairs) == [("other", other)] * 99
    assert next(metas).key == "other"
    assert sum(len(batch) for batch in batches) <= 19
    assert_spread()
store.close()
say("done")
"""

REFUSED_AWAITING = """
import asyncio

async def drain(items):
    async for _ in items:
        pass

async def leave(writing):
    await writing.__aexit__(None, None, None)

async def main():
    async with aioflux.open_store("gs://bucket/p", transfer=options, **settings) as store:
        assert await store.get("other") == other
        async with store.open_reader("large") as unread, store.open_reader("large") as reader:
            assert await reader.read(1000) == large[:1000]
            writing = store.open_writer("written")
            writer = await writing.__aenter__()
            await writer.write(large)
            pairs = store.get_many(["other"] * 100)
            assert await anext(pairs) == ("other", other)
            metas = store.list()
            await anext(metas)
            child = refused(
                lambda: asyncio.run(unread.read(10)),
                lambda: asyncio.run(reader.read()),
                lambda: asyncio.run(writer.write(large)),
                lambda: asyncio.run(leave(writing)),
                lambda: asyncio.run(drain(pairs)),
            )
            assert await store.get("other") == other
            assert await reader.read() == large[1000:]
            assert await unread.read() == large
            assert await asyncio.to_thread(over, child) == 0
            await writer.write(b"!")
            await writing.__aexit__(None, None, None)
            assert await store.get("written") == large + b"!"
            assert [pair async for pair in pairs] == [("other", other)] * 99
            await metas.aclose()
            assert_spread()

asyncio.run(main())
say("done")
"""


@pytest.mark.parametrize("face", [REFUSED_BLOCKING, REFUSED_AWAITING], ids=["blocking", "awaiting"])
def test_a_child_cannot_use_what_its_parent_opened(server: GCSServer, face: str) -> None:
    """At once; the parent goes on, and the bytes are its own."""
    server.put("bucket", "p/large", b"L" * (12 << 20))
    server.put("bucket", "p/other", b"O" * 100_000)
    with (
        server.faults.inject("*objects.get", delay_seconds=0.05),
        running(REFUSED + face, server) as process,
    ):
        assert finish(process) == ["done"]
    assert server.stats.open_uploads == 0


LEFT_OPEN = """
batches = store.get_batches(["a"] * 100)
next(batches)
pairs = store.get_many("a" for _ in range(1000))
next(pairs)
say("done")
"""


def test_a_process_may_end_with_everything_open(server: GCSServer) -> None:
    server.put("bucket", "p/a", b"1")
    with running(LEFT_OPEN, server) as process:
        assert finish(process) == ["done"]


NOTHING_AT_IMPORT = """
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
assert "aiohttp" not in sys.modules and "google.auth" not in sys.modules
say("done")
"""


def test_an_open_store_has_started_nothing(server: GCSServer) -> None:
    with running(NOTHING_AT_IMPORT, server) as process:
        assert finish(process) == ["done"]
