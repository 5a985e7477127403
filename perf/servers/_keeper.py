"""Keeps one server: ends it, and removes what it stored, when its own parent does.

`python _keeper.py <signal> <directory> <command> ...` runs until standard input closes, which
happens however the parent ends; the server is then sent the signal, by its number. It imports the
standard library alone, so that it starts at once. The server ends with the keeper, too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 10.0


def _end_with_parent() -> None:
    """Have the kernel end this process when the keeper dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def keep(ending: int, directory: str, command: list[str]) -> int:
    """Run the command until standard input closes or it ends; return its exit status."""
    process = subprocess.Popen(  # noqa: S603  our own command
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=_end_with_parent,
    )
    try:
        print(process.pid, flush=True)
        # A server that fails at the start is seen by the parent, which then closes the pipe.
        while os.read(0, 4096):
            pass
        return 0
    finally:
        process.send_signal(ending)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    # Ctrl-C is meant for the parent, whose end is the sign here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(keep(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
