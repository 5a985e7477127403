"""Run of one match: two contenders alternate (A B A B), each sample in a separate process.

The two processes of a pair start and warm up at the same time. Then one process is measured while
the other waits.
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
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from typing import IO

    from perf.scenarios import Match
    from perf.servers import Server, ServerSpec
    from perf.work import Work

__all__ = [
    "COMMAND",
    "MAX_FAILED",
    "SampleError",
    "addressed",
    "is_hopeless",
    "last_error",
    "play",
    "play_pair",
    "warm_up_work",
]

MAX_FAILED = 2
"""Number of failed pairs after which a match stops."""
COMMAND = (sys.executable, "-m", "perf.work")
"""Command of a contender's process, without its arguments: the work, and `--wait`."""
_ROOT = Path(__file__).resolve().parent.parent
"""Working directory in which `python -m perf.work` finds the package `perf`."""
MAX_ERROR = 300
"""Maximum length of a reported error, in characters."""
WARM_UP_SHARE = 0.1
"""Number of objects of the first pair, as a share of the number of the other pairs."""


class SampleError(Exception):
    """A contender's process failed."""


def last_error(text: str) -> str:
    """Return the error of the last traceback in the output of a process, or the last line."""
    _, found, traceback = text.strip().rpartition("Traceback (most recent call last):\n")
    lines = traceback.splitlines()
    if not found:
        return lines[-1][:MAX_ERROR] if lines else ""
    error = dropwhile(lambda line: line.startswith(" "), lines)
    return " ".join(line.strip() for line in error)[:MAX_ERROR]


@dataclass(frozen=True)
class _Contender:
    """The process of one sample."""

    process: Process
    errors: IO[bytes]
    """Standard error of the process."""

    async def ready(self) -> None:
        """Wait until the process has warmed up."""
        assert self.process.stdout is not None
        if (await self.process.stdout.readline()).strip() != b"ready":
            await self._fail()

    async def result(self) -> Result:
        """Start the measurement, and wait for its result."""
        output, _ = await self.process.communicate(b"go\n")
        if self.process.returncode:
            await self._fail()
        return Result.from_json(json.loads(output.splitlines()[-1]))

    async def _fail(self) -> None:
        """Raise the last error that the process printed."""
        code = await self.process.wait()
        self.errors.seek(0)
        error = last_error(self.errors.read().decode(errors="replace"))
        raise SampleError(error or f"exited with status {code}")


@asynccontextmanager
async def _start(command: Sequence[str], work: Work) -> AsyncIterator[_Contender]:
    """Start a contender; at the end of the block the process and its children are killed."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(asdict(work)),
            "--wait",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=_ROOT,
            # A separate process group, so that its children can be killed with it.
            start_new_session=True,
        )
        try:
            yield _Contender(process, errors)
        finally:
            with suppress(ProcessLookupError):  # all of them have exited
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _limited(
    act: Awaitable[Result | None], work: Work, limit_seconds: float, verb: str
) -> Sample | None:
    """Return the sample of a warm-up, which has none unless it failed, or of a measurement."""
    try:
        async with asyncio.timeout(limit_seconds):
            result = await act
    except SampleError as exc:
        return Sample(work=work, error=str(exc))
    except TimeoutError:
        error = f"had not {verb} after {limit_seconds:g} s"
        return Sample(work=work, error=error, is_too_slow=True)
    return Sample(work=work, result=result) if result else None


async def play_pair(
    ours: Work, theirs: Work, limit_seconds: float, command: Sequence[str] = COMMAND
) -> tuple[Sample, Sample]:
    """Warm up both contenders, then measure one after the other."""
    async with AsyncExitStack() as stack:
        contenders = [
            (await stack.enter_async_context(_start(command, work)), work)
            for work in (ours, theirs)
        ]
        warmed_up = await asyncio.gather(
            *(_limited(each.ready(), work, limit_seconds, "warmed up") for each, work in contenders)
        )
        first, second = [
            failed or await _limited(each.result(), work, limit_seconds, "ended")
            for failed, (each, work) in zip(warmed_up, contenders, strict=True)
        ]
    assert first is not None
    assert second is not None
    return first, second


def addressed(work: Work, server: Server) -> Work:
    """Return the work with the address of its server."""
    return replace(
        work,
        url=server.url,
        ca_file=server.ca_file,
        counter=server.counter,
        server_pids=server.pids,
    )


def warm_up_work(work: Work) -> Work:
    """Return the work of the warm-up pair: fewer objects, or a small object."""
    if work.num_objects == 1:
        return work.warm_up()
    return replace(work, num_objects=max(1, round(work.num_objects * WARM_UP_SHARE)))


def is_hopeless(pairs: Sequence[Pair]) -> bool:
    """Return whether to stop a match early: a sample took too long, or several pairs failed."""
    samples = [sample for pair in pairs for sample in (pair.ours, pair.theirs)]
    num_failed = sum(bool(pair.ours.error or pair.theirs.error) for pair in pairs)
    return num_failed >= MAX_FAILED or any(sample.is_too_slow for sample in samples)


def play(
    match: Match,
    servers: Callable[[ServerSpec], Server],
    *,
    num_pairs: float,
    has_warm_up: bool = True,
    limit_seconds: float,
    keep: Callable[[Pair], None],
    command: Sequence[str] = COMMAND,
) -> list[Pair]:
    """Run a match and return its pairs.

    Args:
        match: The two contenders.
        servers: Returns the running server for a spec.
        num_pairs: Number of pairs that count.
        has_warm_up: Run one more pair first, which does not count.
        limit_seconds: Time limit of the warm-up of a contender, and also of its measurement.
        keep: Called with each pair when it is complete.
        command: Command of a contender's process.
    """
    ours = addressed(match.ours.work, servers(match.ours.server))
    theirs = addressed(match.theirs.work, servers(match.theirs.server))
    pairs: list[Pair] = []
    for index in range(int(num_pairs) + has_warm_up):
        is_warm_up = has_warm_up and index == 0
        works = (warm_up_work(ours), warm_up_work(theirs)) if is_warm_up else (ours, theirs)
        first, second = asyncio.run(play_pair(*works, limit_seconds, command))
        pair = Pair(index=index, is_warm_up=is_warm_up, ours=first, theirs=second)
        keep(pair)
        pairs.append(pair)
        if is_hopeless(pairs):
            break
    return pairs
