"""The command `aioflux`, run in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.cli import _app

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_command(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    return _app.run_app(list(arguments))
