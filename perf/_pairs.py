"""Plays a match: two contenders in turn (A B A B), each sample in a process of its own.

Both of a pair start and warm up side by side; then one is measured while the other waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from perf._samples import Pair, Result, Sample

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import IO

    from perf.scenarios import Match
    from perf.servers import Server, ServerSpec
    from perf.work import Work

__all__ = [
    "COMMAND",
    "MAX_FAILED",
    "SampleError",
    "addressed",
    "eased",
    "is_hopeless",
    "last_error",
    "play",
    "play_pair",
]

MAX_FAILED = 2
"""Failed pairs after which a match ends: what fails twice fails for a reason."""
COMMAND = (sys.executable, "-m", "perf.work")
"""What a contender's process runs; the work and `--wait` come behind it."""
_ROOT = Path(__file__).resolve().parent.parent
"""Where `python -m perf.work` finds its module."""
MAX_ERROR = 300
"""Characters of an error that are kept."""
WARM_UP_SHARE = 0.1
"""Objects of the first pair, as a share of those of the others."""


class SampleError(Exception):
    """A contender's process failed."""


def last_error(text: str) -> str:
    """Return the error of the last traceback in what a process wrote, or else its last line."""
    _, found, traceback = text.strip().rpartition("Traceback (most recent call last):\n")
    lines = traceback.splitlines()
    if not found:
        return lines[-1][:MAX_ERROR] if lines else ""
    error = dropwhile(lambda line: line.startswith(" "), lines)
    return " ".join(line.strip() for line in error)[:MAX_ERROR]


@dataclass(frozen=True)
class _Contender:
    """A process that has warmed up, or is about to."""

    process: Process
    errors: IO[bytes]
    """Where it writes what goes wrong."""

    async def ready(self) -> None:
        """Wait until it has warmed up."""
        assert self.process.stdout is not None
        if (await self.process.stdout.readline()).strip() != b"ready":
            await self._fail()

    async def result(self) -> Result:
        """Have it begin, and wait for what it tells."""
        told, _ = await self.process.communicate(b"go\n")
        if self.process.returncode:
            await self._fail()
        return Result.told(json.loads(told.splitlines()[-1]))

    async def _fail(self) -> None:
        """Raise what it wrote last."""
        code = await self.process.wait()
        self.errors.seek(0)
        told = last_error(self.errors.read().decode(errors="replace"))
        raise SampleError(told or f"ended with exit status {code}")


@asynccontextmanager
async def _start(command: Sequence[str], work: Work) -> AsyncIterator[_Contender]:
    """Start a contender; at the end of the block it and its children are gone."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(asdict(work)),
            "--wait",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=_ROOT,
            # A group of its own, so that its children can be ended with it.
            start_new_session=True,
        )
        try:
            yield _Contender(process, errors)
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _warm_up(contender: _Contender, work: Work, limit_seconds: float) -> Sample | None:
    """Wait until it has warmed up, and return what stands for it where it could not."""
    try:
        async with asyncio.timeout(limit_seconds):
            await contender.ready()
    except SampleError as exc:
        return Sample(work=work, error=str(exc))
    except TimeoutError:
        error = f"had not warmed up after {limit_seconds:g} s"
        return Sample(work=work, error=error, is_too_slow=True)
    return None


async def _measure(contender: _Contender, work: Work, limit_seconds: float) -> Sample:
    try:
        async with asyncio.timeout(limit_seconds):
            return Sample(work=work, result=await contender.result())
    except SampleError as exc:
        return Sample(work=work, error=str(exc))
    except TimeoutError:
        error = f"had not ended after {limit_seconds:g} s"
        return Sample(work=work, error=error, is_too_slow=True)


async def play_pair(
    ours: Work, theirs: Work, limit_seconds: float, command: Sequence[str] = COMMAND
) -> tuple[Sample, Sample]:
    """Measure one after the other, both warmed up before."""
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(_start(command, ours))
        b = await stack.enter_async_context(_start(command, theirs))
        failed_a, failed_b = await asyncio.gather(
            _warm_up(a, ours, limit_seconds), _warm_up(b, theirs, limit_seconds)
        )
        first = failed_a or await _measure(a, ours, limit_seconds)
        return first, failed_b or await _measure(b, theirs, limit_seconds)


def addressed(work: Work, server: Server) -> Work:
    """Return the work with the way to its server."""
    return replace(
        work,
        url=server.url,
        ca_file=server.ca_file,
        counter=server.counter,
        server_pids=server.pids,
    )


def eased(work: Work) -> Work:
    """Return the work of the pair that warms up: fewer objects, or a small one."""
    if work.num_objects == 1:
        return work.warm_up()
    return replace(work, num_objects=max(1, round(work.num_objects * WARM_UP_SHARE)))


def is_hopeless(pairs: Sequence[Pair]) -> bool:
    """Whether a match may as well end: a pair took too long, or several failed."""
    samples = [sample for pair in pairs for sample in (pair.ours, pair.theirs)]
    num_failed = sum(bool(pair.ours.error or pair.theirs.error) for pair in pairs)
    return num_failed >= MAX_FAILED or any(sample.is_too_slow for sample in samples)


def play(
    match: Match,
    servers: Callable[[ServerSpec], Server],
    *,
    num_pairs: int,
    has_warm_up: bool = True,
    limit_seconds: float,
    keep: Callable[[Pair], None],
    command: Sequence[str] = COMMAND,
) -> list[Pair]:
    """Play a match and return its pairs.

    Args:
        match: The two contenders.
        servers: Gives the server for a spec, and starts it where it must.
        num_pairs: Pairs that count.
        has_warm_up: Whether one pair goes before that does not count.
        limit_seconds: Time that one contender may take to warm up, and again to be measured.
        keep: Called with each pair as soon as it was played.
        command: What a contender's process runs.
    """
    ours = addressed(match.ours.work, servers(match.ours.server))
    theirs = addressed(match.theirs.work, servers(match.theirs.server))
    pairs: list[Pair] = []
    for index in range(num_pairs + has_warm_up):
        is_warm_up = has_warm_up and index == 0
        works = (eased(ours), eased(theirs)) if is_warm_up else (ours, theirs)
        first, second = asyncio.run(play_pair(*works, limit_seconds, command))
        pair = Pair(index=index, is_warm_up=is_warm_up, ours=first, theirs=second)
        keep(pair)
        pairs.append(pair)
        if is_hopeless(pairs):
            break
    return pairs
