"""Prefaulting of memory: one madvise call instead of a page fault for every 4 KiB.

New memory and mappings of files fault page by page. For 1 GiB these are 262,144 page faults. They
take 0.33 s of the 0.72 s of CPU time of a write over loopback, and 0.7 s of the 1.3 s of a read.
One madvise call for each part or range takes about half as long. For reads, a thread calls madvise
while the event loop receives: a read of 1 GiB over 16 connections of 50 MB/s each takes 1.5 s
instead of 1.95 s, and a read over loopback runs at 0.82 GB/s instead of 0.72 (obstore: 0.56).
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from aioflux._concurrency.run_to_completion import wait_until_done
from aioflux._values.checksums import address_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    _Madvise: TypeAlias = Callable[[int, int, int], int]

LEAST_THREADED_BYTES: Final = 1024 * 1024
"""Smaller memory is used without another thread: the crossing to a thread takes 0.1 ms."""
_PAGE_BYTES: Final = 4096
_STEP_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one call in the thread, about two milliseconds. A completed read waits for the current
call to return."""
_DELAY_SECONDS: Final = 0.001
"""Delay before the thread starts. The request is sent first, and a fast response needs no thread.
"""
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
"""Both need Linux 5.14 (madvise(2)). An older kernel rejects the call; pages then fault as usual.
"""

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_madvise: _Madvise | None = None
if _libc is not None:
    _mincore = _libc["mincore"]
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    _madvise = _libc["madvise"]
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prefault(view: memoryview, madvise: _Madvise | None = _madvise) -> None:
    """Make memory resident before it is read; memory below 1 MiB is left alone.

    Args:
        view: The memory.
        madvise: `madvise` of libc; None on other systems than Linux.
    """
    if madvise is None or view.nbytes < LEAST_THREADED_BYTES:
        return
    with address_of(view) as begin:
        if not _is_resident(begin, view.nbytes):
            _advise(madvise, begin, view.nbytes, _MADV_POPULATE_READ)


def populate(view: memoryview) -> None:
    """Allocate memory now, without the GIL, on Linux 5.14 and later."""
    if _madvise is not None:
        with address_of(view) as begin:
            _advise(_madvise, begin, view.nbytes, _MADV_POPULATE_WRITE)


class Prefaulter:
    """A background thread that makes memory resident before received bytes are written to it.

    The thread starts when it is first needed; `close` stops it.

    Args:
        madvise: `madvise` of libc; None on other systems than Linux.
    """

    def __init__(self, madvise: _Madvise | None = _madvise) -> None:
        self._madvise = madvise
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False

    @asynccontextmanager
    async def during(self, view: memoryview) -> AsyncIterator[None]:
        """Make `view` resident during its request; on exit the thread no longer uses `view`."""
        if self._madvise is None:
            yield
            return
        job = _Job(view, self._madvise)
        timer = asyncio.get_running_loop().call_later(_DELAY_SECONDS, self._start, job)
        try:
            yield
        finally:
            timer.cancel()
            await job.finish()

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        self._drop_thread()

    def _drop_thread(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _start(self, job: _Job) -> None:
        if self._is_closed or job.is_resident():
            return
        if self._executor is None:
            # One thread is faster than a network, and leaves the other processors to the program.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioflux-prefault")
        try:
            job.future = self._executor.submit(job.run)
        except RuntimeError:
            # The interpreter is shutting down, or the process has reached its limit of threads.
            job.view = None
            self._drop_thread()


class _Job:
    """Memory to make resident.

    Attributes:
        view: The memory. None after the request, because the executor may keep the job longer; or
            if the thread could not be started.
        future: Future of `run` in the thread; None before the job is submitted.
    """

    def __init__(self, view: memoryview, madvise: _Madvise) -> None:
        self.view: memoryview | None = view
        self._madvise = madvise
        self.future: Future[None] | None = None
        self._is_finished = False

    def is_resident(self) -> bool:
        """Return whether the memory is already resident, or released."""
        if self.view is None:
            return True
        with address_of(self.view) as begin:
            return _is_resident(begin, self.view.nbytes)

    def run(self) -> None:
        """Make the memory resident in steps, until `finish` is called."""
        view = self.view
        if view is None:
            return
        with address_of(view) as begin:
            for offset in range(0, view.nbytes, _STEP_BYTES):
                if self._is_finished:
                    break
                num_bytes = min(_STEP_BYTES, view.nbytes - offset)
                _advise(self._madvise, begin + offset, num_bytes, _MADV_POPULATE_WRITE)

    async def finish(self) -> None:
        """Wait until the thread no longer uses the memory, even if the caller is cancelled.

        The caller may free the memory as soon as this returns.
        """
        self._is_finished = True
        cancelled: asyncio.CancelledError | None = None
        if self.future is not None and not self.future.cancel():
            # Waits for one step at most. A failure in the thread does not affect the read.
            cancelled = await wait_until_done(asyncio.wrap_future(self.future))
        self.view = None
        if cancelled is not None:
            raise cancelled


def _is_resident(begin: int, num_bytes: int) -> bool:
    """Return whether memory is resident, judged by its middle page."""
    middle = (begin + num_bytes // 2) & -_PAGE_BYTES
    flags = ctypes.create_string_buffer(1)
    # If mincore fails, return True, so that the memory is left alone.
    return _mincore(middle, _PAGE_BYTES, flags) != 0 or bool(flags.raw[0] & 1)


def _advise(madvise: _Madvise, begin: int, num_bytes: int, advice: int) -> None:
    # madvise needs an address at the start of a page.
    first = begin & -_PAGE_BYTES
    madvise(first, begin + num_bytes - first, advice)
