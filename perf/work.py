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
import signal
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from perf._meter import METER, resident_bytes, steady

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = [
    "ON_LOOP",
    "WARM_UP_BYTES",
    "Moved",
    "OperationResult",
    "Work",
    "body_of",
    "bounded",
    "end_with_parent",
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
    figures: dict[str, float] | None = None
    """Figures that replace those of `measure`, if the operation measured a part of itself."""


Moved: TypeAlias = "int | OperationResult"
"""Return value of an operation: `num_bytes`, or all fields."""
MIB = 1024 * 1024
_PR_SET_PDEATHSIG = 1
ON_LOOP = frozenset(
    {
        "aioflux",
        "aioflux_unverified",
        "gcloud_aio",
        "gcsfs",
        "obstore",
        "obstore_crc32c",
        "obstore_ranges",
        "raw",
    }
)
"""Contenders that use the event loop. The others (threads or processes) run without uvloop."""
TIMED = frozenset({"wrk"})
"""Contenders that run for a fixed time, not a number of requests; they have no warm-up."""
WARM_UP_BYTES = MIB
"""Size of the object that is used in the warm-up instead of a larger one."""
MAX_WARM_UP_OBJECTS = 128
"""Maximum number of objects of a warm-up."""
OPENING_BYTES = 256 * MIB
"""Maximum size of the objects that are moved before the measured part."""


def set_prefix(size_bytes: int, count: int) -> str:
    """Return the prefix of a set of objects; the server parses both numbers from the prefix."""
    return f"{size_bytes}x{count}/"


def set_key(size_bytes: int, count: int, index: int) -> str:
    """Return the key of one object of a set."""
    return f"{set_prefix(size_bytes, count)}{index:07d}.bin"


def state_key(dtype: str, size_bytes: int) -> str:
    """Return the key of the object in which torch.save stored a state."""
    return f"state-{dtype}-{size_bytes}/state.pt"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement of one contender."""

    peer: str
    """Module below `perf.peers`."""
    operation: str
    """Function of the peer, for example `get_many`. Or `open_get`: its `get_many`, by a new client
    for each object."""
    url: str = ""
    """Root url of the server, `http://` or `https://`; set when the server has started."""
    ca_file: str = ""
    """PEM file of the authority that signed the server's certificate; empty without TLS."""
    bucket: str = "perf"
    """Bucket on the server."""
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
    step_seconds: float = 0.0
    """Time that the consumer sleeps after each batch."""
    is_image: bool = False
    """Whether an item also has an image, decoded from a JPEG of about 100 KiB."""
    dtype: str = ""
    """Dtype of the tensors of a state, `bf16` or `fp32`; `size_bytes` is then the size of all."""
    counter: str = ""
    """Url of the server's page with its number of requests; empty if it has none."""
    server_pids: tuple[int, ...] = ()
    """Processes of the server, whose CPU time is measured too."""
    has_opening: bool = False
    """Whether the measured part includes opening and closing the client."""

    @property
    def prefix(self) -> str:
        """Prefix of the set."""
        return set_prefix(self.size_bytes, self.num_objects)

    def uri(self, key: str = "") -> str:
        """Return the uri of a key, or of the bucket."""
        return f"gs://{self.bucket}/{key}" if key else f"gs://{self.bucket}"

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

        It imports the modules. The operation opens another client.
        """
        if self.size_bytes > WARM_UP_BYTES:
            return replace(self, size_bytes=WARM_UP_BYTES, num_objects=1, num_keys=1)
        count = min(self.in_flight, self.num_objects, MAX_WARM_UP_OBJECTS)
        return replace(self, num_objects=count)

    def opening(self) -> Work:
        """Return the work that opens the connections of a client, before the measured part.

        One object for each request in flight, with `OPENING_BYTES` at most; or one small state; or
        one object of a range for each request in flight.
        """
        if self.dtype:
            return replace(self, size_bytes=min(self.size_bytes, WARM_UP_BYTES), num_objects=1)
        if self.num_objects == 1:
            size = min(self.size_bytes, self.in_flight * self.range_size_bytes)
            return replace(self, size_bytes=size)
        most = max(1, OPENING_BYTES // self.size_bytes)
        return replace(self, num_objects=min(self.in_flight, self.num_objects, most))


@cache
def _random_bytes() -> bytes:
    return random.Random(0).randbytes(MIB)  # noqa: S311  no secret


@lru_cache(maxsize=2)  # and the object that opens the connections
def body_of(size_bytes: int) -> bytes:
    """Return `size_bytes` random bytes: one MiB, repeated.

    All of the memory is written, so that reading it does not read the kernel's zero page.
    """
    block = _random_bytes()
    return (block * -(-size_bytes // len(block)))[:size_bytes]


def prepare(work: Work) -> None:
    """Create the input of the work: the bytes or state to write.

    It runs before the measured part. A peer that needs another input has its own `prepare`.
    """
    if work.operation.startswith("put"):
        work.opening().body()
        work.body()
    elif work.operation == "save_state":
        importlib.import_module("perf.states").state_of(work.dtype, work.size_bytes)


async def bounded(one: Callable[[str], Awaitable[int]], work: Work) -> int:
    """Return the sum of `await one(key)` over all keys, with `in_flight` concurrent calls."""

    async def worker(keys: Iterator[str]) -> int:
        total = 0
        for key in keys:
            total += await one(key)
        return total

    async def move(work: Work) -> int:
        keys = work.each_key()
        return sum(await asyncio.gather(*(worker(keys) for _ in range(work.in_flight))))

    return await steady(move, work)


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
        `num_objects` and `num_bytes` moved; `num_faults`, the page faults; `num_requests` that the
        server received, if it counts them; `waited_seconds` of the consumer of batches;
        `idle_bytes`, the resident memory before the client is opened, with the body to write;
        `peak_bytes`, the maximum resident memory of the measured part, without children; and the
        operation's own `figures`.
    """
    adapter = importlib.import_module(f"perf.peers.{work.peer}")
    operation = _operation(adapter, work)
    with asyncio.Runner(loop_factory=_loop_factory(work.peer)) as runner:
        if work.peer not in TIMED:
            warm_up = replace(work.warm_up(), has_opening=True)
            _checked(warm_up, _result(runner.run(_coroutine(operation, warm_up))).num_bytes)
        gc.collect()
        wait()
        # After `wait`: of the two contenders that started together, only one has a large body.
        getattr(adapter, "prepare", prepare)(work)
        idle_bytes = resident_bytes("VmRSS")
        METER.begin(work)  # and again by an operation that opens a client
        moved = runner.run(_coroutine(operation, work))
        METER.end(work)
    figures, peak_bytes = METER.figures()
    getattr(adapter, "finish", _nothing)(work)
    result = _result(moved)
    own_figures = result.figures or {"num_objects": _checked(work, result.num_bytes)}
    return {
        **asdict(figures),
        "num_bytes": result.num_bytes,
        "waited_seconds": result.waited_seconds,
        "idle_bytes": idle_bytes,
        # The kernel updates VmHWM with a delay: it can be lower than an earlier VmRSS.
        "peak_bytes": max(idle_bytes, peak_bytes),
        **own_figures,
    }


def _result(moved: Moved) -> OperationResult:
    return OperationResult(moved) if isinstance(moved, int) else moved


def _operation(adapter: Any, work: Work) -> Callable[[Work], Awaitable[Moved]]:
    if work.operation == "open_get":
        return partial(_open_get, adapter.get_many)
    operation: Callable[[Work], Awaitable[Moved]] = getattr(adapter, work.operation)
    return operation


async def _open_get(get_many: Callable[[Work], Awaitable[int]], work: Work) -> int:
    """Read each object with a client of its own, one after the other."""
    one = replace(work, num_objects=1, has_opening=True)
    return sum([await get_many(one) for _ in range(work.num_objects)])


def _nothing(_: Work) -> None:
    """Default of a peer's `finish`, which runs after the measurement: do nothing."""


async def _coroutine(operation: Callable[[Work], Awaitable[Moved]], work: Work) -> Moved:
    return await operation(work)


def _loop_factory(peer: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if peer not in ON_LOOP:
        return None
    # Imported here: other contenders must not pay for the import.
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
