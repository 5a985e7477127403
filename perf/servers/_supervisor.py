"""Supervisor of one server: stops the server and deletes its directory when the parent exits.

`python _supervisor.py <signal> <directory> <command> ...` runs the server until standard input
closes, which also happens when the parent is killed. It then sends the signal (a number) to the
server. The server also exits when the supervisor dies. This module imports only the standard
library, so that it starts fast.
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
    """Ask the kernel to end this process when the supervisor dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise(ending: int, directory: str, command: list[str]) -> int:
    """Run the command until standard input closes; return the exit status of the supervisor."""
    process = subprocess.Popen(  # noqa: S603  our own command
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=_end_with_parent,
    )
    try:
        print(process.pid, flush=True)
        # If the server fails at its start, the parent notices it and closes the pipe.
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
    # Ignore Ctrl-C: the supervisor waits for the exit of its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
