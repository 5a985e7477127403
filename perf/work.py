"""The work of one sample, and the process that measures it.

`python -m perf.work '<json>'` does one `Work` and prints its figures as a JSON line. With `--wait`,
the process prints `ready` after its warm-up, and starts the measurement when it receives a line on
standard input. So two contenders can start at the same time and are measured one after the other.
Linux only.
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
    "BLOCKING",
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


class OperationResult(NamedTuple):
    """Result of an operation of a peer."""

    num_bytes: int
    """Bytes that were read or written."""
    waited_seconds: float = 0.0
    """Time that the consumer waited for batches."""
    stored_bytes: int = 0
    """Compressed size, or bytes that were read from the server, if it differs from `num_bytes`."""
    figures: dict[str, float] | None = None
    """Figures that replace those of `measure`, if the operation measured a part of itself."""


Moved: TypeAlias = "int | tuple[int, float] | OperationResult"
"""Return value of an operation: `num_bytes`, `(num_bytes, waited_seconds)`, or all fields."""
MIB = 1024 * 1024
_PR_SET_PDEATHSIG = 1
BLOCKING = frozenset(
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
        "s3torchconnector",
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
"""Contenders that do not use the event loop (threads or processes); they run without uvloop."""
TIMED = frozenset({"wrk"})
"""Contenders that run for a fixed time, not a number of requests; they have no warm-up."""
WARM_UP_BYTES = MIB
"""Size of the object that is used in the warm-up instead of a larger one."""
MAX_WARM_UP_OBJECTS = 128
"""Maximum number of objects of a warm-up."""


def set_prefix(size_bytes: int, count: int) -> str:
    """Return the prefix of a set of objects; the server parses both numbers from the prefix."""
    return f"{size_bytes}x{count}/"


def set_key(size_bytes: int, count: int, index: int) -> str:
    """Return the key of one object of a set."""
    return f"{set_prefix(size_bytes, count)}{index:07d}.bin"


def lines_prefix(size_bytes: int, count: int) -> str:
    """Return the prefix of a set of shards of text."""
    return f"lines-{size_bytes}x{count}/"


def lines_key(size_bytes: int, count: int, index: int) -> str:
    """Return the key of one shard of text."""
    return f"{lines_prefix(size_bytes, count)}{index:07d}.txt"


def state_key(dtype: str, size_bytes: int) -> str:
    """Return the key of the object in which torch.save stored a state."""
    return f"state-{dtype}-{size_bytes}/state.pt"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement of one contender."""

    peer: str
    """Module below `perf.peers`."""
    operation: str
    """Function of the peer: `get_many`, `get_one`, `get_into`, `put_many` or `put_one`; `list_all`
    or `parse_all`; `load`, `stream`, `load_first` or `load_again`; `save_state` or `load_state`;
    `compress`, `decompress`, `save_compressed`, `save_plain`, `load_compressed` or `load_plain`;
    `first_get`; `save_dcp`, `load_dcp` or `reshard_dcp`; `stage`, `train_alone` or `train_saving`;
    `lines` or `lines_loader`."""
    url: str
    """Root url of the server, `http://` or `https://`."""
    ca_file: str = ""
    """PEM file of the authority that signed the server's certificate; empty without TLS."""
    bucket: str = "perf"
    """Bucket on the server."""
    scheme: str = "gs"
    """Protocol of the server: `gs`, `s3` or `az`."""
    size_bytes: int
    """Size of each object, in bytes."""
    num_objects: int
    """Objects to read or to write."""
    num_keys: int = 64
    """Number of different objects; their keys are repeated in a cycle."""
    in_flight: int = 64
    """Maximum number of requests in flight."""
    range_size_bytes: int = 16 * MIB
    """Size of a range or part of a large object, in bytes."""
    is_set: bool = False
    """Whether the objects are a set (`set_key`) of `num_objects` objects."""
    batch_size: int = 1
    """Objects in a batch, for operations that load batches."""
    num_workers: int = 0
    """DataLoader workers; with 0 the consumer loads in its own process. For distributed
    checkpoints: the number of ranks that save."""
    num_threads: int = 0
    """Threads in each loading process, or event loops of one; 0 is the contender's default."""
    compose: str = ""
    """`off`, `on` or `auto`; empty is the contender's default."""
    step_seconds: float = 0.0
    """Time that the consumer sleeps after each batch."""
    utilization: float = 0.0
    """Required utilization of emulated accelerators, whose largest number is searched; 0 for an
    epoch. See `perf.peers._accelerators`."""
    trial_seconds: float = 0.0
    """Duration of the measured part of each run of this search; with 0 there is one short run."""
    prefetch_batches: int = 0
    """Batches that all workers prefetch; 0 is the loader's default."""
    record_bytes: int = 0
    """Size of a record, for objects of many records; 0 if one object is one sample."""
    item_bytes: int = 0
    """Size of an item, the same constant tensor for each sample; 0 for the item of `is_whole`."""
    is_whole: bool = False
    """Whether an item is the bytes of an object, as a tensor, or only their number."""
    is_image: bool = False
    """Whether an item also has an image, decoded from a JPEG of about 100 KiB."""
    dtype: str = ""
    """Dtype of the tensors of a state: `bf16` or `fp32`, or one of `perf.weights.KINDS`;
    `size_bytes` is then the size of all tensors."""
    counter: str = ""
    """Url of the server's page with its number of requests; empty if it has none."""
    server_pids: tuple[int, ...] = ()
    """Processes of the server, whose CPU time is measured too."""

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
        """Return the bytes of one object: cached, and the same for every object."""
        return body_of(self.size_bytes)

    def warm_up(self) -> Work:
        """Return the work of the warm-up: one object for each request in flight, or a small object.

        The measured part opens a new client, so that a longer warm-up would have no effect.
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
    """Return `size_bytes` random bytes: one MiB, repeated.

    All of the memory is written, so that reading it does not read the kernel's zero page.
    """
    block = _random_bytes()
    return (block * -(-size_bytes // len(block)))[:size_bytes]


def prepare(work: Work) -> None:
    """Create the input of the work: the bytes or state to write, or the pages to parse.

    It runs before the measured part. A peer that needs another input has its own `prepare`.
    """
    if work.operation.startswith("put"):
        work.body()
    elif work.operation == "save_state":
        importlib.import_module("perf.states").state_of(work.dtype, work.size_bytes)
    elif work.operation == "parse_all":
        importlib.import_module("perf.pages").pages(work)


async def bounded(one: Callable[[str], Awaitable[int]], work: Work) -> int:
    """Return the sum of `await one(key)` over all keys, with `in_flight` concurrent calls."""
    keys = work.each_key()

    async def worker() -> int:
        total = 0
        for key in keys:
            total += await one(key)
        return total

    return sum(await asyncio.gather(*(worker() for _ in range(work.in_flight))))


def resident_bytes(field: str, pid: int | str = "self") -> int:
    """Return VmRSS or VmHWM of a process, by default of this one."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def own_cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have exited."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cpu_seconds_of(pids: tuple[int, ...]) -> float:
    """Return the CPU time of other processes, from /proc, with a resolution of 0.01 s."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _checked(work: Work, num_bytes: int) -> int:
    """Return the number of objects that were moved.

    Raises:
        RuntimeError: Not all bytes of all objects were moved.
    """
    num_objects, rest = divmod(num_bytes, work.size_bytes)
    is_short = num_objects != work.num_objects and work.peer not in TIMED
    if rest or num_objects == 0 or is_short:
        raise RuntimeError(f"{work.peer} moved {num_bytes} bytes: {work}")
    return num_objects


def measure(work: Work, *, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Do the work and return its figures.

    Args:
        work: The work.
        wait: Called between the warm-up and the measured part.

    Returns:
        `seconds`; `cpu_seconds`, with children that have exited; `server_cpu_seconds`;
        `num_objects` and `num_bytes` moved; `num_requests` that the server received, if it counts
        them; `waited_seconds` of the consumer of batches; `stored_bytes` of compressed tensors;
        `idle_bytes`, the resident memory before the measured part, with the body to write;
        `peak_bytes`, the maximum resident memory of the measured part, without children;
        and the operation's own `figures`.
    """
    sign_in(work)
    adapter = importlib.import_module(f"perf.peers.{work.peer}")
    operation = getattr(adapter, work.operation)
    with asyncio.Runner(loop_factory=_loop_factory(work.peer)) as runner:
        if work.peer not in TIMED and not work.utilization:
            warm_up = work.warm_up()
            moved = runner.run(_coroutine(operation, warm_up))
            _checked(warm_up, moved[0] if isinstance(moved, tuple) else moved)
        gc.collect()
        wait()
        # After `wait`: of the two contenders that started together, only one has a large body.
        getattr(adapter, "prepare", prepare)(work)
        # Reset VmHWM, the maximum resident size. ru_maxrss of getrusage cannot be reset, and starts
        # with the value of the parent process.
        Path("/proc/self/clear_refs").write_text("5")
        idle_bytes = resident_bytes("VmRSS")
        server_begun, cpu_begun = cpu_seconds_of(work.server_pids), own_cpu_seconds()
        num_requests = _num_requests(work)
        begun = time.perf_counter()
        moved = runner.run(_coroutine(operation, work))
        seconds = time.perf_counter() - begun
        cpu_seconds = own_cpu_seconds() - cpu_begun
        server_cpu_seconds = cpu_seconds_of(work.server_pids) - server_begun
        # The second request for the counter is counted, too.
        num_requests = max(0, _num_requests(work) - num_requests - 1)
        peak_bytes = resident_bytes("VmHWM")
    getattr(adapter, "finish", _nothing)(work)
    told = OperationResult(*moved) if isinstance(moved, tuple) else OperationResult(moved)
    figures = told.figures or {"num_objects": _checked(work, told.num_bytes)}
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "server_cpu_seconds": server_cpu_seconds,
        "num_bytes": told.num_bytes,
        "num_requests": num_requests,
        "waited_seconds": told.waited_seconds,
        "stored_bytes": told.stored_bytes,
        "idle_bytes": idle_bytes,
        # The kernel updates VmHWM with a delay: it can be lower than an earlier VmRSS.
        "peak_bytes": max(idle_bytes, peak_bytes),
        **figures,
    }


