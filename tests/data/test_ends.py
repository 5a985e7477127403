"""Epochs that end by a signal, through both datasets, in the process itself and in workers.

SIGKILL leaves composites, which the next start deletes; Ctrl-C leaves none. AIOFLUX_TEST_ROUNDS
sets the number of signals for each way to read; the suite sends one.
"""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.store import COMPOSITE_PREFIX
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Network, State
from tests.bridge.scripts import LIMIT_SECONDS, PRELUDE, ROOT, Watch, wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_log = logging.getLogger(__name__)

NUM_ROUNDS = int(os.environ.get("AIOFLUX_TEST_ROUNDS", "1"))
NUM_OBJECTS = 500
LOST_SECONDS = 60.0
"""Time in which an interrupted process ends, also on a busy machine."""
STEPS = ("*objects.compose", "*objects.get", "*objects.delete")


def ways(*names: str) -> list[Any]:
    """Return all ways to read as parameters; those not named are marked `more`."""
    return [
        pytest.param(way, marks=() if way in names else pytest.mark.more)
        for way in ("iterable 0", "iterable 2", "map 0", "map 2")
    ]


pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 20)

SCRIPT = f"""{PRELUDE}
from torch.utils.data import DataLoader, _utils
_utils.MP_STATUS_CHECK_INTERVAL = 600  # workers that end are not killed before they have
from aioflux.data import IterableDataset, MapDataset

def read(kind, num_workers, how):
    make = {{"iterable": IterableDataset, "map": MapDataset}}[kind]
    transfer = aioflux.TransferOptions(max_in_flight=8)
    dataset = make("gs://bucket/train", compose="on", transfer=transfer, **settings)
    loader = DataLoader(dataset, batch_size=50, num_workers=int(num_workers), collate_fn=list)
    say("built")
    try:
        while True:
            keys = [sample.key for batch in loader for sample in batch]
            assert len(keys) == len(set(keys)) == {NUM_OBJECTS}
            if how == "once":
                break
    except KeyboardInterrupt:
        if how == "uncaught":
            raise
        say("caught")
    else:
        say("done")

def serve():
    for command in sys.stdin:
        *how, log = command.split()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            return how
        os.close(writing)
        say(child)
        _, status = os.waitpid(child, 0)
        os.read(reading, 1)  # until its workers have ended, too
        os.close(reading)
        say(os.waitstatus_to_exitcode(status))
    sys.exit()

read(*serve())
"""


