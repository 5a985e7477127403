"""Ranks of one gloo group, forked from one process, so that PyTorch is imported once.

A rank reads commands from a pipe, one JSON line each, and writes the results, one JSON line each.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class Ranks:
    """Starts the ranks at the start of a `with` block, and stops them at its end.

    Args:
        module: Module that the ranks run; it calls `run`.
        world_size: Number of ranks.
        endpoint_url: Url of the server of their bucket.
    """

    def __init__(self, module: str, world_size: int, endpoint_url: str) -> None:
        self._command = [sys.executable, "-m", module]
        self._world_size = world_size
        self._endpoint_url = endpoint_url
        self._lines: list[IO[str]] = []
        self._answers: list[queue.SimpleQueue[str]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        # The ranks connect through a file: another process could bind a port that is free now.
        self._folder = tempfile.TemporaryDirectory(prefix="aioflux-ranks-")
        pipes = [(os.pipe(), os.pipe()) for _ in range(self._world_size)]
        theirs = [(commands[0], answers[1]) for commands, answers in pipes]
        settings = {"meeting": str(Path(self._folder.name) / "meeting"), "pipes": theirs}
        self._process = subprocess.Popen(
            [*self._command, json.dumps(settings)],
            env={**os.environ, "STORAGE_EMULATOR_HOST": self._endpoint_url, "OMP_NUM_THREADS": "1"},
            pass_fds=[end for both in theirs for end in both],
            start_new_session=True,
        )
        for end in (end for both in theirs for end in both):
            os.close(end)
        for commands, answers in pipes:
            self._lines.append(open(commands[1], "w"))
            self._answers.append(queue.SimpleQueue())
            thread = threading.Thread(target=self._read, args=(answers[0], self._answers[-1]))
            thread.start()
            self._threads.append(thread)
        try:
            assert self._collect() == ["ready"] * self._world_size
        except BaseException:
            self.close()
            raise
        return self

    @staticmethod
    def _read(descriptor: int, answers: queue.SimpleQueue[str]) -> None:
        with open(descriptor) as lines:
            for line in lines:
                answers.put(line.strip())

    def _collect(self) -> list[str]:
        return [each.get(timeout=PATIENCE_SECONDS) for each in self._answers]

    def tell(self, **command: Any) -> list[dict[str, Any]]:
        """Run a command on all ranks at the same time, and return their results."""
        for lines in self._lines:
            lines.write(json.dumps(command) + "\n")
            lines.flush()
        return [json.loads(answer) for answer in self._collect()]

    def close(self) -> None:
        """Close the input of the ranks, which ends them; kill them if they do not exit."""
        for lines in self._lines:
            with contextlib.suppress(BrokenPipeError):
                lines.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for thread in self._threads:
                thread.join()
            self._folder.cleanup()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run(do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Fork the ranks that the command line describes; in a rank, return when its input ends."""
    settings = json.loads(sys.argv[1])
    pipes: list[tuple[int, int]] = settings["pipes"]
    children = []
    for rank in range(len(pipes)):
        child = os.fork()
        if child == 0:
            # An open copy of another rank's pipe would keep the pipe open after that rank exits.
            for other in (end for at, both in enumerate(pipes) if at != rank for end in both):
                os.close(other)
            _be(rank, pipes[rank], len(pipes), settings["meeting"], do)
            return
        children.append(child)
    for end in (end for both in pipes for end in both):
        os.close(end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(next((code for code in codes if code), 0))


def _be(
    rank: int,
    pipes: tuple[int, int],
    world_size: int,
    meeting: str,
    do: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with open(pipes[0]) as commands, open(pipes[1], "w") as answers:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
        )
        answers.write("ready\n")
        answers.flush()
        for line in commands:
            answers.write(json.dumps(do(json.loads(line))) + "\n")
            answers.flush()
        dist.destroy_process_group()
