"""The Checkpointer in one process: what is saved is loaded, and no failure is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aioflux
from aioflux import PermissionDeniedError
from aioflux.checkpoint import save
from aioflux.checkpoint.compression import ZStandard
from aioflux.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from tests.checkpoint.manager.trainer import is_state_of, state_of
from tests.checkpoint.manager.worker_process import (
    FAST,
    SLOW,
    STUBBORN,
    Checkpointer,
    is_alive,
    uploader_of,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.clouds("gs", "s3", "az")

URI = "gs://bucket/run"
DATA = "*.distcp"
WRITE = "*insert*"
LONG = 250
"""Seconds for which what is not to be answered is held up."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks for the uploader in /proc")
HALF_BUILT = "ignore::pytest.PytestUnraisableExceptionWarning"
"""Of objects whose `__init__` was interrupted, and of coroutines that nobody awaits any more."""


@pytest.fixture
def checkpointer(server: GCSServer) -> Iterator[Checkpointer]:
    with Checkpointer(URI, retry=FAST, timeouts=SLOW) as checkpointer:
        yield checkpointer


@pytest.fixture
def stubborn(server: GCSServer) -> Iterator[Checkpointer]:
    """One whose saves stand still as long as a request of theirs is refused with 503."""
    with Checkpointer(URI, retry=STUBBORN, timeouts=SLOW) as checkpointer:
        yield checkpointer


