"""Saves and loads with torch.distributed.checkpoint, by one process or by several ranks.

`python -m perf.ranks '<json>'` runs one rank of a gloo group. The rank reads tasks from standard
input, one JSON line for each, and prints a line after each task.
"""

from __future__ import annotations

import atexit
import importlib
import json
import socket
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as sharding
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from perf.states import state_of

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["Task", "do", "prepare"]

_WIDTH = 2048


@dataclass(frozen=True, kw_only=True)
class Task:
    """An operation of all ranks."""

    peer: str
    """Module below `perf.peers`: its `writer(task)` and `reader(task)` return a StorageWriter and a
    StorageReader of DCP."""
    operation: str
    """`save_dcp` or `load_dcp`."""
    url: str
    """Root url of the server."""
    bucket: str
    """Bucket on the server."""
    dtype: str
    """Dtype of the tensors."""
    size_bytes: int
    """Size of all tensors of all ranks."""
    world_size: int
    """Ranks that save."""

    @property
    def uri(self) -> str:
        """Uri of the checkpoint."""
        return f"gs://{self.bucket}/{self.prefix}"

    @property
    def prefix(self) -> str:
        """Prefix of the checkpoint; loads do not read the checkpoint of a measured save."""
        place = "saved" if self.operation == "save_dcp" else "read"
        return f"dcp/{self.peer}/{self.world_size}-{self.dtype}-{self.size_bytes}/{place}"

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the tensors of one rank, with about as many rows as the tensors of models.

        DCP creates a tensor of all row numbers to plan the load of a shard. With 100 million rows,
        this would take most of the time of every contender.
        """
        own = state_of(self.dtype, self.size_bytes // self.world_size)
        return {
            name: each.view(-1, _WIDTH) if each.ndim == 1 and each.numel() % _WIDTH == 0 else each
            for name, each in own.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the state of this rank to save."""
        own = self._own()
        if self.world_size == 1:
            return dict(own)
        mesh = _mesh(self.world_size)
        return {name: DTensor.from_local(each, mesh, [Shard(0)]) for name, each in own.items()}

    def target(self) -> dict[str, Any]:
        """Return tensors to load into; their memory is written."""
        if self.world_size == 1:
            own = self._own()
            return {name: torch.zeros_like(each).fill_(1) for name, each in own.items()}
        mesh, target = _mesh(self.world_size), {}
        for name, each in self._own().items():
            sizes = (each.shape[0] * self.world_size, *each.shape[1:])
            made = sharding.zeros(*sizes, dtype=each.dtype, device_mesh=mesh, placements=[Shard(0)])
            made.to_local().fill_(1)
            target[name] = made
        return target


@cache
def _mesh(num_ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(num_ranks)))


_targets: dict[Task, dict[str, Any]] = {}


def _prepare(task: Task) -> None:
    """Create the input of the measured part: the state, and for a load the checkpoint."""
    if task.operation == "save_dcp":
        task.state()
    elif task not in _targets:
        peer: Any = importlib.import_module(f"perf.peers.{task.peer}")
        dcp.save(task.state(), storage_writer=peer.writer(task))
        _targets.clear()
        _targets[task] = task.target()


def _perform(task: Task) -> None:
    peer: Any = importlib.import_module(f"perf.peers.{task.peer}")
    if task.operation == "save_dcp":
        dcp.save(task.state(), storage_writer=peer.writer(task))
    else:
        _prepare(task)
        dcp.load(_targets[task], storage_reader=peer.reader(task))


class _Ranks:
    """The processes of all ranks."""

    def __init__(self, world_size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._processes = [
            subprocess.Popen(  # noqa: S603  our own command
                [sys.executable, "-m", "perf.ranks", json.dumps([rank, world_size, port])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        atexit.register(self._close)

    def run(self, verb: str, task: Task) -> None:
        """Run a task on all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([verb, asdict(task)]) + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"a rank exited with status {process.wait()}")

    def _close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@cache
def _ranks(world_size: int) -> _Ranks:
    return _Ranks(world_size)


def _task(work: Work) -> Task:
    return Task(
        peer=work.peer,
        operation=work.operation,
        url=work.url,
        bucket=work.bucket,
        dtype=work.dtype,
        size_bytes=work.size_bytes,
        world_size=max(1, work.num_workers),
    )


def _run(verb: str, task: Task) -> None:
    if task.world_size > 1:
        _ranks(task.world_size).run(verb, task)
        return
    with warnings.catch_warnings():  # DCP warns if there is no process group
        warnings.simplefilter("ignore")
        _VERBS[verb](task)


def prepare(work: Work) -> None:
    """Create the input of the work, before the measured part."""
    _run("prepare", _task(work))


async def do(work: Work) -> int:
    """Save a state, or load it into existing tensors; return the bytes of all tensors."""
    _run("perform", _task(work))
    return work.size_bytes


_VERBS = {"prepare": _prepare, "perform": _perform}


def main() -> None:
    """Run one rank."""
    rank, world_size, port = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    init = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    for line in sys.stdin:
        verb, fields = json.loads(line)
        task = Task(**fields)
        dist.barrier()
        _VERBS[verb](task)
        dist.barrier()
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
