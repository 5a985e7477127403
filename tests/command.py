"""The command `aioflux`, run in this process."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from aioflux.cli import main

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_command(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    before = signal.getsignal(signal.SIGINT)  # the command sets its own
    try:
        with (
            mock.patch.object(sys, "argv", ["aioflux", *arguments]),
            pytest.raises(SystemExit) as exited,
        ):
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(exited.value.code, int)
    return exited.value.code