def keys(prefix: str = "step-") -> list[str]:
    with aioflux.sync.open_store(URI) as store:
        return [meta.key for meta in store.list(prefix)]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and bool(
            torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def test_what_is_saved_is_loaded(checkpointer: Checkpointer) -> None:
    state = {
        "plain": torch.randn(3, 5),
        "turned": torch.randn(3, 5).T,
        "view": torch.arange(20).reshape(4, 5)[1:3, ::2],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "small": torch.randn(7).to(torch.bfloat16),
        "smaller": torch.randn(7).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "grad": torch.randn(4, requires_grad=True),
        "nested": {"list": [torch.ones(2), {"deep": [1, 2, (3, "x")]}], "none": None},
        "large": torch.randn(300_000),
    }
    with torch.no_grad():
        told = {
            key: value.contiguous() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        told["conjugate"] = told["conjugate"].resolve_conj()
    result = checkpointer.save(7, state, {"loss": 0.25})
    assert (result.step, result.uri) == (7, f"{URI}/step-00000007/")
    assert same(checkpointer.load(), told)
    assert same(checkpointer.load(7), told)
    assert checkpointer.steps() == [7]
    assert checkpointer.latest(deep=True) == 7
    assert checkpointer.verify(7, deep=True).metrics == {"loss": 0.25}


@pytest.mark.clouds("gs")
def test_a_small_state_is_saved_by_five_requests_and_loaded_by_four(
    checkpointer: Checkpointer, server: GCSServer
) -> None:
    """A load lists the run and the step, and reads its commit and its data object."""
    state = {"weights": torch.arange(8.0), "epoch": 3}
    checkpointer.save(1, state)
    checkpointer.history()  # the first record lists once
    server.stats.reset()
    checkpointer.save(2, state)
    checkpointer._uploader.wait_for_records()
    assert server.stats.total.requests == 5
    for load in (
        checkpointer.load,
        partial(checkpointer.load, into={"weights": torch.zeros(8), "epoch": 0}),
    ):
        server.stats.reset()
        assert same(load(), state)
        assert server.stats.total.requests == 4


def test_the_facts_of_steps_are_listed(checkpointer: Checkpointer) -> None:
    saved = [
        checkpointer.save(step, {"w": torch.ones(step)}, {"loss": 1 / step}) for step in (2, 1)
    ]
    first, second = checkpointer.list()
    assert (first.step, second.step) == (1, 2)
    assert first.metrics == {"loss": 1.0}
    assert first.uri.rstrip("/") == saved[1].uri.rstrip("/")
    assert first.save_id == saved[1].save_id
    assert first.num_bytes == saved[1].num_bytes
    assert (first.num_objects, first.world_size, first.layout) == (1, 1, "dcp")
    assert first.generation
    assert not first.problem
    with aioflux.sync.open_store(URI) as store:
        store.put("step-00000001/.metadata", b"\0aioflux-commit\0")
    assert [bool(each.problem) for each in checkpointer.list()] == [True, False]


def test_a_state_is_loaded_where_it_is(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    into = state_of(5)
    weights, address = into["model"]["cut"], into["model"]["cut"].data_ptr()
    assert checkpointer.load(into=into) is into
    assert is_state_of(1, into)
    assert into["model"]["cut"] is weights
    assert weights.data_ptr() == address
    with pytest.raises(ValueError, match="map_location has no effect"):
        checkpointer.load(into=into, map_location="cpu")


def test_stateful_objects_are_saved_and_loaded_by_their_states(checkpointer: Checkpointer) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    checkpointer.save(1, {"model": model, "epoch": 3})
    into = {"model": other, "epoch": 0}
    checkpointer.load(into=into)
    assert torch.equal(model.weight, other.weight)
    assert into == {"model": other, "epoch": 3}
    checkpointer.save(2, model)
    checkpointer.load(2, into=other)
    assert checkpointer.load(2).keys() == {"weight", "bias"}


def test_stock_dcp_loads_it(tmp_path: Path) -> None:
    with Checkpointer(f"file://{tmp_path}") as checkpointer:
        checkpointer.save(1, state_of(3))
    into = state_of(0)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "step-00000001"))
    assert is_state_of(3, into)


@pytest.mark.clouds("gs")
def test_the_state_may_change_when_the_handle_is_there(
    stubborn: Checkpointer, server: GCSServer
) -> None:
    with server.faults.inject(WRITE, key=DATA, status=503):
        state = state_of(1)
        handle = stubborn.save_async(1, state)
        state["model"]["cut"].zero_()
        state["optimizer"]["step"] = -1
        state["optimizer"]["groups"][0]["lr"] = -1.0
    handle.result()
    assert is_state_of(1, stubborn.load())
    assert handle.progress == 1
    assert handle.exception() is None
    assert "committed" in repr(handle)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("staging", ["thread", "process"])
def test_compressed_steps_are_smaller_and_load_alike(server: GCSServer, staging: Any) -> None:
    state = state_of(3)
    state["model"]["small"] = torch.arange(7)
    state["model"]["half"] = torch.randn(50_001).to(torch.bfloat16)
    with Checkpointer(URI, staging=staging, compression=ZStandard()) as checkpointer:
        handle = checkpointer.save_async(1, state)
        assert handle.result().num_bytes < 0.7 * handle.num_bytes
        assert same(checkpointer.load(), state)
        into = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
        checkpointer.load(into=into)
        assert same(into["model"], state["model"])
        assert checkpointer.verify(1, deep=True).is_valid


@pytest.mark.clouds("gs")
def test_saves_are_committed_in_order(stubborn: Checkpointer, server: GCSServer) -> None:
    with server.faults.inject(WRITE, key="*step-00000001/*" + DATA, status=503):
        first = stubborn.save_async(1, state_of(1))
        second = stubborn.save_async(2, state_of(2))
        wait_until(lambda: server.faults.injected["status"])
        assert not second.progress
    second.result()
    assert first.done()
    assert stubborn.steps() == [1, 2]


@pytest.mark.clouds("gs")
def test_an_exit_without_close_waits_for_records(stubborn: Checkpointer, server: GCSServer) -> None:
    server.faults.add(WRITE, key="*/record-*", status=503)
    stubborn.save(1, state_of(1))
    assert not any("/record-" in key for key in server.keys("bucket"))
    threading.Timer(0.3, server.faults.clear).start()
    stubborn.finish_at_exit()
    assert any("/record-" in key for key in server.keys("bucket"))


@pytest.mark.more  # waits for ten seconds
@pytest.mark.clouds("gs")
def test_close_waits_no_longer_for_many_records_than_for_one(
    stubborn: Checkpointer,
    server: GCSServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.faults.add(WRITE, key="*/record-*", status=503)
    for step in range(10):
        stubborn.save(step, state_of(step))
    started = time.monotonic()
    stubborn.close()
    assert time.monotonic() - started < LONG / 10
    assert "lacks 10 records" in caplog.text
    assert "is closed" not in caplog.text  # no write of a record goes on


def test_a_forked_process_builds_one_of_its_own(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    pid = os.fork()
    if not pid:
        status = 1
        try:
            checkpointer.save(2, state_of(2))
        except RuntimeError:
            status = 0
        finally:  # whatever it is, no second run of the tests goes on here
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    checkpointer.save(3, state_of(3))


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("staging", ["thread", "process"])
def test_a_prepared_save_writes_the_same_bytes(server: GCSServer, staging: Any) -> None:
    with Checkpointer(URI, staging=staging) as checkpointer:
        checkpointer.prepare(state_of(0))
        assert keys() == []
        (arena,) = checkpointer._stager._free
        handle = checkpointer.save_async(1, state_of(1))
        assert checkpointer._in_flight[0].arena is arena
        handle.result()
        checkpointer.prepare({"a": torch.ones(3_000_000)})  # larger: the first arena is replaced
        (larger,) = checkpointer._stager._free
        assert larger is not arena
        checkpointer.save(2, state_of(2))
        for step in (1, 2):
            assert is_state_of(step, checkpointer.load(step))
    assert checkpointer._stager._free == []
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.prepare(state_of(0))


@pytest.mark.clouds("gs")
def test_a_fork_during_the_preparation(checkpointer: Checkpointer) -> None:
    checkpointer.prepare({"a": torch.ones(30_000_000)})
    pid = os.fork()
    if not pid:
        status = 1
        try:
            checkpointer.prepare(state_of(1))
        except RuntimeError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    checkpointer.save(1, state_of(1))
    assert is_state_of(1, checkpointer.load())


_FORK_WITH_MEMORY = """
import os, sys, torch
from aioflux.checkpoint import Checkpointer

checkpointer = Checkpointer("memory://parent")
checkpointer.prepare({"a": torch.empty(50_000_000)})
if sys.argv[1] == "prepared":
    checkpointer._stager._free[0]._populating.join()
if not os.fork():
    own = [torch.ones(20_000_000) for _ in range(20)]  # where the memory of the parent was
    checkpointer.close()
    with Checkpointer("memory://child") as other:
        other.save(1, {"a": own[0]})
    del checkpointer
    assert all(tensor.eq(1).all() for tensor in own)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("moment", ["preparing", "prepared"])
def test_a_forked_child_does_not_unmap_memory_of_its_parent(moment: str) -> None:
    """Memory for staging is not mapped in children, where other memory may have its address."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK_WITH_MEMORY, moment],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "0\n", done.stderr


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("metrics", [{"loss": "low"}, {"loss": None}])
def test_metrics_are_numbers(checkpointer: Checkpointer, metrics: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        checkpointer.save(1, state_of(1), metrics)
    assert keys() == []
    checkpointer.save(1, state_of(1))


@pytest.mark.clouds("gs")
class TestFailures:
    """An error surfaces at the handle, at the next save, at close, or in the log; never nowhere."""

    @pytest.fixture
    def broken(self, server: GCSServer) -> Iterator[Checkpointer]:
        server.faults.add(WRITE, key="*step-00000001/*" + DATA, status=403)
        checkpointer = Checkpointer(URI, retry=FAST, timeouts=SLOW)
        yield checkpointer
        server.faults.clear()
        checkpointer.close()

    def test_at_the_handle_and_then_nowhere_else(self, broken: Checkpointer) -> None:
        handle = broken.save_async(1, state_of(1))
        with pytest.raises(PermissionDeniedError, match=r"step-00000001.*distcp") as caught:
            handle.result()
        assert any("on rank 0" in note for note in caught.value.__notes__)
        assert "failed" in repr(handle)
        broken.save(2, state_of(2))
        assert keys() == [key for key in keys() if key.startswith("step-00000002")]

    def test_at_the_next_save_which_is_not_begun(self, broken: Checkpointer) -> None:
        handle = broken.save_async(1, state_of(1))
        handle.wait()
        with pytest.raises(PermissionDeniedError):
            broken.save_async(2, state_of(2))
        broken.save_async(3, state_of(3)).result()
        assert broken.steps() == [3]

    def test_at_close(self, broken: Checkpointer) -> None:
        broken.save_async(1, state_of(1))
        with pytest.raises(PermissionDeniedError):
            broken.close()
        broken.close()
        with pytest.raises(ValueError, match="closed"):
            broken.save(2, state_of(2))

    def test_at_the_end_of_a_body_that_raised(self, broken: Checkpointer) -> None:
        def body() -> None:
            with broken:
                broken.save_async(1, state_of(1))
                raise KeyError("mine")

        with pytest.raises(KeyError) as caught:
            body()
        assert any("a save failed" in note for note in caught.value.__notes__)

    @pytest.mark.clouds("gs")
    def test_of_two_one_is_raised_and_the_other_logged(
        self, server: GCSServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.faults.add(WRITE, key="*" + DATA, status=403)
        checkpointer = Checkpointer(URI, retry=STUBBORN, timeouts=SLOW)
        # The first does not fail before the second is begun, which would raise its error.
        with server.faults.inject("*objects.get", status=503):
            checkpointer.save_async(1, state_of(1))
            checkpointer.save_async(2, state_of(2))
        with pytest.raises(PermissionDeniedError, match="step-00000001"):
            checkpointer.close()
        assert "step-00000002" in caplog.text

    def test_what_could_not_be_deleted_is_told(
        self, checkpointer: Checkpointer, server: GCSServer
    ) -> None:
        with (
            server.faults.inject(WRITE, key="*.metadata", status=403),
            server.faults.inject("*delete*", status=403),
            pytest.raises(PermissionDeniedError) as caught,
        ):
            checkpointer.save(1, state_of(1))
        assert any("could not be deleted" in note for note in caught.value.__notes__)

    def test_in_the_log_without_a_terminal(
        self, broken: Checkpointer, caplog: pytest.LogCaptureFixture
    ) -> None:
        dropped = Checkpointer(URI, retry=FAST, timeouts=SLOW)
        dropped.save_async(1, state_of(1)).wait()

        def is_logged() -> bool:
            gc.collect()  # again, as long as the loop holds the task that has just ended
            return "step 1 was not saved" in caplog.text

        with caplog.at_level(logging.ERROR, "aioflux"):
            del dropped
            wait_until(is_logged)

    def test_a_state_that_cannot_be_planned(self, checkpointer: Checkpointer) -> None:
        with pytest.raises(TypeError, match="a state is a dictionary"):
            checkpointer.save(1, [torch.ones(2)])
        with pytest.raises(CheckpointError, match=r"cannot be planned.*duplicated"):
            checkpointer.save(1, {"a": {"b": 1}, "a.b": 2})
        with pytest.raises(ValueError, match="step must be 0 or more"):
            checkpointer.save(-1, {})
        with pytest.raises(ValueError, match="meta"):
            checkpointer.save(1, {"a": torch.empty(3, device="meta")})
        with pytest.raises(TypeError, match="'a' cannot be pickled"):
            checkpointer.save(1, {"a": lambda: None})
        assert keys() == []
        assert not checkpointer.save(1, {}).num_bytes

    @pytest.mark.clouds("gs")
    def test_a_busy_service_is_retried(self, checkpointer: Checkpointer, server: GCSServer) -> None:
        server.faults.add(WRITE, key=DATA, status=503, times=1)
        checkpointer.save(1, state_of(1))
        assert checkpointer.history()[-1].num_retries >= 1

    @pytest.mark.clouds("gs")
    @pytest.mark.parametrize("times", [1, 20], ids=["once", "always"])
    def test_a_commit_whose_answer_is_lost_is_there_or_not(
        self, server: GCSServer, times: int
    ) -> None:
        server.faults.add(WRITE, key="*.metadata", lost=True, times=times)
        with Checkpointer(URI, retry=FAST, timeouts=SLOW) as checkpointer:
            checkpointer.save(1, state_of(1))
            server.faults.clear()
            assert is_state_of(1, checkpointer.load())

    @pytest.mark.clouds("gs")
    def test_a_commit_that_fails_leaves_the_old_state(
        self, checkpointer: Checkpointer, server: GCSServer
    ) -> None:
        checkpointer.save(1, state_of(1))
        before = keys()
        for fault in ({"status": 403}, {"status": 503}):
            with (
                server.faults.inject(WRITE, key="*.metadata", **fault),
                pytest.raises(aioflux.AiofluxError),
            ):
                checkpointer.save(1, state_of(2))
            assert is_state_of(1, checkpointer.load())
        # Of the second nobody can tell whether it came too late: what it wrote stays for `clean`.
        assert len(keys()) <= len(before) + 1


def test_what_a_load_will_refuse_is_reported_at_the_first_save(checkpointer: Checkpointer) -> None:
    state = {"a": torch.ones(2), "options": Namespace(lr=1), "names": ["x"]}
    with pytest.warns(UserWarning, match=r"'options' holds argparse\.Namespace"):
        checkpointer.save(1, state)
    checkpointer.save(2, state)  # told once
    with pytest.raises(CheckpointError, match=r"'options' in .* is not loaded"):
        checkpointer.load()
    assert checkpointer.load(weights_only=False)["options"] == Namespace(lr=1)


def test_what_torch_cannot_look_into_is_saved_all_the_same(checkpointer: Checkpointer) -> None:
    state = {"a": torch.ones(2), "numbers": [1 << 3000, {1}]}
    with pytest.warns(UserWarning, match="'numbers' holds a value that torch"):
        checkpointer.save(1, state)
    assert checkpointer.load(weights_only=False)["numbers"] == state["numbers"]


@pytest.mark.clouds("gs")
class TestInterrupts:
    """Ctrl-C in the middle of a save, and another save after it."""

    @LINUX
    def test_in_the_middle_of_a_message_to_the_uploader(self, server: GCSServer) -> None:
        with Checkpointer(URI, staging="process", max_staged_bytes=1) as checkpointer:
            uploader = uploader_of(os.getpid())
            os.kill(uploader, signal.SIGSTOP)
            # More than a socket holds of a message that is not read.
            with interrupted_in("send"), pytest.raises(KeyboardInterrupt):
                checkpointer.save_async(1, {"value": bytes(16_000_000)})
            checkpointer.save(2, state_of(2))
            # The first had been passed on: another process has uploaded it.
            assert checkpointer.steps() == [1, 2]
            assert len(checkpointer.load(1)["value"]) == 16_000_000

    @pytest.mark.filterwarnings(HALF_BUILT)
    def test_wherever_the_interpreter_looks_up_in_a_save(self) -> None:
        """It does so when a function begins, and when one of C returns."""
        number = at = 0
        with Checkpointer("memory://interrupted/run", max_staged_bytes=1) as checkpointer:
            checkpointer.save(0, {"number": torch.zeros(2)})
            while at == number:
                number += 1
                at = interrupted_at(
                    number, partial(checkpointer.save_async, 1, {"number": torch.ones(2)})
                )
                value = torch.tensor([float(number)])
                checkpointer.save(2, {"number": value})
                assert torch.equal(checkpointer.load(2)["number"], value)
        assert number > 50
        gc.collect()  # what complains of its end does so here

    @pytest.mark.filterwarnings(HALF_BUILT)
    def test_wherever_the_interpreter_looks_up_in_a_close(self) -> None:
        number = at = 0
        while at == number:
            number += 1
            checkpointer = Checkpointer(f"memory://interrupted/{number}")
            checkpointer.save_async(1, {"number": torch.ones(2)})
            at = interrupted_at(number, checkpointer.close)
            checkpointer.close()
        assert number > 10
        del checkpointer
        gc.collect()  # what complains of its end does so here

    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    def test_while_a_save_is_passed_to_the_uploader(self, server: GCSServer, share: float) -> None:
        """At the first, the middle and the last of the moments at which that is possible."""
        with Checkpointer(URI, staging="process", max_staged_bytes=1) as checkpointer:
            checkpointer.save(0, state_of(0))
            state = state_of(1)
            all_looks = interrupted_at(
                sys.maxsize, partial(checkpointer.save_async, 0, state), PROCESS
            )
            number = max(1, round(share * all_looks))
            assert number == interrupted_at(
                number, partial(checkpointer.save_async, 1, state), PROCESS
            )
            checkpointer.save(2, state_of(2))
            assert checkpointer.steps() in ([0, 1, 2], [0, 2])
            assert share < 1 or 1 in checkpointer.steps()

    @LINUX
    def test_a_close_that_waits_for_the_uploader(self, server: GCSServer) -> None:
        checkpointer = Checkpointer(URI, staging="process")
        uploader = uploader_of(os.getpid())
        os.kill(uploader, signal.SIGSTOP)
        with interrupted_in("wait"), pytest.raises(KeyboardInterrupt):
            checkpointer.close()
        os.kill(uploader, signal.SIGCONT)
        checkpointer.close()
        assert not is_alive(uploader)


@contextmanager
def interrupted_in(name: str) -> Iterator[None]:
    """Interrupt the main thread, as Ctrl-C does, when it blocks in a function of this name."""
    main = threading.main_thread().ident
    has_left = threading.Event()

    def interrupt() -> None:
        while not has_left.wait(0.1):
            frame = sys._current_frames()[main]
            names = set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            if name in names:
                has_left.wait(0.5)
                os.kill(os.getpid(), signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt)
        try:
            yield
        finally:
            has_left.set()
            signal.signal(signal.SIGINT, before)


PACKAGE = Path(aioflux.__file__).parent
THREAD = tuple(
    str(PACKAGE / each)
    for each in (
        "_bridge.py",
        "checkpoint/_checkpointer.py",
        "checkpoint/_save/handle.py",
        "checkpoint/_save/loop_uploader.py",
        "checkpoint/_save/staging.py",
    )
)
PROCESS = (str(PACKAGE / "checkpoint/_save/process_uploader.py"),)


def interrupted_at(
    number: int, call: Callable[[], object], modules: tuple[str, ...] = THREAD
) -> int:
    """Make a call that Ctrl-C interrupts when the interpreter looks up for the `number`th time.

    Returns:
        How often it did in the modules: less if the call came to its end.
    """
    looks = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal looks
        if event in {"call", "c_return"} and frame.f_code.co_filename in modules:
            looks += 1
            if looks == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    with suppress(KeyboardInterrupt):
        sys.setprofile(look)
        try:
            call()
        finally:
            sys.setprofile(before)
    return looks


@pytest.mark.clouds("gs")
def test_the_last_save_waits_for_no_room(server: GCSServer) -> None:
    server.faults.add(WRITE, key="*step-00000001/*" + DATA, delay_seconds=LONG)
    with Checkpointer(URI, max_staged_bytes=1, retry=FAST, timeouts=SLOW) as checkpointer:
        checkpointer.save_on_signal(signal.SIGUSR1, deadline_seconds=LONG)
        slow = checkpointer.save_async(1, state_of(1))
        signal.raise_signal(signal.SIGUSR1)
        assert checkpointer.should_save(2)
        checkpointer.save(2, state_of(2))
        assert not slow.done()
        assert checkpointer.latest() == 2
        slow.cancel()


@pytest.mark.clouds("gs")
def test_the_last_save_replaces_one_of_its_step_that_was_under_way(server: GCSServer) -> None:
    """Both have read what they replace before either is committed, and the first one commits."""
    with (
        Checkpointer(URI, retry=STUBBORN, timeouts=SLOW) as checkpointer,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
        server.faults.inject(WRITE, key="*" + DATA, reset=True, skip=1),
    ):
        checkpointer.save_on_signal(signal.SIGUSR1, deadline_seconds=LONG)
        with server.faults.inject(WRITE, key="*.metadata", status=503):
            first = checkpointer.save_async(1, state_of(1))
            wait_until(lambda: server.faults.injected["status"])
            signal.raise_signal(signal.SIGUSR1)
            assert checkpointer.should_save(1)
            last = thread.submit(checkpointer.save, 1, state_of(2))
            wait_until(lambda: server.faults.injected["reset"])
        assert first.result().step == 1
        server.faults.clear()
        assert last.result().step == 1
        assert is_state_of(2, checkpointer.load())
        assert len(keys()) == 2  # what was replaced is gone


@pytest.mark.clouds("gs")
def test_a_run_that_goes_on_after_a_signal_is_saved_by_its_schedule_with_one_warning(
    server: GCSServer,
) -> None:
    saved = []

    def train(checkpointer: Checkpointer) -> None:
        checkpointer.save_on_signal(signal.SIGUSR1, deadline_seconds=LONG)
        for step in range(1, 61):
            if step == 25:
                signal.raise_signal(signal.SIGUSR1)
            if checkpointer.should_save(step):
                checkpointer.save_async(step, {"step": step})
                saved.append(step)
            assert checkpointer.is_stopping is (step >= 25)

    with Checkpointer(URI, every=10) as checkpointer, pytest.warns(RuntimeWarning) as warned:
        train(checkpointer)
    assert saved == [10, 20, 25, 30, 40, 50, 60]
    (warning,) = warned
    assert str(warning.message).startswith(f"step 26 of {URI}/: training goes on after the save")


@pytest.mark.clouds("gs")
def test_a_second_signal_is_another_save_at_once(server: GCSServer) -> None:
    with Checkpointer(URI) as checkpointer:
        checkpointer.save_on_signal(signal.SIGUSR1, deadline_seconds=LONG)
        for step in (1, 2):
            signal.raise_signal(signal.SIGUSR1)
            assert checkpointer.should_save(step)
            assert checkpointer.save_async(step, {"step": step}).is_committed


@pytest.mark.clouds("gs")
def test_a_signal_is_pending_until_a_save_is_committed(server: GCSServer) -> None:
    """A save that misses the deadline, and is committed later, counts."""
    with Checkpointer(URI, retry=STUBBORN, timeouts=SLOW) as checkpointer:
        checkpointer.save_on_signal(signal.SIGUSR1, deadline_seconds=0.2)
        with server.faults.inject(WRITE, key="*" + DATA, status=503):
            signal.raise_signal(signal.SIGUSR1)
            assert checkpointer.should_save(1)
            with pytest.raises(CheckpointError, match="not committed within the"):
                checkpointer.save(1, state_of(1))
            assert checkpointer.should_save(2)
        with pytest.warns(RuntimeWarning, match="training goes on"):
            wait_until(lambda: not checkpointer.should_save(3))
        assert checkpointer.steps() == [1]


@pytest.mark.clouds("gs")
def test_a_deadline_that_passes_is_an_error(server: GCSServer) -> None:
    with (
        Checkpointer(URI, retry=STUBBORN, timeouts=SLOW) as checkpointer,
        server.faults.inject(WRITE, key="*" + DATA, status=503),
    ):
        checkpointer.save_on_signal(signal.SIGUSR1, deadline_seconds=0.2)
        signal.raise_signal(signal.SIGUSR1)
        assert checkpointer.should_save(1)
        with pytest.raises(CheckpointError, match="not committed within the"):
            checkpointer.save(1, state_of(1))


@pytest.mark.clouds("gs")
def test_a_store_that_is_dropped_does_not_wait_for_the_loop(
    stubborn: Checkpointer, server: GCSServer
) -> None:
    """The collector may drop one while this thread holds what the loop waits for."""
    is_blocked, is_dropped = threading.Event(), threading.Event()

    def block(_: object) -> None:
        is_blocked.set()
        assert is_dropped.wait(LONG)

    store = aioflux.sync.open_store(URI)
    store.put("key", b"data")
    with server.faults.inject(WRITE, key=DATA, status=503):
        handle = stubborn.save_async(1, {"a": torch.ones(3)})
        handle.add_done_callback(block)  # on the thread of the loop
    assert is_blocked.wait(LONG)
    del store
    is_dropped.set()
    handle.result()


class TestCancel:
    @pytest.mark.clouds("gs")
    def test_nothing_is_left(self, checkpointer: Checkpointer, server: GCSServer) -> None:
        server.faults.add(WRITE, key="*step-00000001/*" + DATA, delay_seconds=LONG)
        handle = checkpointer.save_async(1, state_of(1))
        after = checkpointer.save_async(2, state_of(2))
        # What comes to the server when its sender has gone would stay.
        wait_until(lambda: server.faults.injected["delay"])
        assert handle.cancel()
        assert handle.done()
        with pytest.raises(concurrent.futures.CancelledError):
            handle.result()
        after.result()
        assert {key.partition("/")[0] for key in keys()} == {"step-00000002"}
        assert [each.outcome for each in checkpointer.history()] == ["cancelled", "committed"]

    @pytest.mark.clouds("gs")
    def test_one_that_waits_its_turn(self, stubborn: Checkpointer, server: GCSServer) -> None:
        with server.faults.inject(WRITE, key="*step-00000001/*" + DATA, status=503):
            first = stubborn.save_async(1, state_of(1))
            second = stubborn.save_async(2, state_of(2))
            assert second.cancel()
        first.result()
        assert stubborn.steps() == [1]
        # The other ranks are told, and so is whoever reads the history.
        assert {each.outcome for each in stubborn.history()} == {"cancelled", "committed"}

    def test_too_late(self, checkpointer: Checkpointer) -> None:
        handle = checkpointer.save_async(1, state_of(1))
        handle.result()
        assert not handle.cancel()
        assert checkpointer.steps() == [1]


class TestAwait:
    async def test_from_any_loop(self, server: GCSServer) -> None:
        with Checkpointer(URI) as checkpointer:
            assert (await checkpointer.save_async(1, state_of(1))).step == 1

    @pytest.mark.clouds("gs")
    async def test_the_end_of_a_wait_is_not_that_of_the_save(
        self, stubborn: Checkpointer, server: GCSServer
    ) -> None:
        with server.faults.inject(WRITE, key=DATA, status=503):
            handle = stubborn.save_async(1, state_of(1))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle, 0.01)
            with pytest.raises(TimeoutError):
                handle.result(timeout=0)
        assert (await handle).step == 1

    @pytest.mark.clouds("gs")
    async def test_errors(self, server: GCSServer) -> None:
        server.faults.add(WRITE, key=DATA, status=403)
        with Checkpointer(URI) as checkpointer, pytest.raises(PermissionDeniedError):
            await checkpointer.save_async(1, state_of(1))


class TestMemory:
    @pytest.mark.clouds("gs")
    def test_a_save_waits_for_room(self, server: GCSServer) -> None:
        with Checkpointer(URI, max_staged_bytes=1) as checkpointer:
            with server.faults.inject(WRITE, key=DATA, delay_seconds=0.3):
                handles = [checkpointer.save_async(step, state_of(step)) for step in (1, 2, 3)]
                assert [each.done() for each in handles[:2]] == [True, True]
                handles[2].result()
            assert checkpointer.steps() == [1, 2, 3]

    @pytest.mark.clouds("gs")
    @pytest.mark.parametrize("staging", ["thread", "process"])
    def test_a_save_waits_for_one_of_sixteen_small_copies(
        self, server: GCSServer, staging: Any
    ) -> None:
        server.faults.add(WRITE, key=DATA, delay_seconds=0.5, times=1)
        with Checkpointer(URI, staging=staging, timeouts=SLOW) as checkpointer:
            handles = [checkpointer.save_async(step, {"a": torch.ones(9)}) for step in range(17)]
            assert handles[0].done()
            assert not handles[15].done()

    @pytest.mark.clouds("gs")
    @pytest.mark.parametrize(("staging", "num_copies"), [("thread", 1), ("process", 2)])
    def test_pickled_values_count_in_both_processes(
        self, server: GCSServer, staging: Any, num_copies: int
    ) -> None:
        """A state of 100 KB of values is staged beside another one if both fit."""
        server.faults.add(WRITE, key=DATA, delay_seconds=0.5)
        for limit, is_free in ((210_000 * num_copies, True), (190_000 * num_copies, False)):
            with Checkpointer(f"{URI}/{limit}", staging=staging, max_staged_bytes=limit) as each:
                first = each.save_async(1, {"a": bytes(100_000)})
                second = each.save_async(2, {"a": bytes(100_000)})
                assert first.done() is not is_free
                second.result()

    @pytest.mark.clouds("gs")
    def test_and_not_where_there_is(self, server: GCSServer) -> None:
        server.faults.add(WRITE, key=DATA, delay_seconds=LONG)
        with Checkpointer(URI, timeouts=SLOW) as checkpointer:
            handles = [checkpointer.save_async(step, state_of(step)) for step in (1, 2, 3)]
            assert not any(each.done() for each in handles)
            assert all(each.cancel() for each in reversed(handles))


class TestRetention:
    def test_old_steps_go_after_the_new_commit(self, server: GCSServer) -> None:
        with Checkpointer(URI, keep_last=2) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state_of(step))
            assert checkpointer.steps() == [2, 3]
        assert not any(key.startswith("step-00000001") for key in keys())

    def test_the_best_and_the_loaded_one_stay(self, server: GCSServer) -> None:
        with Checkpointer(URI) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state_of(step), {"loss": abs(step - 2)})
        with Checkpointer(URI, keep_last=1, keep_best=("loss", "min")) as checkpointer:
            checkpointer.load(1)
            checkpointer.save(4, state_of(4))
            checkpointer.save(5, state_of(5))
            assert checkpointer.steps() == [1, 2, 5]
            assert checkpointer.prune(dry_run=True).removed == ()

    @pytest.mark.clouds("gs")
    def test_a_failed_save_removes_nothing(self, server: GCSServer) -> None:
        with Checkpointer(URI, keep_last=1) as checkpointer:
            checkpointer.save(1, state_of(1))
            server.faults.add(WRITE, key=DATA, status=403)
            with pytest.raises(PermissionDeniedError):
                checkpointer.save(2, state_of(2))
            assert checkpointer.steps() == [1]

    def test_what_an_overwrite_made_useless_goes(self, checkpointer: Checkpointer) -> None:
        checkpointer.save(1, state_of(1))
        before = set(keys())
        checkpointer.save(1, state_of(2))
        assert len(keys()) == len(before)
        assert set(keys()) & before == {"step-00000001/.metadata"}
        assert is_state_of(2, checkpointer.load())


class TestLoad:
    def test_the_step_before_is_taken_and_it_is_said(
        self, checkpointer: Checkpointer, server: GCSServer
    ) -> None:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step))
        (missing,) = [key for key in keys("step-00000003/") if key.endswith("distcp")]
        with aioflux.sync.open_store(URI) as store:
            store.delete(missing)
        into = state_of(9)
        with pytest.warns(RuntimeWarning, match="step-00000003/ failed verification") as warned:
            checkpointer.load(into=into)
        assert warned[0].filename == __file__
        assert len(repr(checkpointer.verify(2))) < 1000
        assert is_state_of(2, into)
        assert checkpointer.loaded_step == 2
        assert checkpointer.latest() == 2
        with pytest.raises(CheckpointCorruptError, match="step-00000003"):
            checkpointer.load(3)

    @pytest.mark.clouds("gs")
    def test_a_damaged_byte_is_found_when_it_is_read(
        self, checkpointer: Checkpointer, server: GCSServer
    ) -> None:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
        server.faults.add("objects.media", key="*step-00000002/*" + DATA, flip_at=90_000)
        into = state_of(9)
        with pytest.warns(RuntimeWarning, match=r"00001/ is loaded, because.*00002/") as warned:
            checkpointer.load(into=into)
        assert {each.filename for each in warned} == {__file__}
        assert is_state_of(1, into)

    def test_a_step_that_is_saved_anew_meanwhile_is_read_anew(
        self, checkpointer: Checkpointer, server: GCSServer
    ) -> None:
        checkpointer.save(1, state_of(1))
        with Checkpointer(URI) as other:

            class Late(dict[str, Any]):
                """A part of a state that is looked into when the commit was read."""

                is_saved = False

                def items(self) -> Any:
                    if not self.is_saved:
                        self.is_saved = True
                        other.save(1, state_of(2))
                    return super().items()

            for step in (None, 1):
                into = state_of(9)
                into["model"] = Late(into["model"])
                checkpointer.load(step, into)
                assert into["model"].is_saved
                assert is_state_of(2, into)

    @pytest.mark.clouds("gs")
    def test_one_that_is_removed_while_it_is_read_gives_way_to_a_newer_one(
        self, checkpointer: Checkpointer
    ) -> None:
        checkpointer.save(1, state_of(1))

        class Late(dict[str, Any]):
            """A part of a state that is looked into when the commit was read."""

            def items(self) -> Any:
                if other.steps() == [1]:
                    other.save(2, state_of(2))
                return super().items()

        into = state_of(9)
        into["model"] = Late(into["model"])
        with Checkpointer(URI, keep_last=1) as other:
            checkpointer.load(into=into)
        assert is_state_of(2, into)
        assert checkpointer.loaded_step == 2

    def test_nothing_is_there(self, checkpointer: Checkpointer) -> None:
        with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint below {URI}"):
            checkpointer.load()
        with pytest.raises(CheckpointNotFoundError, match="step-00000005"):
            checkpointer.load(5)
        assert checkpointer.latest() is None
        assert checkpointer.steps() == []

    def test_a_state_of_another_structure_is_no_damage(self, checkpointer: Checkpointer) -> None:
        checkpointer.save(1, {"a": torch.ones(3)})
        with pytest.raises(Exception, match=r"Missing key|not in|b"):
            checkpointer.load(into={"b": torch.ones(3)})