def _nothing(_: Work) -> None:
    """Default of a peer's `finish`, which runs after the measurement: do nothing."""


async def _coroutine(operation: Callable[[Work], Awaitable[Moved]], work: Work) -> Moved:
    return await operation(work)


def _num_requests(work: Work) -> int:
    """Return the number of requests that the server received, with this one; 0 if unknown."""
    if not work.counter:
        return 0
    with urllib.request.urlopen(work.counter) as answer:  # noqa: S310  http to our own server
        found = re.search(rb"requests\s+\d+ \d+ (\d+)", answer.read())
    assert found is not None
    return int(found[1])


def _loop_factory(peer: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if peer in BLOCKING:
        return None
    # Imported here: blocking contenders must not pay for the import.
    import uvloop

    return uvloop.new_event_loop


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_line() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("perf.work: standard input was closed before the measurement")


def main() -> None:
    """Do the work that the first argument describes."""
    end_with_parent()
    # A forked child does not inherit the setting.
    os.register_at_fork(after_in_child=end_with_parent)
    fields = json.loads(sys.argv[1])
    fields["server_pids"] = tuple(fields.get("server_pids", ()))
    work = Work(**fields)
    is_waiting = "--wait" in sys.argv[2:]
    result = measure(work, wait=_wait_for_line) if is_waiting else measure(work)
    print(json.dumps({"work": asdict(work), **result}), flush=True)
    # Skip the clean-up of the interpreter: the next contender waits for the exit of this process.
    os._exit(0)


if __name__ == "__main__":
    main()
