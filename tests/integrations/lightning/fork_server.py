"""A fork server, so that not every process imports Lightning, which takes 8 s.

`python -m tests.integrations.lightning.fork_server` imports it once, and forks for each line of
JSON on its standard input:

    {"job": "killed", "args": [...], "env": {...}, "num_ranks": 1, "log": path}

It returns the exit statuses of the ranks. A job is a function of `jobs`, or of another module:
`package.module:name`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self


class ForkServer:
    """Client of a process that forks processes for jobs."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.lightning.fork_server"],
            cwd=Path(__file__).parents[3],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "TMPDIR": str(directory),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, job: str, *args: str, log: Path, num_ranks: int = 1, **env: str) -> list[int]:
        """Run a job in its own processes, and return their exit statuses."""
        request = {"job": job, "args": args, "env": env, "num_ranks": num_ranks, "log": str(log)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        statuses: list[int] = json.loads(self._process.stdout.readline())
        return statuses


def run_rank(request: dict[str, Any], rank: int) -> None:
    """Run a job in a forked process."""
    descriptor = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(request["env"], LOCAL_RANK=str(rank))
    status = 1
    try:
        module, _, name = request["job"].rpartition(":")
        job = getattr(importlib.import_module(module), name) if module else getattr(jobs, name)
        job(*request["args"])
        status = 0
    except BaseException:  # shown in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for rank in range(request["num_ranks"]):
            child = os.fork()
            if not child:
                run_rank(request, rank)
            children.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    from tests.integrations.lightning import jobs

    main()
    os._exit(0)  # nothing needs clean-up, and an orderly exit of Lightning takes seconds
