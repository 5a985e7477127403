"""Processes for tests of the Checkpointer, and the Checkpointer that they use."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aioflux import RetryPolicy, Timeouts
from aioflux import checkpoint as _checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioflux.testing import GCSServer

ROOT = Path(__file__).parents[3]

SLOW = Timeouts(connect_seconds=120, progress_seconds=120, idle_seconds=280)
"""Timeouts that a request does not reach if the machine stalls for a while."""

FAST = RetryPolicy(max_attempts=2, initial_seconds=0.01)

STUBBORN = RetryPolicy(max_attempts=100_000, initial_seconds=0.01, max_seconds=0.05)
"""Retries until the test removes the fault, so that the test controls how long a save waits."""


class Clock:
    """A monotonic clock that can be made to run faster."""

    def __init__(self) -> None:
        self.factor = 1

    def __call__(self) -> float:
        return self.factor * time.monotonic()

    def __reduce__(self) -> tuple[object, ...]:
        return partial, (time.monotonic,)  # the uploader process uses the system's clock


class Checkpointer(_checkpoint.Checkpointer):
    """A Checkpointer with long limits for clean-up, because machines may stall, and short polls."""

    clock = Clock()
    upload_settings = replace(
        _checkpoint.Checkpointer.upload_settings,
        cleanup_seconds=240.0,
        max_poll_seconds=0.2,
        clock=clock,
    )


class Forks:
    """Client of the process `fork_server`; see the fixture `forks`."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._answers = self._control.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.checkpoint.manager.fork_server",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._answers.close()
        self._control.close()
        self._process.wait()

    def call(self, request: Any, *fds: int) -> int:
        """Send one request, and return the response."""
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        return int(self._answers.readline())

    def fork(self, task: str, server: GCSServer, *arguments: Any, fds: Sequence[int]) -> int:
        """Fork a process that runs a task, and return its process id.

        Args:
            task: Name of the task in `fork_server.TASKS`.
            server: The server of its bucket.
            arguments: Arguments of the task.
            fds: Descriptors for its standard input, output and error; the last may be omitted.
        """
        environment = getattr(server, "environment", {"STORAGE_EMULATOR_HOST": server.url})
        return self.call([task, environment, *arguments], *fds)


class Forked:
    """One forked process.

    Args:
        forks: The process that forks.
        task: Name of the task in `fork_server.TASKS`.
        server: The server of its bucket.
        arguments: Arguments of the task.
        errors: File for its standard error; by default the standard error of the tests.

    Attributes:
        pid: Process id.
        stdin: Its standard input.
        stdout: Its standard output.
    """

    def __init__(
        self,
        forks: Forks,
        task: str,
        server: GCSServer,
        *arguments: Any,
        errors: Path | None = None,
    ) -> None:
        self._forks = forks
        self._code: int | None = None
        (its_stdin, stdin), (stdout, its_stdout) = os.pipe(), os.pipe()
        self.stdin, self.stdout = open(stdin, "w"), open(stdout)  # noqa: SIM115  see `end`
        with ExitStack() as theirs:
            fds = [its_stdin, its_stdout]
            for fd in fds:
                theirs.callback(os.close, fd)
            if errors is not None:
                fds.append(theirs.enter_context(errors.open("w")).fileno())
            self.pid = forks.fork(task, server, *arguments, fds=fds)

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for its exit, and return the exit status, or the negative number of a signal."""
        if self._code is None:
            self._code = self._forks.call(self.pid)
        return self._code

    def end(self) -> None:
        self.kill()
        self.stdin.close()
        self.stdout.close()


class Rank(Forked):
    """One process of `rank_task`."""

    def __init__(
        self, forks: Forks, server: GCSServer, rank: int, world_size: int, rendezvous: str
    ) -> None:
        super().__init__(forks, "obey", server, rank, world_size, rendezvous)

    def send(self, name: str, **arguments: Any) -> None:
        self.stdin.write(json.dumps([name, arguments]) + "\n")
        self.stdin.flush()

    def receive(self) -> Any:
        return json.loads(self.stdout.readline())

    def call(self, name: str, **arguments: Any) -> Any:
        self.send(name, **arguments)
        result = self.receive()
        assert result[0], result
        return result[1]


class Ranks:
    """The processes of all ranks."""

    def __init__(self, forks: Forks, server: GCSServer, world_size: int, folder: Path) -> None:
        rendezvous = f"file://{folder}/rendezvous"
        self.all = [Rank(forks, server, rank, world_size, rendezvous) for rank in range(world_size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.all:
            each.end()

    def send(self, name: str, **arguments: Any) -> list[Any]:
        """Run a command on all ranks, and return their results or errors."""
        for each in self.all:
            each.send(name, **arguments)
        return [each.receive() for each in self.all]

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Run a command on all ranks, check that it succeeded, and return the results."""
        results = self.send(name, **arguments)
        assert all(each[0] for each in results), results
        return [each[1] for each in results]


def wait_until(is_so: Callable[[], object], seconds: float = 240) -> None:
    """Wait until another process or thread makes a condition true."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.02)


def uploader_of(pid: int) -> int:
    """Wait until a process has an uploader process, and return the id of the newest.

    That of an earlier test may not have exited yet.
    """
    wait_until(lambda: find_uploaders(pid))
    return max(find_uploaders(pid))


def find_uploaders(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        with suppress(OSError):  # the thread or the process has exited meanwhile
            found += [
                int(number)
                for number in children.read_text().split()
                if b"uploader_main" in Path(f"/proc/{number}/cmdline").read_bytes()
            ]
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs that is not a child of this process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:  # the process has exited, or this system has no /proc
        return not Path("/proc/self/stat").exists()
    return status.rpartition(")")[2].split()[0] != "Z"
