"""What each contender is asked to do, and the process that does it.

`python -m perf.work '<json>'` does one piece of work and prints one JSON line of what it took. With
`--wait` behind it says `ready` when it has warmed up, and goes on when it is sent a line: so two
contenders may start side by side and still be measured one after the other. Linux only.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from perf.access import ACCOUNT, sign_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = [
    "LOOPLESS",
    "WARM_UP_BYTES",
    "Work",
    "body_of",
    "bounded",
    "end_with_parent",
    "lines_key",
    "lines_prefix",
    "measure",
    "prepare",
    "set_key",
    "set_prefix",
    "state_key",
]


class Told(NamedTuple):
    """What an operation tells."""

    num_bytes: int
    """Bytes that it moved."""
    waited_seconds: float = 0.0
    """Time that their consumer waited."""
    stored_bytes: int = 0
    """Bytes that they take where they are stored, or that were read, where that is another
    number."""


Moved: TypeAlias = "int | tuple[int, float] | Told"
"""What an operation returns: the bytes that it moved; and the time that their consumer waited; or
all of it."""
MIB = 1024 * 1024
_PR_SET_PDEATHSIG = 1
LOOPLESS = frozenset(
    {
        "aioflux_async",
        "aioflux_data",
        "aioflux_checkpoint",
        "aioflux_dcp",
        "aioflux_lines",
        "aioflux_nebula",
        "aioflux_torch_save",
        "aioflux_sync",
        "aioflux_zstd",
        "dataflux",
        "dataflux_checkpoint",
        "boto3",
        "direct",
        "disk_dcp",
        "gcsfs_checkpoint",
        "gcsfs_data",
        "gcsfs_dcp",
        "google",
        "google_checkpoint",
        "litdata",
        "memory_copy",
        "obstore_data",
        "requests",
        "s3fs_lines",
        "s3torchconnector_checkpoint",
        "s3torchconnector_data",
        "s3torchconnector_dcp",
        "stock_async",
        "torch_zstd",
        "transfer_manager",
        "wrk",
        "zstd_plain",
    }
)
"""Contenders that block in threads or in a process of their own; they run without uvloop."""
TIMED = frozenset({"wrk"})
"""Contenders that work for some time, not for some requests, and are not warmed up."""
WARM_UP_BYTES = MIB
"""Size of the object that stands for a larger one in a warm-up."""
MAX_WARM_UP_OBJECTS = 128
"""Most objects of a warm-up."""


def set_prefix(size_bytes: int, count: int) -> str:
    """Return the prefix of a set of objects; the server reads both numbers from it."""
    return f"{size_bytes}x{count}/"


def set_key(size_bytes: int, count: int, index: int) -> str:
    """Return the key of one object of a set."""
    return f"{set_prefix(size_bytes, count)}{index:07d}.bin"


def lines_prefix(size_bytes: int, count: int) -> str:
    """Return the prefix of a set of shards of text."""
    return f"lines-{size_bytes}x{count}/"


def lines_key(size_bytes: int, count: int, index: int) -> str:
    """Return the key of one of them."""
    return f"{lines_prefix(size_bytes, count)}{index:07d}.txt"


def state_key(dtype: str, size_bytes: int) -> str:
    """Return the key of the object that torch.save wrote of a state."""
    return f"state-{dtype}-{size_bytes}/state.pt"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement of one contender."""

    peer: str
    """Module below `perf.peers`."""
    operation: str
    """Its function: `get_many`, `get_one`, `get_into`, `put_many` or `put_one`; `list_all` or
    `parse_all`; `load`, `stream`, `load_first` or `load_again`; `save_state` or `load_state`;
    `compress`, `decompress`, `save_compressed`, `save_plain`, `load_compressed` or `load_plain`;
    `save_dcp`, `load_dcp` or `reshard_dcp`; `stage`, `train_alone` or `train_saving`;
    `lines` or `lines_loader`."""
    url: str
    """Root of the server, `http://` or `https://`."""
    ca_file: str = ""
    """PEM of the authority that signed the server's certificate; empty where it has none."""
    bucket: str = "perf"
    """The bucket on it."""
    scheme: str = "gs"
    """What is spoken: `gs`, `s3` or `az`."""
    size_bytes: int
    """Size of each object, in bytes."""
    num_objects: int
    """Objects to read or to write."""
    num_keys: int = 64
    """Different objects; their keys come round again and again."""
    in_flight: int = 64
    """Requests under way at once."""
    range_size_bytes: int = 16 * MIB
    """Size of a range or part of a large object, in bytes."""
    is_set: bool = False
    """Whether the objects are those of a set, as many as there are objects to move."""
    batch_size: int = 1
    """Objects of a batch, where batches are loaded."""
    num_workers: int = 0
    """Processes that load them; 0 is the one that consumes. Of a distributed checkpoint: ranks that
    save it."""
    num_threads: int = 0
    """Threads in each process that loads; 0 is the contender's default."""
    compose: str = ""
    """`off`, `on` or `auto`; empty is the contender's default."""
    step_seconds: float = 0.0
    """Time that the consumer takes over each batch."""
    is_whole: bool = False
    """Whether the consumer is handed the bytes, as a tensor, or only how many there are."""
    dtype: str = ""
    """Of the tensors of a state: `bf16` or `fp32`, or one of `perf.weights.KINDS`; `size_bytes` is
    that of all of them."""
    counter: str = ""
    """Url of a page on which the server tells how many requests came; empty where it has none."""
    server_pids: tuple[int, ...] = ()
    """Processes of the server, whose CPU time is told beside the contender's."""

    @property
    def prefix(self) -> str:
        """Prefix of the set."""
        return set_prefix(self.size_bytes, self.num_objects)

    def uri(self, key: str = "") -> str:
        """Return the uri of a key, or of the bucket, as aioflux opens it."""
        root = f"{ACCOUNT}/{self.bucket}" if self.scheme == "az" else self.bucket
        return f"{self.scheme}://{root}/{key}" if key else f"{self.scheme}://{root}"

    def each_key(self) -> Iterator[str]:
        """Yield the key of each request."""
        if self.is_set:
            indices = range(self.num_objects)
            return (set_key(self.size_bytes, self.num_objects, index) for index in indices)
        return (f"{self.size_bytes}/{index % self.num_keys}" for index in range(self.num_objects))

    def body(self) -> bytes:
        """Return the bytes of one object: the same each time, so made once."""
        return body_of(self.size_bytes)

    def warm_up(self) -> Work:
        """Return the work that goes before: as many objects as in flight, or a small one.

        Clients are opened anew for what is measured, so that more connections warm nothing more.
        """
        if self.size_bytes > WARM_UP_BYTES:
            return replace(self, size_bytes=WARM_UP_BYTES, num_objects=1, num_keys=1)
        count = min(self.in_flight, self.num_objects, MAX_WARM_UP_OBJECTS)
        return replace(self, num_objects=count)


