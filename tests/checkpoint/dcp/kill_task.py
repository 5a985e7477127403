"""A process that forks a child for each save: a test can kill a save, and torch is imported once.

    python -m tests.checkpoint.dcp.kill_task <uri>

Each line of standard input is the seed of a state to save under the same uri. For each save, the
process prints two lines: the process id of the child, and later its exit code.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from aioflux import TransferOptions
from aioflux.checkpoint.dcp import StorageWriter
from tests.patience import PATIENT

MIB = 1024 * 1024


def state_of(seed: int) -> dict[str, Any]:
    """Three objects of several parts each."""
    return {str(at): torch.full((3 * MIB // 4, 2), 10.0 * seed + at) for at in range(3)}


def save(uri: str, seed: int) -> None:
    writer = StorageWriter(
        uri,
        objects_per_rank=3,
        transfer=TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB),
        timeouts=PATIENT,
    )
    dcp.save(state_of(seed), storage_writer=writer, no_dist=True)


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


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
        answer(pid)
        answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main(sys.argv[1])
