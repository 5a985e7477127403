"""Emulated accelerators, as in MLPerf Storage: each step of a training takes a batch, and sleeps.

MLPerf runs a rank for each accelerator, and all ranks wait for the slowest after each step. Here
one consumer takes the batches of all ranks before each step, from one loader with their prefetch
(two batches for each rank). A number of accelerators need not be whole: the step is longer or
shorter in proportion, so that the rate is that of the number.

Accelerator utilization (AU) is the time of the steps, as configured, divided by the time of the
run. MLPerf excludes the first of thousands of steps. These runs are short, so that they also
exclude the first `trial_seconds`: the start of the workers, and the time in which a loader that
prefetches many objects requests the first of them, all at once.

The client, with its workers, is pinned to one core, and the server to the others. Linux only.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from perf._meter import cpu_seconds_of, resident_bytes
from perf.work import OperationResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from perf.work import Work

__all__ = ["emulate", "largest"]

PREFETCH_BATCHES = 2
"""Batches that MLPerf's loader prefetches for each accelerator."""
PRECISION = 1.1
"""The search ends if a number fails that is at most so many times a number that passes."""
MAX_RUNS = 20
"""Duration of a search, in `trial_seconds`; the start of the workers counts too."""
_NUM_FIRST = 3
"""Steps that are not measured, and steps that are measured, at least."""


def largest(
    utilization_of: Callable[[float], float], at_least: float, has_time: Callable[[], bool]
) -> float:
    """Return the largest number of accelerators with a utilization of `at_least`; 0 if none.

    The first run is that of one accelerator. Numbers are doubled until one fails; if one
    accelerator fails, the next number is the one that its run fed. Then the search bisects.
    """
    passed, failed, number = 0.0, math.inf, 1.0
    while failed > PRECISION * passed:
        utilization = utilization_of(number)
        if utilization >= at_least:
            passed = number
        else:
            failed = number
        if not has_time():
            break
        if failed == math.inf:
            number *= 2
        elif passed:
            number = math.sqrt(passed * failed)
        else:
            number *= max(0.01, utilization)
    return passed


def emulate(dataset: Any, work: Work, load: Callable[[Any, Work], Any]) -> OperationResult:
    """Search the largest number of accelerators; return the figures of its run.

    `figures` has the `accelerators`, and the `utilization` of one. If no number passes, the figures
    are those of the last run, and `accelerators` is 0.
    """
    runs: dict[float, dict[str, float]] = {}
    ends_at = time.monotonic() + MAX_RUNS * work.trial_seconds

    def utilization_of(number: float) -> float:
        begun = time.monotonic()
        runs[number] = _in_child(dataset, work, load, number)
        runs[number]["elapsed"] = time.monotonic() - begun
        return runs[number]["utilization"]

    def has_time() -> bool:
        return time.monotonic() + max(run["elapsed"] for run in runs.values()) < ends_at

    number = largest(utilization_of, work.utilization, has_time)
    best = runs[number] if number else list(runs.values())[-1]
    figures = {**best, "accelerators": number, "utilization": runs[1.0]["utilization"]}
    return OperationResult(num_bytes=0, figures=figures)


def _in_child(
    dataset: Any, work: Work, load: Callable[[Any, Work], Any], number: float
) -> dict[str, float]:
    """Run in a child, which is killed at the end, so that no worker finishes its prefetch first."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, dataset, work, load, number))
    child.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = "it died"
    finally:
        child.kill()
        child.join()
    if isinstance(found, str):
        raise RuntimeError(f"run with {number:g} accelerators: {found}")  # noqa: TRY004  its error
    figures: dict[str, float] = found
    return figures


def _send(sender: Connection, *args: Any) -> None:
    """Send the figures or the error; then wait for the kill, because an exit waits for workers."""
    try:
        sender.send(_run(*args))
    except Exception as exc:
        sender.send(f"{type(exc).__name__}: {exc}")
    time.sleep(3600)


def _run(
    dataset: Any, work: Work, load: Callable[[Any, Work], Any], number: float
) -> dict[str, float]:
    _pin(work)
    idle_bytes = resident_bytes("VmRSS")
    num_ranks = math.ceil(number)
    step_seconds = work.step_seconds * num_ranks / number
    num_first = max(_NUM_FIRST, math.ceil(work.num_workers / num_ranks))
    batches = iter(load(dataset, replace(work, prefetch_batches=PREFETCH_BATCHES * num_ranks)))
    num_steps, seconds, cpu_before = 0, 0.0, (0.0, 0.0)
    is_measured, before = False, time.perf_counter()
    while not is_measured or num_steps < num_first or seconds < work.trial_seconds:
        num_loaded = sum(1 for _ in islice(batches, num_ranks))
        if num_loaded < num_ranks:
            raise RuntimeError(f"the dataset ended before {work.trial_seconds} s")
        time.sleep(step_seconds)
        num_steps += 1
        seconds = time.perf_counter() - before
        if not is_measured and num_steps >= num_first and seconds >= work.trial_seconds:
            is_measured, num_steps, seconds = True, 0, 0.0
            before, cpu_before = time.perf_counter(), _cpu_seconds(work)
    cpu = _cpu_seconds(work)
    return {
        "utilization": num_steps * step_seconds / seconds,
        "seconds": seconds,
        "num_objects": num_steps * num_ranks * work.batch_size,
        "cpu_seconds": cpu[0] - cpu_before[0],
        "server_cpu_seconds": cpu[1] - cpu_before[1],
        "idle_bytes": idle_bytes,
        # Pages that a fork shares count in each process.
        "peak_bytes": sum(resident_bytes("VmHWM", pid) for pid in (os.getpid(), *_workers())),
    }


def _workers() -> tuple[int, ...]:
    return tuple(child.pid for child in multiprocessing.active_children() if child.pid)


def _cpu_seconds(work: Work) -> tuple[float, float]:
    """Return the CPU time of this process with its workers, and of the server."""
    own = time.process_time() + cpu_seconds_of(_workers())
    return own, cpu_seconds_of(work.server_pids)


def _pin(work: Work) -> None:
    """Pin this process to the last core, and the server to the others, if there are several."""
    torch.set_num_threads(1)  # as in DataLoader's workers; OpenMP's threads do not survive a fork
    *others, own = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(0, {own})
        for pid in work.server_pids:
            with suppress(OSError):  # of another user
                os.sched_setaffinity(pid, others)
