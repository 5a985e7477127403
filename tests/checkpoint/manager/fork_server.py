"""A process that imports torch once and forks processes for tests: the import takes seconds.

    python -m tests.checkpoint.manager.fork_server <descriptor of a socket>

A request is a JSON list (task, environment, arguments) with file descriptors, which become
descriptors 0, 1, ... of the new process; the response is its process id. A request that is a
process id waits for the process; the response is its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from typing import Any

import torch
import torch._dynamo  # DTensor imports it; imported here, forked processes do not import it again

from tests.checkpoint.manager import rank_task, trainer

TASKS = {each.__name__: each for each in (rank_task.obey, trainer.train, trainer.leave)}


def begin(
    control: socket.socket, fds: list[int], name: str, environment: dict[str, str], *arguments: Any
) -> None:
    """Run a task in a process that was just forked."""
    control.close()
    for at, fd in enumerate(fds):
        os.dup2(fd, at)
        os.close(fd)
    os.environ.update(environment)
    TASKS[name](*arguments)


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # garbage collection in forked processes then does not copy shared pages
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not data:
            return
        request = json.loads(data)
        if isinstance(request, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        else:
            answer = os.fork()
            if not answer:
                begin(control, fds, *request)
                return
            for fd in fds:
                os.close(fd)
        control.sendall(b"%d\n" % answer)


if __name__ == "__main__":
    main()
