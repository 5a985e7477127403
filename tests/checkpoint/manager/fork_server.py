"""A process that has imported torch, and forks those that tests ask for: the import takes seconds.

    python -m tests.checkpoint.manager.fork_server <descriptor of a socket>

Each message is one request as JSON, with the descriptors that a new process gets for its first
ones; each answer is a number.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from typing import Any

import torch
import torch._dynamo  # what cuts a tensor by ranks imports it, and would do so in each of them

from tests.checkpoint.manager import rank_task, trainer

TASKS = {each.__name__: each for each in (rank_task.obey, trainer.train, trainer.leave)}


def begin(
    control: socket.socket, fds: list[int], name: str, environment: dict[str, str], *arguments: Any
) -> None:
    """Do in a process that was just forked what it was forked for; it ends as any program does."""
    control.close()
    for at, fd in enumerate(fds):
        os.dup2(fd, at)
        os.close(fd)
    os.environ.update(environment)
    TASKS[name](*arguments)


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # forked processes leave its memory as it is
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
