"""The command `aioflux`: one module per command; the work on objects is done by the store.

Exit status: 0 success, 1 a failure said in one line on stderr, 2 wrong usage, 130 Ctrl-C.

The environment variable AIOFLUX_DEBUG (any text but "0"), as the option `--debug`, shows the
traceback of a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command and exit."""
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
