"""The end of a process, whatever is open: no word on stderr, the right status, and soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from aioflux.testing.gcs_server import Hook
from tests.bridge.scripts import LIMIT_SECONDS, ROOT, Watch, finish, line, running

pytestmark = pytest.mark.usefixtures("num_loops")

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Request

MOST_SECONDS = 100.0
"""Two are promised, of a machine with nothing else to do. Here whoever waits for a limit waits for
six times as long as this."""

OPENED = """
import asyncio, gc, os, sys, threading, time
import aioflux, aioflux.sync
from tests.bridge.patience import PATIENT
num_loops = int(os.environ["AIOFLUX_TEST_NUM_LOOPS"])
options = aioflux.TransferOptions(
    part_size_bytes=5 << 20, max_buffered_bytes=10 << 20, num_loops=num_loops
)
settings = {"transfer": options, "timeouts": PATIENT}
if sys.argv[1].startswith("gs"):
    settings["endpoint_url"] = sys.argv[2]

def opened():
    return aioflux.sync.open_store(sys.argv[1], **settings)

def opened_awaiting():
    return aioflux.open_store(sys.argv[1], **settings)

def say_when():
    print(time.time(), flush=True)
"""

ENDINGS = {
    "calls": """
store = opened()
store.put("a", bytes(1 << 20))
writing = store.open_writer("w")
writing.__enter__().write(bytes(11 << 20))
creating = store.open_writer("x", mode="create")
creating.__enter__().write(bytes(11 << 20))
dropped = store.open_writer("y")
dropped.__enter__().write(bytes(11 << 20))
del dropped
gc.collect()
reading = store.open_reader("a")
reading.__enter__().read(10)
pairs = store.get_many(["a"] * 1000)
next(pairs)
fed = store.get_many("a" for _ in range(1000))
next(fed)
metas = store.list()
next(metas)
""",
    "writer": """
store = opened()
writing = store.open_writer("w")
writing.__enter__().write(bytes(11 << 20))
""",
    "daemons": """
store = opened()
store.put("a", b"1")
def read():
    while True:
        store.get("a")
def write():
    with store.open_writer("w") as writer:
        while True:
            writer.write(bytes(1 << 20))
for work in (read, read, read, write):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
    "awaited calls": """
async def main():
    async with opened_awaiting() as store:
        await store.put("a", b"1")
        pairs, metas = store.get_many(["a"] * 1000), store.list()
        await anext(pairs)
        await anext(metas)
        globals()["kept"] = pairs, metas
asyncio.run(main())
""",
}


@pytest.mark.parametrize(
    ("name", "scheme", "status"),
    [*((name, "gs", 0) for name in ENDINGS), ("calls", "file", 3), ("daemons", "file", 3)],
)
def test_a_process_ends_with_what_is_open(
    server: GCSServer, tmp_path: Path, scheme: str, name: str, status: int
) -> None:
    """What is under construction is aborted and never published."""
    uri = "gs://bucket/p" if scheme == "gs" else f"file://{tmp_path}"
    script = f"{OPENED}{ENDINGS[name]}\nsay_when()\nsys.exit({status})\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, uri, server.url],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    seconds = time.time() - float(done.stdout)
    assert (done.returncode, done.stderr) == (status, "")
    assert seconds < MOST_SECONDS
    assert server.stats.open_uploads == 0
    assert set(server.keys("bucket")) <= {"p/a"}
    assert set(os.listdir(tmp_path)) <= {"a"}


TWICE = """
try:
    say("ready")
    {}
except KeyboardInterrupt:
    say("interrupted")
store.put("after", b"after")
assert store.get("after") == b"after"
say("usable")
"""

WAITS = {
    "get": ("store.get('big')", "*objects.get"),
    "put": ("store.put('put', bytes(12 << 20))", "xml.multipart.part"),
}


class HeldAbort(Hook):
    """Lets no abort of an upload be answered, nor anything else meanwhile, until it goes on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def before(self, request: Request) -> None:
        if request.match.operation == "xml.multipart.abort":
            self.goes_on.wait(LIMIT_SECONDS)


@pytest.mark.parametrize("name", list(WAITS))
def test_a_second_ctrl_c_does_not_wait_for_the_clean_up(server: GCSServer, name: str) -> None:
    """It is at work in the background, and ended with the process where it hangs."""
    server.put("bucket", "p/big", bytes(20 << 20))
    call, operation = WAITS[name]
    watch, held = Watch(), HeldAbort()
    server.app.hooks = (watch, held, *server.app.hooks)
    with (
        server.faults.inject(operation, delay_seconds=3600.0, key="p/[bp]*"),
        running(TWICE.format(call), server) as process,
    ):
        assert line(process) == "ready"
        watch.wait_for(operation)
        process.send_signal(signal.SIGINT)
        if name == "put":
            watch.wait_for("xml.multipart.abort")
            process.send_signal(signal.SIGINT)
        assert line(process) == "interrupted"
        held.goes_on.set()
        assert finish(process) == ["usable"]
    assert server.stats.open_uploads == 0


def test_ctrl_c_that_no_one_catches_ends_the_process(server: GCSServer) -> None:
    """With the traceback of the call and the status of the signal; uploads are aborted."""
    watch = Watch()
    server.app.hooks = (watch, *server.app.hooks)
    script = "say('ready'); store.put('put', bytes(12 << 20))"
    with (
        server.faults.inject("xml.multipart.part", delay_seconds=3600.0),
        running(script, server) as process,
    ):
        assert line(process) == "ready"
        watch.wait_for("xml.multipart.part")
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_SECONDS)
        assert time.monotonic() - begun < MOST_SECONDS
        assert process.returncode == -signal.SIGINT
        assert re.findall(r"(?m)^\S*(?:Error|Interrupt)\b.*$", err) == ["KeyboardInterrupt"]
    assert server.stats.open_uploads == 0