@cache
def _random_bytes() -> bytes:
    return random.Random(0).randbytes(MIB)  # noqa: S311  no secret


@lru_cache(maxsize=1)
def body_of(size_bytes: int) -> bytes:
    """Return so many bytes, each in memory that was written: zeros of the kernel are not read.

    A large body is the same MiB again and again.
    """
    block = _random_bytes()
    return (block * -(-size_bytes // len(block)))[:size_bytes]


def prepare(work: Work) -> None:
    """Make what the work starts from, outside the measured part.

    That is the bytes of an object or the state to write, or the pages to parse.

    An adapter whose library starts from something else has a `prepare` of its own.
    """
    if work.operation.startswith("put"):
        work.body()
    elif work.operation == "save_state":
        importlib.import_module("perf.states").state_of(work.dtype, work.size_bytes)
    elif work.operation == "parse_all":
        importlib.import_module("perf.pages").pages(work)


async def bounded(one: Callable[[str], Awaitable[int]], work: Work) -> int:
    """Sum `await one(key)` over the keys, with `in_flight` under way at once."""
    keys = work.each_key()

    async def worker() -> int:
        total = 0
        for key in keys:
            total += await one(key)
        return total

    return sum(await asyncio.gather(*(worker() for _ in range(work.in_flight))))


def resident_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def own_cpu_seconds() -> float:
    """Return the CPU time of this process and of those children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cpu_seconds_of(pids: tuple[int, ...]) -> float:
    """Return the CPU time of other processes, from /proc: in hundredths of a second."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _checked(work: Work, num_bytes: int) -> int:
    """Return how many objects these bytes are, which must be all that were asked for."""
    num_objects, rest = divmod(num_bytes, work.size_bytes)
    is_short = num_objects != work.num_objects and work.peer not in TIMED
    if rest or num_objects == 0 or is_short:
        raise RuntimeError(f"{work.peer} moved {num_bytes} bytes: {work}")
    return num_objects


def measure(work: Work, *, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Do the work and return what it took.

    Args:
        work: What to do.
        wait: Called between the warm-up and the part that is measured.

    Returns:
        `seconds`; `cpu_seconds`, its ended children's among them; `server_cpu_seconds`;
        `num_objects` and `num_bytes` moved; `num_requests` that came to the server, where it tells,
        `waited_seconds` of a consumer of batches, `stored_bytes` where tensors are compressed;
        `idle_bytes` resident before, the body of an
        object to write among them; `peak_bytes` resident at most meanwhile, without children.
    """
    sign_in(work)
    adapter = importlib.import_module(f"perf.peers.{work.peer}")
    operation = getattr(adapter, work.operation)
    with asyncio.Runner(loop_factory=_loop_factory(work.peer)) as runner:
        if work.peer not in TIMED:
            warm_up = work.warm_up()
            moved = runner.run(_coroutine(operation, warm_up))
            _checked(warm_up, moved[0] if isinstance(moved, tuple) else moved)
        gc.collect()
        wait()
        # Only now: of two contenders that have started side by side, one holds a large body.
        getattr(adapter, "prepare", prepare)(work)
        # The kernel's mark of the most that was ever resident starts anew; getrusage's cannot, and
        # begins with what the process held that this one came from.
        Path("/proc/self/clear_refs").write_text("5")
        idle_bytes = resident_bytes("VmRSS")
        server_begun, cpu_begun = cpu_seconds_of(work.server_pids), own_cpu_seconds()
        num_requests = _num_requests(work)
        begun = time.perf_counter()
        moved = runner.run(_coroutine(operation, work))
        seconds = time.perf_counter() - begun
        cpu_seconds = own_cpu_seconds() - cpu_begun
        server_cpu_seconds = cpu_seconds_of(work.server_pids) - server_begun
        # The question after it is counted, too.
        num_requests = max(0, _num_requests(work) - num_requests - 1)
        peak_bytes = resident_bytes("VmHWM")
    getattr(adapter, "finish", _nothing)(work)
    told = Told(*moved) if isinstance(moved, tuple) else Told(moved)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "server_cpu_seconds": server_cpu_seconds,
        "num_objects": _checked(work, told.num_bytes),
        "num_bytes": told.num_bytes,
        "num_requests": num_requests,
        "waited_seconds": told.waited_seconds,
        "stored_bytes": told.stored_bytes,
        "idle_bytes": idle_bytes,
        # The kernel sums its counts up now and then only: the mark may lag behind.
        "peak_bytes": max(idle_bytes, peak_bytes),
    }


def _nothing(_: Work) -> None:
    """Do what most adapters do when all is measured."""


async def _coroutine(operation: Callable[[Work], Awaitable[Moved]], work: Work) -> Moved:
    return await operation(work)


def _num_requests(work: Work) -> int:
    """Return how many requests have come to the server, this one among them; 0 if it tells none."""
    if not work.counter:
        return 0
    with urllib.request.urlopen(work.counter) as answer:  # noqa: S310  http to our own server
        found = re.search(rb"requests\s+\d+ \d+ (\d+)", answer.read())
    assert found is not None
    return int(found[1])


def _loop_factory(peer: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if peer in LOOPLESS:
        return None
    # Only here: who runs without it does not pay for its import.
    import uvloop

    return uvloop.new_event_loop


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, and likewise those forked from it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_line() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("perf.work: nobody waits for this work any more")


def main() -> None:
    """Do the work that the first argument describes."""
    end_with_parent()
    # What the kernel was asked for is not inherited.
    os.register_at_fork(after_in_child=end_with_parent)
    fields = json.loads(sys.argv[1])
    fields["server_pids"] = tuple(fields.get("server_pids", ()))
    work = Work(**fields)
    is_waiting = "--wait" in sys.argv[2:]
    result = measure(work, wait=_wait_for_line) if is_waiting else measure(work)
    print(json.dumps({"work": asdict(work), **result}), flush=True)
    # Nothing is left to do, and the next contender waits for this process to be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
