"""Copies from sources of the test, counts of progress, threads, and the notice of long retries."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import RetryPolicy, TransientError, open_store
from aioflux._transfer.retry import with_retry
from aioflux.cli._cp.copier import Copier, StandardStreams, StoreObjects
from aioflux.cli._cp.local_files import FileThreads, LocalFiles
from aioflux.cli._cp.plan import LARGE_BYTES, CopyJob
from aioflux.cli._event_loop import run as run_command
from aioflux.cli._output import Report, call_in_daemon_thread
from aioflux.cli._progress import CommandProgress, amount
from aioflux.errors import ChecksumError
from tests.cli.conftest import read_files

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def test_long_retries_are_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Short ones are not."""

    def work(num_failures: int, **options: Any) -> Callable[[], Coroutine[Any, Any, int]]:
        now = [0.0]

        async def sleep(seconds: float) -> None:
            now[0] += seconds

        async def attempt(number: int) -> int:
            if number <= num_failures:
                raise TransientError("could not list gs://b/: \x1b[2J no\nconnection")
            return 0

        return lambda: with_retry(
            attempt,
            RetryPolicy(),
            clock=lambda: now[0],
            sleep=sleep,
            jitter=lambda: 0.9,
            **options,
        )

    assert run_command(work(1)) == 0
    assert capsys.readouterr().err == ""
    assert run_command(work(7)) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("Still retrying: ")
    assert line.isprintable()
    assert "could not list gs://b/: \\x1b[2J no\\nconnection" in line
    assert run_command(work(7, count=lambda _: False)) == 0, "also of retries that are only counted"
    assert capsys.readouterr().err == f"{line}\n"


async def test_a_cancelled_call_ends_when_its_thread_has_ended() -> None:
    threads = FileThreads()
    begun, went_on, ended = threading.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        begun.set()
        threads.stop.wait(60)  # set by the cancellation
        # The loop runs twice meanwhile: a caller that does not wait would have returned by then.
        loop.call_soon_threadsafe(loop.call_soon, went_on.set)
        went_on.wait(60)
        ended.set()

    call = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


async def test_a_cancelled_call_whose_thread_fails_is_cancelled() -> None:
    threads = FileThreads()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        threads.stop.wait(60)
        raise ValueError("too late")

    call = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_results_and_errors_of_threads_are_those_of_the_call() -> None:
    def fail() -> None:
        raise ValueError("said")

    for run in (FileThreads().run, call_in_daemon_thread):
        assert await run(int, "7") == 7
        with pytest.raises(ValueError, match="said"):
            await run(fail)


async def test_a_cancelled_call_does_not_wait_for_a_daemon_thread() -> None:
    begun, released = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        released.wait(60)

    call = asyncio.create_task(call_in_daemon_thread(work))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not released.is_set()
    released.set()


class DamagedSource:
    """A source whose large object fails verification, the first times that it is read."""

    def __init__(self, times: int) -> None:
        self.num_reads = 0
        self._times = times

    async def read_many(self, jobs):
        raise NotImplementedError(jobs)

    async def pieces(self, job):
        self.num_reads += 1
        is_damaged = self.num_reads <= self._times
        yield b"wrong" if is_damaged else b"right"
        if is_damaged:
            raise ChecksumError("it is damaged", uri=job.source)


@pytest.mark.parametrize(
    ("times", "num_reads", "found"),
    [(0, 1, {"k": b"right"}), (2, 3, {"k": b"right"}), (3, 3, {})],
    ids=["never", "twice", "always"],
)
async def test_a_large_object_is_read_three_times(tmp_path, times, num_reads, found) -> None:
    path = str(tmp_path / "k")

    async def jobs():
        yield CopyJob("gs://b/k", path, "", path, LARGE_BYTES + 1)

    source, progress, report = DamagedSource(times), CommandProgress(), Report()
    files = LocalFiles(FileThreads(), no_clobber=False)
    await Copier(source, files, progress, report).run(jobs())
    assert source.num_reads == num_reads
    assert read_files(tmp_path) == found
    assert report.num_failed == (not found)
    assert progress.num_bytes == (LARGE_BYTES + 1 if found else 0)


async def test_standard_output_gets_no_byte_twice(capfd) -> None:
    async def jobs():
        yield CopyJob("gs://b/k", "standard output", "", "", LARGE_BYTES + 1)

    source, report = DamagedSource(1), Report()
    await Copier(source, StandardStreams(), CommandProgress(), report).run(jobs())
    assert (source.num_reads, report.num_failed) == (1, 1)
    assert capfd.readouterr().out == "wrong"


def test_progress_counts_objects_if_all_are_empty() -> None:
    progress = CommandProgress()
    for size in (0, 0):
        progress.plan(size)
    progress.finish(0)
    assert progress.completed == (1, 2)
    progress.plan(5)
    assert progress.completed == (0, 5)
    progress.plan(-1)
    assert progress.completed == (0, None)


def test_progress_has_no_total_before_the_listing_ends() -> None:
    """Nine tenths of what is listed so far may be less than a half of all."""
    progress = CommandProgress(num_listings=1)
    for _ in range(2):
        progress.plan(1024)
    progress.finish(1024)
    assert progress.completed == (1024, None)
    assert amount(progress) == "1.0 KiB, 1 of 2 found so far"
    progress.num_listings = 0
    assert progress.completed == (1024, 2048)
    assert amount(progress) == "1.0 KiB of 2.0 KiB, 1 of 2"


async def test_the_total_is_known_when_the_listing_has_ended(cli_server, bucket, tmp_path) -> None:
    """Batches are copied while the listing continues."""
    progress, seen = CommandProgress(num_listings=1), []
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(b"x")

    async def jobs():
        for number in range(200):
            path = str(tmp_path / f"{number}")
            yield CopyJob(path, f"{bucket.uri}/{number}", path, str(number), 1)
            seen.append(progress.completed[1])

    async with open_store(bucket.uri, endpoint_url=cli_server.url) as store:
        files = LocalFiles(FileThreads(), no_clobber=False)
        await Copier(files, StoreObjects(store), progress, Report()).run(jobs())
    assert seen == [None] * 200
    assert progress.completed == (200, 200)


async def test_a_file_that_is_gone_does_not_stop_the_others(cli_server, bucket, tmp_path) -> None:
    """It was there when the directory was listed."""
    (tmp_path / "here").write_bytes(b"1")
    jobs = [
        CopyJob(str(tmp_path / name), f"{bucket.uri}/{name}", str(tmp_path / name), name, 1)
        for name in ("gone", "here")
    ]
    bodies = await LocalFiles(FileThreads(), no_clobber=False).read_many(jobs)
    async with open_store(bucket.uri, endpoint_url=cli_server.url) as store:
        gone, here = await StoreObjects(store).write_many(jobs, bodies)
    assert isinstance(gone, FileNotFoundError)
    assert here is None
    assert bucket.contents() == {"here": b"1"}


async def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path) -> None:

    path = tmp_path / "file"
    path.write_bytes(b"x" * (LARGE_BYTES + 1))
    job = CopyJob(str(path), "", str(path), "", LARGE_BYTES + 1)
    pieces = LocalFiles(FileThreads(), no_clobber=False).pieces(job)
    await anext(pieces)
    with path.open("ab") as file:
        file.write(b"more")
    await anext(pieces)
    with pytest.raises(ValueError, match="it changed while it was read"):
        await anext(pieces)
