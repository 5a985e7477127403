"""Processes that run commands of a test, forked from a process that has imported PyTorch.

A command has a name and JSON arguments; its result is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Handler = Callable[..., Any]

__all__ = ["WorkerProcess"]

PROCESSES = multiprocessing.get_context("forkserver")
FAR_SECONDS = 120.0

# If another test package has set other preloads before, they include PyTorch, too.
PROCESSES.set_forkserver_preload(["torch.distributed", "torch.utils.data", "aioflux.compat.nebula"])


class WorkerProcess:
    """One process.

    Args:
        open_worker: Called in the process, with `settings`; returns the handler of
            `(name, **arguments)`.
        environment: Variables on top of those of this process.
        settings: Values that JSON can hold.
    """

    def __init__(
        self,
        open_worker: Callable[..., Handler],
        environment: dict[str, str] | None = None,
        /,
        **settings: Any,
    ) -> None:
        self._connection, remote = PROCESSES.Pipe()
        arguments = (open_worker, {**os.environ, **(environment or {})}, settings, remote)
        self.process = PROCESSES.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        remote.close()

    def send(self, name: str, /, **arguments: Any) -> Self:
        """Start a command."""
        self._connection.send_bytes(json.dumps([name, arguments]).encode())
        return self

    def receive(self) -> tuple[bool, Any]:
        """Wait for `(succeeded, result)` of a command; the first is `(True, "ready")`."""
        succeeded, result = json.loads(self._connection.recv_bytes())
        return succeeded, result

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a command that succeeds, and return its result."""
        succeeded, result = self.send(name, **arguments).receive()
        assert succeeded, result
        return result

    def end(self, number: signal.Signals | None = None) -> int:
        """Send it a signal if one is given, close its connection, and return its exit status."""
        if number is not None and self.process.pid is not None:
            os.kill(self.process.pid, number)
        self._connection.close()
        self.process.join(FAR_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        status = self.process.exitcode
        assert status is not None
        return status


def _serve(
    open_worker: Callable[..., Handler],
    environment: dict[str, str],
    settings: Any,
    connection: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)

    def reply(*result: Any) -> None:
        connection.send_bytes(json.dumps(result).encode())

    handle = open_worker(**settings)
    reply(True, "ready")
    while True:
        try:
            name, arguments = json.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            result = (True, handle(name, **arguments))
        except Exception as exc:
            result = (False, f"{type(exc).__name__}: {exc}")
        reply(*result)
    _leave_group()


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
