"""Whatever cancels a writer, and however often: no upload stays open and no staged object stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux._concurrency.run_to_completion import run_to_completion, wait_until_done
from aioflux.testing import GCSServer
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import PART, ScriptedService, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.store import WriteMode

LARGE = pattern(3 * PART + 5)
STEPS = ("initiate_upload", "put_part", "complete_upload", "abort_upload", "compose", "delete")
KINDS = pytest.mark.parametrize("kind", ["hang", "hang_after"])


async def write(scripted: ScriptedService, mode: WriteMode) -> None:
    async with scripted.store.open_writer("a", mode=mode) as writer:
        await writer.write(LARGE[: 2 * PART])
        await writer.write(LARGE[2 * PART :])


async def reach_quiet(scripted: ScriptedService, before: set[asyncio.Task[object]]) -> None:
    async with asyncio.timeout(100):
        while asyncio.all_tasks() - before:
            await asyncio.wait(asyncio.all_tasks() - before)
    assert scripted.is_clean()


def hang_at(scripted: ScriptedService, step: str, kind: str) -> Fault:
    hang = Fault(kind=kind)
    scripted.service.fail(step, hang)
    if step == "abort_upload":
        scripted.service.fail(
            "complete_upload", Fault(kind="refuse", error=aioflux.StorageError("no"))
        )
    return hang


MODES_AND_STEPS = [("overwrite", step) for step in STEPS[:4]]
MODES_AND_STEPS += [("create", step) for step in STEPS]


@pytest.mark.parametrize("times", [1, 2, 3])
@KINDS
@pytest.mark.parametrize(("mode", "step"), MODES_AND_STEPS)
async def test_a_task_may_be_cancelled_anywhere_and_again(
    scripted: ScriptedService, mode: WriteMode, step: str, kind: str, times: int
) -> None:
    before = asyncio.all_tasks()
    hang = hang_at(scripted, step, kind)
    writing = asyncio.create_task(write(scripted, mode))
    await hang.reached.wait()
    for _ in range(times):
        writing.cancel()
        await asyncio.sleep(0)
    hang.released.set()
    with pytest.raises((asyncio.CancelledError, aioflux.StorageError)):
        await writing
    await reach_quiet(scripted, before)
    assert not [key for key in scripted.bucket.objects if key != "a"]


@KINDS
@pytest.mark.parametrize(("mode", "step"), MODES_AND_STEPS)
def test_the_end_of_the_loop_may_come_anywhere(
    scripted: ScriptedService, mode: WriteMode, step: str, kind: str
) -> None:
    """`asyncio.run` cancels every task there is, clean-up included, and waits for them."""

    async def main() -> None:
        hang = hang_at(scripted, step, kind)
        task = asyncio.create_task(write(scripted, mode))
        tasks.append(task)
        await hang.reached.wait()

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert tasks[0].done()
    assert scripted.holds_no_bytes()
    assert scripted.is_clean() or step == "initiate_upload"
    assert not [key for key in scripted.bucket.objects if key != "a"]


@pytest.mark.parametrize("mode", ["overwrite", "create"])
def test_the_end_of_the_loop_may_follow_a_cancellation(
    scripted: ScriptedService, mode: WriteMode
) -> None:
    async def main() -> None:
        hang, abort = Fault(kind="hang"), Fault(kind="hang")
        scripted.service.fail("put_part", hang)
        scripted.service.fail("abort_upload", abort)
        task = asyncio.create_task(write(scripted, mode))
        tasks.append(task)
        await hang.reached.wait()
        task.cancel()
        await abort.reached.wait()

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert scripted.is_clean()


@pytest.mark.usefixtures("clock")
async def test_an_upload_whose_beginning_hangs_is_not_waited_for(scripted: ScriptedService) -> None:
    """It has no parts, and `Store.clean` finds it."""
    hang = Fault(kind="hang_after")
    scripted.service.fail("initiate_upload", hang)
    writing = asyncio.create_task(write(scripted, "overwrite"))
    await hang.reached.wait()
    assert scripted.bucket.uploads
    writing.cancel()
    async with asyncio.timeout(2) as limit:
        with pytest.raises(asyncio.CancelledError):
            await writing
    assert not limit.expired()
    assert scripted.holds_no_bytes()


async def test_clean_up_that_outlives_its_caller_logs_its_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await end.wait()
        raise ValueError("it did not work")

    before = asyncio.all_tasks()
    task = asyncio.create_task(run_to_completion(work, set(), seconds=5, interrupted_seconds=5))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end.set()
    await asyncio.wait(asyncio.all_tasks() - before)
    await asyncio.sleep(0)
    assert "did not work" in caplog.text


async def test_clean_up_that_fails_after_its_task_was_cancelled_logs_its_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the end of a loop cancels it: it begins anew, and the end expects a cancellation."""
    begun, tasks = asyncio.Event(), set()

    async def work() -> None:
        if begun.is_set():
            raise ValueError("it did not work")
        begun.set()
        await asyncio.Event().wait()

    caller = asyncio.create_task(run_to_completion(work, tasks, seconds=5, interrupted_seconds=5))
    await begun.wait()
    for task in tasks:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert "did not work" in caplog.text


async def test_a_wait_until_the_end_goes_on_after_cancellations() -> None:
    end = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(wait_until_done(end))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    end.set_result(None)
    assert isinstance(await waiting, asyncio.CancelledError)


async def test_clean_up_has_a_deadline_of_its_own() -> None:
    with pytest.raises(TimeoutError):
        await run_to_completion(asyncio.Event().wait, set(), seconds=0.01, interrupted_seconds=5)


# --- real signals --------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    import asyncio, signal, sys
    import aioflux
    from tests.bridge.patience import PATIENT

    # A shell that starts tests in the background has its children ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def main(url, how):
        async with aioflux.open_store(
            "gs://bucket", endpoint_url=url, timeouts=PATIENT
        ) as store:
            mode = "create" if how == "create" else "overwrite"
            async with store.open_writer("a", mode=mode) as writer:
                data = bytes(8 << 20)
                for _ in range(4):
                    await writer.write(data)
                print("begun", flush=True)
                await asyncio.sleep(600)

    asyncio.run(main(*sys.argv[1:]))
    """
)


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.faults.add("xml.multipart.abort", delay_seconds=0.2)
        yield running


@pytest.mark.parametrize("how", ["plain", "create"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_upload(server: GCSServer, how: str, times: int) -> None:
    """The first cancels the main task; the second breaks out of the loop, abort under way."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        for at in range(times):
            if at:
                wait_for_abort(server)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=250)
    assert b"KeyboardInterrupt" in errors
    assert server.stats.open_uploads == 0
    assert server.keys("bucket") == []


def wait_for_abort(server: GCSServer) -> None:
    deadline = time.monotonic() + 100
    while not server.stats.operation("xml.multipart.abort").requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)