class Runs:
    """Epochs one after the other, each in a process group of its own.

    They are forked from a process that has imported everything.
    """

    def __init__(self, server: GCSServer, process: subprocess.Popen[str], log: Path) -> None:
        self.server = server
        self.watch = Watch()
        server.app.hooks += (self.watch,)
        self._process = process
        self._log = log

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def has_line(self, seconds: float) -> bool:
        """Return whether a line arrives in so many seconds."""
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def start(self, way: str, how: str) -> int:
        """Begin epochs, or one, and return their process group when the dataset is built."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{way} {how} {self._log}\n")
        self._process.stdin.flush()
        group = int(self.line())
        assert self.line() == "built", self._log.read_text()
        return group

    def finish(self) -> list[str]:
        """Return what it still says and how it ended, when all of its processes have."""
        words: list[str] = []
        while not words or words[-1] in {"done", "caught"}:
            words.append(self.line())
        wait_until_idle(self.server)
        # What the next one waits for is its own.
        self.watch.forget()
        return words

    def wait_somewhere(self, rng: random.Random) -> None:
        """Wait for a random moment of the epoch."""
        step = rng.choice(STEPS)
        for _ in range(rng.randrange(1, 20)):
            self.watch.wait_for(step, "composed")
        time.sleep(rng.random() * 0.02)

    def composites(self) -> list[str]:
        return [key for key in self.server.keys("bucket") if COMPOSITE_PREFIX in key]

    @property
    def log(self) -> str:
        return self._log.read_text()


@contextmanager
def runs_on(server: GCSServer, log: Path) -> Iterator[Runs]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield Runs(server, process, log)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    # Two days behind: what is killed now is swept by the next start, as in two days it would be.
    state = State(clock=lambda: time.time_ns() // 1000 - 2 * 86_400_000_000)
    # A little latency, so that composites are there for a while.
    network = Network(latency_seconds=0.02)
    with GCSServer(buckets=("bucket",), state=state, network=network) as server:
        for number in range(NUM_OBJECTS):
            server.put("bucket", f"train/{number:04}", f"data of {number}".encode())
        with runs_on(server, tmp_path_factory.mktemp("runs") / "log") as each:
            yield each


@pytest.mark.parametrize("way", ways("iterable 2", "map 0"))
def test_the_next_start_deletes_composites_that_sigkill_left(runs: Runs, way: str) -> None:
    rng = random.Random(f"{way} {NUM_ROUNDS}")
    num_left = []
    left: set[str] = set()
    for _ in range(NUM_ROUNDS):
        group = runs.start(way, "uncaught")
        assert not left.intersection(runs.composites())
        runs.wait_somewhere(rng)
        os.killpg(group, signal.SIGKILL)
        assert runs.finish() == ["-9"]
        left = set(runs.composites())
        num_left.append(len(left))
    runs.start(way, "once")
    assert not left.intersection(runs.composites())
    assert runs.finish() == ["done", "0"], runs.log
    assert runs.composites() == []
    _log.info("%s: left by SIGKILL %s", way, num_left)
    assert sum(num_left) or NUM_ROUNDS < 10


@pytest.mark.parametrize("way", ways("iterable 0", "map 2"))
def test_ctrl_c_leaves_no_composite(runs: Runs, way: str) -> None:
    """Each process of the group gets it, as from a terminal; the script need not catch it."""
    rng = random.Random(f"{way} {NUM_ROUNDS}")
    ended = []
    num_lost = 0
    # If one was lost, another round distinguishes chance from a Ctrl-C without effect.
    while len(ended) < max(NUM_ROUNDS, 2 * num_lost):
        number = len(ended)
        group = runs.start(way, "uncaught" if number % 2 == 0 else "caught")
        runs.wait_somewhere(rng)
        os.killpg(group, signal.SIGINT)
        # One that falls into a hook or finalizer of Python is lost, and the epochs go on.
        while not runs.has_line(LOST_SECONDS):
            num_lost += 1
            os.killpg(group, signal.SIGINT)
        ended.append(runs.finish())
        assert num_lost <= max(1, NUM_ROUNDS // 10), ended
        assert runs.composites() == [], (number, ended, runs.log)
    _log.info("%s: ended %s", way, ended)


STUCK_SCRIPT = """
import multiprocessing
import sys
import aioflux
from torch.utils.data import DataLoader
from aioflux.data import IterableDataset

received = multiprocessing.Event()

def transform(sample):
    if sample.key.endswith("1"):
        received.wait()  # the thread that sends the first sample could not run beside the call
        print("stuck", flush=True)
        sum(range(10**12))  # one call in C, which runs no Python handler of a signal
    return sample.key

dataset = IterableDataset(
    "gs://bucket/", compose="on", transform=transform, endpoint_url=sys.argv[1]
)
batches = iter(DataLoader(dataset, batch_size=1, num_workers=1, collate_fn=list))
next(batches)
received.set()
sys.stdin.read(1)
raise KeyError
"""


@pytest.mark.more
def test_a_composing_worker_that_is_stuck_does_not_keep_the_process() -> None:
    """Its handler of SIGTERM cannot run: the main process kills it after some seconds."""
    with GCSServer() as server:
        server.create_bucket("bucket")
        with aioflux.sync.open_store("gs://bucket/", endpoint_url=server.url) as store:
            for number in range(10):
                store.put(f"{number:02}", b"data" * 100)
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK_SCRIPT, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"stuck\n"
        process.communicate(b"x", timeout=LOST_SECONDS)
        assert process.returncode == 1
