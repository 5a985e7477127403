"""Entry point of `python -m aioflux`, which is the command `aioflux`."""

from __future__ import annotations

import sys

from aioflux.cli import main

if __name__ == "__main__":
    sys.exit(main())
