"""Processes that tests start, and the Checkpointer that is tested in them."""

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
"""For a machine that stands still for a while: no request is given up for that."""

FAST = RetryPolicy(max_attempts=2, initial_seconds=0.01)

STUBBORN = RetryPolicy(max_attempts=100_000, initial_seconds=0.01, max_seconds=0.05)
"""Asks until a fault is taken back: as long as a test wants, a refused request holds up a save."""


class Clock:
    """A monotonic clock that can be made to run faster."""

    def __init__(self) -> None:
        self.factor = 1

    def __call__(self) -> float:
        return self.factor * time.monotonic()

    def __reduce__(self) -> tuple[object, ...]:
        return partial, (time.monotonic,)  # the process that uploads has that of the system


class Checkpointer(_checkpoint.Checkpointer):
    """One that waits for its clean-up on a machine that stands still, and polls often."""

    clock = Clock()
    upload_settings = replace(
        _checkpoint.Checkpointer.upload_settings,
        cleanup_seconds=240.0,
        max_poll_seconds=0.2,
        clock=clock,
    )


class Forks:
    """The process that forks others; see the fixture `forks`."""

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
        """Send one request, and return the answer."""
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        return int(self._answers.readline())

    def fork(self, task: str, server: GCSServer, *arguments: Any, fds: Sequence[int]) -> int:
        """Fork a process that does a task of `fork_server.TASKS`, and return its number.

        Args:
            task: The name of it.
            server: The server of its bucket.
            arguments: Arguments of the task.
            fds: Its standard input, output and errors, as many as it is to be given.
        """
        places = getattr(server, "environment", {"STORAGE_EMULATOR_HOST": server.url})
        return self.call([task, places, *arguments], *fds)


class Forked:
    """One process that was forked.

    Args:
        forks: What forks it.
        task: What it does; one of `fork_server.TASKS`.
        server: The server of its bucket.
        arguments: Arguments of the task.
        errors: File that its errors go to; those of the tests by default.

    Attributes:
        pid: Its number.
        stdin: Its input.
        stdout: Its output.
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
        """Wait for its end, and return its exit status, or the signal's number below 0."""
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
    """Processes that save together."""

    def __init__(self, forks: Forks, server: GCSServer, world_size: int, folder: Path) -> None:
        rendezvous = f"file://{folder}/rendezvous"
        self.all = [Rank(forks, server, rank, world_size, rendezvous) for rank in range(world_size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.all:
            each.end()

    def send(self, name: str, **arguments: Any) -> list[Any]:
        """Send all the same command, and return the result of each."""
        for each in self.all:
            each.send(name, **arguments)
        return [each.receive() for each in self.all]

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Send all the same command, which succeeds on each, and return the results."""
        results = self.send(name, **arguments)
        assert all(each[0] for each in results), results
        return [each[1] for each in results]


def wait_until(is_so: Callable[[], object], seconds: float = 240) -> None:
    """Wait for what another process or thread does."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def uploader_of(pid: int) -> int:
    """Return the process that uploads for a process, once there is one."""
    found = find_uploaders(pid)
    while not found:
        time.sleep(0.02)
        found = find_uploaders(pid)
    return found[0]


def find_uploaders(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        with suppress(OSError):  # the thread, or the process, has ended since
            found += [
                int(number)
                for number in children.read_text().split()
                if b"uploader_main" in Path(f"/proc/{number}/cmdline").read_bytes()
            ]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process that is not our child runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:  # it has ended since, or this system has no such files
        return not Path("/proc/self/stat").exists()
    return status.rpartition(")")[2].split()[0] != "Z"
