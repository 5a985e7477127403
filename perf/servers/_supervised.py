"""Start of servers of other projects, under a supervisor that stops them (`_supervisor.py`)."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["free_ports", "run_supervised"]

_HERE = Path(__file__).resolve().parent
_START_SECONDS = 100.0


def free_ports(count: int) -> list[int]:
    """Return free ports that the kernel assigns to no other process for a minute.

    A connection of each port has just been closed and is in TIME_WAIT. The kernel does not assign
    such a port to a process that binds port 0, but a server can bind the port by its number.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(listening.getsockname()))
            listening.accept()[0].close()
            client.recv(1)  # the server closed first, so its port is in TIME_WAIT
            ports.append(listening.getsockname()[1])
    return ports


@contextmanager
def run_supervised(command: Sequence[str], directory: Path, url: str) -> Iterator[int]:
    """Run a server during a `with` block; yield its process id when it responds.

    Raises:
        RuntimeError: The server exited or did not respond in time; the message has its output.
    """
    # SIGKILL: the data is deleted anyway, and an orderly exit takes ten seconds.
    ending = str(int(signal.SIGKILL))
    supervisor = [sys.executable, "-I", "-S", str(_HERE / "_supervisor.py"), ending, str(directory)]
    log = directory / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603  our own command
            [*supervisor, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline() or 0)
        _wait(pid, url, log)
        yield pid
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _has_ended(pid: int) -> bool:
    """Return whether a process has exited; its supervisor may not have waited for it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def _wait(pid: int, url: str, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and not _has_ended(pid):
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310  http to our own server
        except urllib.error.HTTPError as exc:
            if exc.code < 500:  # the server runs and rejects the request without credentials
                return
        except OSError:
            pass
        else:
            return
        time.sleep(0.05)
    output = log.read_text(errors="replace")[-300:].strip() if log.exists() else ""
    raise RuntimeError(f"{url} did not respond; output of the server: {output or 'none'}")
