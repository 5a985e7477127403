"""Calls of the user's transform, with errors that name the sample, and a check that it pickles.

`outcomes` calls it inline or in threads:

    values, in order -> threads, with a limit of values and bytes -> outcomes, in order
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aioflux import _bridge
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from aioflux.data._sample import Sample

T = TypeVar("T")
V = TypeVar("V")

_MAX_PENDING: Final = 4
"""Values that are transformed, or wait for it, for each thread. They keep the threads busy while
the thread that reads waits for the slowest of them."""


def apply_transform(sample: Any, transform: Callable[[Any], Any] | None, *, uri: str = "") -> Any:
    """Return the result of `transform` for a sample, or for a record of the object `uri`."""
    if transform is None:
        return sample
    uri = uri or sample.uri
    try:
        return transform(sample)
    except (StopIteration, StopAsyncIteration) as exc:
        # Raised unchanged, StopIteration would end the caller's iteration without an error.
        raise RuntimeError(f"the transform raised {exc!r} for {uri}") from exc
    except Exception as exc:
        exc.add_note(f"while transforming {uri}")
        raise


def transform_sample(
    transform: Callable[[Any], Any] | None, indexed: tuple[int, Sample | StorageError]
) -> Any:
    """Return the item of a sample; raise the error of an object that could not be read."""
    if isinstance(indexed[1], StorageError):
        raise indexed[1]
    return indexed[1] if transform is None else apply_transform(indexed[1], transform)


def num_sample_bytes(indexed: tuple[int, Sample | StorageError]) -> int:
    """Return the size of a sample; 0 for an error."""
    return 0 if isinstance(indexed[1], StorageError) else len(indexed[1].data)


class TransformThreads:
    """Threads that transform the samples and collate the batches of one iteration."""

    def __init__(self, num_threads: int, *, max_bytes: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="aioflux-transform")
        self._is_stopped = False
        self._max_pending = _MAX_PENDING * num_threads
        self._max_bytes = max_bytes

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in a thread."""
        try:
            return self._executor.submit(function, *args)
        except RuntimeError:
            if not self._is_stopped:
                _bridge.block_at_exit()
            raise

    def apply(
        self, values: Iterable[V], call: Callable[[V], T], num_bytes: Callable[[V], int]
    ) -> Generator[tuple[V, Callable[[], T]], None, None]:
        """Yield each value with a function that returns or raises the result of its call."""
        upcoming = iter(values)
        pending: deque[tuple[V, int, Future[T]]] = deque()
        pending_bytes = 0
        is_exhausted, error = False, None
        while True:
            while (
                not is_exhausted
                and len(pending) < self._max_pending
                and pending_bytes < self._max_bytes
            ):
                try:
                    value = next(upcoming)
                except StopIteration:
                    is_exhausted = True
                except Exception as exc:  # raised below, after the outcomes of earlier values
                    is_exhausted, error = True, exc
                else:
                    pending.append((value, num_bytes(value), self.submit(call, value)))
                    pending_bytes += pending[-1][1]
            if not pending:
                break
            value, size, result = pending.popleft()
            pending_bytes -= size
            try:
                result.exception()
            except concurrent.futures.CancelledError:
                # After `stop`. The error of a future is an Exception, which would be skipped.
                raise asyncio.CancelledError from None
            yield value, result.result
        if error is not None:
            raise error

    def stop(self) -> None:
        """Cancel the calls that have not started, and accept no more."""
        self._is_stopped = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the calls in progress and for the end of the threads."""
        self._executor.shutdown()


def outcomes(
    values: Iterable[V],
    call: Callable[[V], T],
    threads: TransformThreads | None,
    *,
    num_bytes: Callable[[V], int] = lambda _: 0,
) -> Generator[tuple[V, Callable[[], T]], None, None]:
    """Yield each value, in order, with a function that returns or raises the result of its call.

    Args:
        values: Samples or records. An error of the iterable is raised after all outcomes of values
            before it.
        call: Called with each value.
        threads: Threads for the calls; None calls inline, when the outcome is requested.
        num_bytes: Returns the size of a value. Threads have a limit of bytes, which one value may
            exceed.
    """
    if threads is not None:
        yield from threads.apply(values, call, num_bytes)
        return
    for value in values:
        yield value, partial(call, value)


def check_pickles(**arguments: Any) -> None:
    """Check that arguments can be pickled, if a worker process is being started.

    Checks only functions, also inside a `partial`: their pickle is just a name, which costs little.
    Does nothing outside the start of a worker: cloudpickle, for example, can pickle lambdas.

    Raises:
        TypeError: An argument is a lambda or a local function.
    """
    if get_spawning_popen() is None:
        return
    for name, value in arguments.items():
        function = value
        while isinstance(function, partial):
            function = function.func
        if isinstance(function, FunctionType):
            try:
                ForkingPickler.dumps(function)
            except Exception as exc:
                raise TypeError(
                    f"{name}={value!r} cannot be pickled, but workers that are started by spawn or "
                    "forkserver receive a pickle of the dataset: define the function at the top of "
                    "a module, and bind arguments with functools.partial"
                ) from exc
