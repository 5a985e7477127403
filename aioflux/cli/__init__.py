"""The command `aioflux`: a module or package for each command, listed in `_app`.

Exit status: 0 success, 1 an error (one line on stderr), 2 wrong usage, 130 Ctrl-C.

The environment variable AIOFLUX_DEBUG (any text but "0") has the effect of `--debug`: errors are
shown with their traceback.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command and exit."""
    _open_standard_streams()
    gc.set_threshold(50_000)  # imports and listings make many objects, and few cycles
    # Until a command runs there is nothing to clean up, and code that is being imported may
    # swallow a KeyboardInterrupt.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        from aioflux.cli._app import run_app

        status = run_app()
    except ModuleNotFoundError as exc:
        if exc.name not in {"typer", "rich"}:
            raise
        from aioflux._values.distribution import pip_install

        sys.exit(f"Error: the command needs typer and rich: {pip_install('cli')}")
    # Exclude what was imported from the collections at exit, a fifth of the CPU time of `ls`.
    gc.freeze()
    sys.exit(status)


def _open_standard_streams() -> None:
    """Open descriptors 0 to 2 if they are closed (`>&-` in a shell).

    Otherwise the next socket that is opened would get one of these numbers. Standard input is
    opened for writing and standard output for reading, so that using them is an error; messages
    on stderr are discarded.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDWR)):
        try:
            os.fstat(descriptor)
        except OSError as exc:
            if exc.errno != errno.EBADF:
                raise
            # `os.open` returns the lowest free descriptor, which is `descriptor`.
            os.open(os.devnull, mode)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  stays open
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  stays open
