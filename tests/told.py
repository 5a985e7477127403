"""Processes that do what a test tells them, forked from one that has imported PyTorch for all.

A process is asked by name, with arguments that JSON can say, and answers whether it went well and
what came of it.
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

    Do = Callable[..., Any]

__all__ = ["Told"]

PROCESSES = multiprocessing.get_context("forkserver")
FAR_SECONDS = 120.0

# Where another room of tests asks for other modules, they have PyTorch among them.
PROCESSES.set_forkserver_preload(["torch.distributed", "torch.utils.data", "aioflux.compat.nebula"])


class Told:
    """One process.

    Args:
        open_desk: Called in the process, with `settings`; returns what answers `(name, arguments)`.
        environment: Variables on top of those of this process.
        settings: What JSON can say.
    """

    def __init__(
        self,
        open_desk: Callable[..., Do],
        environment: dict[str, str] | None = None,
        /,
        **settings: Any,
    ) -> None:
        self._ours, its = PROCESSES.Pipe()
        arguments = (open_desk, {**os.environ, **(environment or {})}, settings, its)
        self.process = PROCESSES.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        its.close()

    def tell(self, name: str, /, **arguments: Any) -> Self:
        """Begin to have something done."""
        self._ours.send_bytes(json.dumps([name, arguments]).encode())
        return self

    def hear(self) -> tuple[bool, Any]:
        """Wait for what came of it; the first answer is `(True, "ready")`."""
        is_well, told = json.loads(self._ours.recv_bytes())
        return is_well, told

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Have something done that goes well, and return what came of it."""
        is_well, told = self.tell(name, **arguments).hear()
        assert is_well, told
        return told

    def end(self, number: signal.Signals | None = None) -> int:
        """Let it end, or end it by a signal; return its exit status."""
        if number is not None and self.process.pid is not None:
            os.kill(self.process.pid, number)
        self._ours.close()
        self.process.join(FAR_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        status = self.process.exitcode
        assert status is not None
        return status


def _serve(
    open_desk: Callable[..., Do], environment: dict[str, str], settings: Any, asked: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)

    def answer(*told: Any) -> None:
        asked.send_bytes(json.dumps(told).encode())

    do = open_desk(**settings)
    answer(True, "ready")
    while True:
        try:
            name, arguments = json.loads(asked.recv_bytes())
        except EOFError:
            break
        try:
            told = (True, do(name, **arguments))
        except Exception as exc:
            told = (False, f"{type(exc).__name__}: {exc}")
        answer(*told)
    _leave_group()


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
