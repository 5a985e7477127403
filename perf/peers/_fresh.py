"""Reads of one object by fresh processes: the operation `first_get`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["first_gets"]


def first_gets(program: str, work: Work) -> int:
    """Run a program once for each object, one process after the other, and return the bytes read.

    The program receives the url of the server, the uri of the bucket, the name of the bucket and
    the key. It prints the number of bytes that it has read. Python may store its bytecode, as in an
    installation: the warm-up then compiles the modules.

    Raises:
        RuntimeError: The program failed; the message is the last line of its standard error.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    total = 0
    for key in work.each_key():
        ended = subprocess.run(  # noqa: S603  our own program
            [sys.executable, "-c", program, work.url, work.uri(), work.bucket, key],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            reason = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the fresh process of {work.peer} failed: {reason}")
        total += int(ended.stdout)
    return total
