"""Forks a process for each save, so that one can be killed without another import of PyTorch.

    python -m tests.checkpoint.dcp.kill_task <uri>

Each line of the input is the seed of the state that is saved over the last one, followed by one
that says `kill` when it is time, or `wait`; then a line of the output tells how it ended.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from aioflux import TransferOptions
from aioflux.checkpoint.dcp import StorageWriter

MIB = 1024 * 1024


def state_of(seed: int) -> dict[str, Any]:
    """Three objects of several parts each."""
    return {str(at): torch.full((MIB, 2), 10.0 * seed + at) for at in range(3)}


def save(uri: str, seed: int) -> None:
    writer = StorageWriter(
        uri,
        objects_per_rank=3,
        transfer=TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB),
    )
    dcp.save(state_of(seed), storage_writer=writer, no_dist=True)


def main(uri: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                save(uri, int(line))
                code = 0
            finally:
                os._exit(code)
        if sys.stdin.readline().strip() == "kill":
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
