"""Servers of other projects, each with a keeper, which ends it and removes what it stored."""

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

__all__ = ["free_ports", "kept"]

_HERE = Path(__file__).resolve().parent
_START_SECONDS = 100.0


def free_ports(count: int) -> list[int]:
    """Return ports on which nobody listens, and which are given to nobody else for a minute.

    On each a connection has just ended, of which the kernel keeps a trace: who asks for any port is
    not given this one, and a server, which binds it by its number, is.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            asking = stack.enter_context(socket.create_connection(listening.getsockname()))
            listening.accept()[0].close()
            asking.recv(1)  # the server's end has closed first, and keeps the trace
            ports.append(listening.getsockname()[1])
    return ports


@contextmanager
def kept(command: Sequence[str], directory: Path, url: str) -> Iterator[int]:
    """Run a server until the end of the block, and give its process's id when it answers.

    Raises:
        RuntimeError: It ended, or did not answer in time; says what it printed.
    """
    # Nothing that it stored is kept, and to end in order takes it ten seconds.
    ending = str(int(signal.SIGKILL))
    keeper = [sys.executable, "-I", "-S", str(_HERE / "_keeper.py"), ending, str(directory)]
    log = directory / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603  our own command
            [*keeper, *command],
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
    """Tell whether a process has, which its keeper has not yet taken away."""
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
            if exc.code < 500:  # it refuses who has no keys
                return
        except OSError:
            pass
        else:
            return
        time.sleep(0.05)
    told = log.read_text(errors="replace")[-300:].strip() if log.exists() else ""
    raise RuntimeError(f"{url} did not begin to answer: {told or 'it said nothing'}")
