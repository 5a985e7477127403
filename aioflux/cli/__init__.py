"""The command `aioflux`: one module per command; the work on objects is done by the store.

Exit status: 0 success, 1 a failure said in one line on stderr, 2 wrong usage, 130 Ctrl-C.

The environment variable AIOFLUX_DEBUG (any text but "0"), as the option `--debug`, shows the
traceback of a failure.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command and exit."""
    _open_standard_streams()
    # Until a command runs there is nothing to clean up, and an exception that Ctrl-C raises within
    # an import can get lost there.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        from aioflux.cli._app import run_app

        status = run_app()
    except ModuleNotFoundError as exc:
        if exc.name not in {"typer", "rich"}:
            raise
        sys.exit('aioflux: the command needs typer and rich: pip install "aioflux[cli]"')
    sys.exit(status)


def _open_standard_streams() -> None:
    """Occupy the descriptors of standard streams that are closed, such as by `>&-` of a shell.

    They would be given to the first connection. Input and output are opened the wrong way round, so
    that reads and writes fail as they should; messages are not missed.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDWR)):
        try:
            os.fstat(descriptor)
        except OSError as exc:
            if exc.errno != errno.EBADF:
                raise
            # The lowest one that is free: this one.
            os.open(os.devnull, mode)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  it stays for good
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  it stays for good