class TestSchedule:
    def test_every_so_many_steps(self, server: GCSServer) -> None:
        with Checkpointer(URI, every=3) as checkpointer:
            assert [step for step in range(8) if checkpointer.should_save(step)] == [3, 6]

    def test_every_so_often(self, server: GCSServer) -> None:
        with Checkpointer(URI, every=timedelta(hours=1)) as checkpointer:
            assert not checkpointer.should_save(1)
        with Checkpointer(URI, every=timedelta(microseconds=1)) as checkpointer:
            assert checkpointer.should_save(1)

    def test_never_by_itself(self, server: GCSServer) -> None:
        with Checkpointer(URI) as checkpointer:
            assert not any(checkpointer.should_save(step) for step in range(100))


@pytest.mark.clouds("gs")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"staging": "disk"}, "staging must be"),
        ({"max_staged_bytes": 0}, "above 0"),
        ({"commit_seconds": 0}, "above 0"),
        ({"keep_last": 0}, "keep_last"),
        ({"every": 0}, "every must be above 0"),
        ({"every": timedelta(0)}, "every must be above 0"),
        ({"every": 2.5}, "every must be a number of steps"),
        ({"process_group": "all"}, "before torch.distributed is initialised"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        Checkpointer(URI, **options)


def test_keys_that_are_numbers_and_empty_dictionaries_come_back(checkpointer: Checkpointer) -> None:
    """With text for its keys, an optimizer would take its state for nothing."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    numbers = {1: 2, -3: 4, 10**40: 5}
    state = {"optimizer": optimizer.state_dict(), "empty": {}, "numbers": numbers}
    checkpointer.save(1, state)
    loaded = checkpointer.load()
    assert list(loaded["optimizer"]["state"]) == [0, 1]
    assert loaded["empty"] == {}
    assert loaded["numbers"] == numbers
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(loaded["optimizer"])
    assert same(other.state[model.weight], optimizer.state[model.weight])


@pytest.mark.clouds("gs")
def test_a_sparse_tensor_is_refused_before_it_is_saved(checkpointer: Checkpointer) -> None:
    with pytest.raises(CheckpointError, match=r"'eye' is a tensor of layout torch\.sparse_coo"):
        checkpointer.save(1, {"eye": torch.eye(3).to_sparse()})
    assert keys() == []


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("value", ["low", None, torch.ones(3)], ids=["text", "none", "tensor"])
def test_a_metric_that_is_no_number_is_named(checkpointer: Checkpointer, value: Any) -> None:
    says = rf"the metric 'loss' is {re.escape(repr(value))}, which is not a number; pass a float"
    with pytest.raises(TypeError, match=says):
        checkpointer.save(1, {"a": 1}, {"step": 1, "loss": value})
    assert keys() == []


@pytest.mark.clouds("gs")
@pytest.mark.parametrize(("kind", "path"), [("dict", "model.list.1"), ("list", "leaf.1")])
def test_a_state_that_contains_itself_is_named(
    checkpointer: Checkpointer, kind: str, path: str
) -> None:
    state: dict[str, Any] = {"model": {"list": [torch.ones(1)]}, "leaf": [1]}
    (state["model"]["list"] if kind == "dict" else state["leaf"]).append(
        state if kind == "dict" else state["leaf"]
    )
    with pytest.raises(ValueError, match=rf"the state contains itself as '{re.escape(path)}'"):
        checkpointer.save(1, state)


@pytest.mark.clouds("gs")
def test_a_state_that_is_too_deep_is_an_error(checkpointer: Checkpointer) -> None:
    state: dict[str, Any] = {}
    for _ in range(5000):
        state = {"inner": state}
    with pytest.raises(ValueError, match="the state is nested too deeply"):
        checkpointer.save(1, state)


class Holder:
    """An object with a value that cannot be pickled."""

    def __init__(self) -> None:
        self.name = "holder"
        self.lock = threading.Lock()


UNPICKLABLE = {
    "options.schedule": {"options": {"lr": 0.1, "schedule": lambda _: 0}},
    "values.1.key.0": {"values": (1, {"key": [lambda: 0]})},
    "holder.lock": {"model": torch.ones(1), "holder": Holder()},
}


@pytest.mark.clouds("gs")
@pytest.mark.parametrize(("path", "state"), UNPICKLABLE.items(), ids=UNPICKLABLE)
def test_a_value_that_cannot_be_pickled_is_named_by_its_path(
    checkpointer: Checkpointer, path: str, state: dict[str, Any]
) -> None:
    says = rf"'{re.escape(path)}' cannot be pickled, because it is a \w+: .*; remove it"
    with pytest.raises(TypeError, match=says):
        checkpointer.save(1, state)
    with pytest.raises(TypeError, match=says):
        save(state, f"{URI}/model.pt")
    assert keys() == keys("model") == []


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("step", [True, 3.0, "5", None])
def test_a_step_is_a_whole_number(checkpointer: Checkpointer, step: Any) -> None:
    with pytest.raises(TypeError, match="a step is a whole number"):
        checkpointer.save(step, {"a": 1})
    assert keys() == []


@pytest.mark.clouds("gs")
def test_a_step_may_be_what_counts_as_a_number(checkpointer: Checkpointer) -> None:
    checkpointer.save(torch.tensor(7), {"a": 1})  # type: ignore[arg-type]
    assert checkpointer.steps() == [7]


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("root", ["gs://whole-bucket", "memory://whole-bucket"])
def test_a_root_may_be_a_whole_bucket(server: GCSServer, root: str) -> None:
    server.create_bucket("whole-bucket")
    with Checkpointer(root) as checkpointer:
        result = checkpointer.save(1, {"a": torch.ones(2)})
        assert result.uri == f"{root}/step-00000001/"
        assert same(checkpointer.load(), {"a": torch.ones(2)})
        assert checkpointer.verify(1).is_valid


@pytest.mark.clouds("gs")
def test_what_is_pickled_counts_as_staged(server: GCSServer) -> None:
    server.faults.add(WRITE, key=DATA, delay_seconds=0.5)
    with Checkpointer(URI, max_staged_bytes=1_000_000) as checkpointer:
        before = checkpointer.save_async(0, {"a": bytes(2_000_000)})
        for step in (1, 2):
            handle = checkpointer.save_async(step, {"a": bytes(2_000_000)})
            assert before.done()
            before = handle
        server.faults.clear()


def test_credentials_that_the_uploader_cannot_import_are_refused() -> None:
    def token() -> str:
        return "token"

    token.__module__ = "__main__"
    with pytest.raises(ValueError, match="cannot import __main__"):
        Checkpointer(URI, staging="process", credentials=token)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": {"x": 1}, "b": 2}, {"a": 1, "b": {"x": 2}}),
        ({"a": {}, "b": 5}, {"a": 5, "b": {}}),
        ({"a": {"t": torch.ones(2)}, "b": 0}, {"a": torch.ones(2), "b": {"t": 0}}),
        ({"a": [torch.ones(2)], "b": 0}, {"a": 0, "b": [torch.ones(2)]}),
        ({"a": {1: 2}}, {"a": {True: 2}}),
    ],
    ids=str,
)
def test_another_structure_of_the_same_leaves_is_planned_anew(
    checkpointer: Checkpointer, before: Any, after: Any
) -> None:
    checkpointer.save(1, before)
    checkpointer.save(2, after)
    loaded = checkpointer.load(2)
    with Checkpointer("memory://structures/new") as fresh:
        fresh.save(2, after)
        assert same(loaded, fresh.load(2))
        assert str(loaded) == str(fresh.load(2))
