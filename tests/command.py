"""The command `aioflux`, run in this process."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from aioflux.cli import main

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_command(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    # The command sets its own handler.
    handler, argv = signal.getsignal(signal.SIGINT), sys.argv
    sys.argv = ["aioflux", *arguments]
    try:
        main()  # always exits
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, handler)
